// Reads packed weights (kernel/triton/packed.py): copies to shared memory, numbers of 4 or 8 bits as
// bfloat16 pairs, scales. packed_skinny.py puts it before packed_staging.cuh; it uses
// the macros of packed_skinny.cu.

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned;
using u64 = unsigned long long;

enum { INT4, FP4, FP8, INT8 };                              // KIND
enum { FLOAT32, BFLOAT16, FLOAT16, E4M3, EXPONENT };        // SCALE
enum { NONE, SILU, GELU, CLAMPED };                         // GATE

constexpr int THREADS = WARPS * 32, COLUMNS = 8;
constexpr bool IS_BYTE = KIND >= FP8;
constexpr int PIECE = IS_BYTE ? 16 : 32, CHUNK = 4 * PIECE;  // inputs; a piece has 16 bytes
constexpr int WORDS = 4, VECTORS = PIECE / 8;  // of a piece: words of numbers, vectors of x
constexpr bool FLOATS = KIND == FP4 || KIND == FP8;
constexpr bool FACTORED = KIND == FP4;  // numbers are multiplied by their scales
constexpr bool SCALED = GROUP > 0 && !FACTORED;
// If groups are smaller than a chunk, an instruction must not mix them. Then a thread takes a word
// of each of four pieces instead of a whole piece.
constexpr bool NARROW = SCALED && GROUP < CHUNK;
constexpr int PARTS = NARROW ? 4 : 1;   // of a chunk, which have scales of their own
constexpr bool OFFSETS = KIND == INT4;
constexpr int SHIFT = OFFSETS ? 128 : 0;  // what decoding adds
constexpr bool FINISHED = SCALED || OFFSETS;  // sums of a part are finished before they are added
constexpr int TILE = GATE == NONE && !SIDES ? 16 : 8;  // outputs
constexpr int ROWS_OF_X = SIDES ? 4 : 8;               // columns of an instruction
constexpr int TURN = SIDES ? 2 : 1;                    // chunks of a warp's turn
constexpr int SCALE_BYTES = SCALE == FLOAT32 ? 4 : SCALE >= E4M3 ? 1 : 2;
constexpr bool HAS_SCALES = GROUP > 0;
constexpr int STAGE_BYTES = 1024;             // of a warp
constexpr int SCALE_ROWS = ROWS == 1 ? 8 : 1;  // of 8 outputs
constexpr int BLOCKS = SIDES ? 1 : 2;         // of 8 outputs that a tile has scales of
constexpr int COLUMN = 20;  // sums of a warp: a column has 16 and padding
constexpr int CHAINS = FACTORED ? 2 : 1;  // of instructions that add to the same sums
constexpr int MAX_PAIRS = 64;
constexpr int BATCH = PLAIN ? 6 : 3;  // vectors of x that a thread loads at once

static_assert(!SCALED || GROUP >= 32, "not a group of packed_skinny.py");
static_assert(ROWS == 1 || ROWS % 8 == 0, "not a block of packed_skinny.py");
static_assert(!SIDES || GATE == NONE, "gate and up are the two chunks");
static_assert(!FACTORED || GROUP == 32 || GROUP == 16, "groups of fp4");
static_assert(!IS_BYTE || !(NARROW || ZEROS || MIDDLE), "not numbers of packed_skinny.py");

__device__ u32 shared_address(const void* pointer) {
  u64 address;
  asm("cvta.to.shared.u64 %0, %1;" : "=l"(address) : "l"(pointer));
  return u32(address);
}

// Copies 16 bytes; where `there` is false, zeros.
__device__ void copy_16(u32 to, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(there ? 16 : 0)
               : "memory");
}

// Copies 4 or 8 bytes.
template <int BYTES>
__device__ void copy(u32 to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(BYTES)
               : "memory");
}

__device__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int PENDING>
__device__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

__device__ uint4 load_16(u32 from) {
  uint4 x;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(from)
               : "memory");
  return x;
}

__device__ u32 load_4(u32 from) {
  u32 x;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(from) : "memory");
  return x;
}

__device__ u32 load_2(u32 from) {
  u16 x;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(x) : "r"(from) : "memory");
  return x;
}

__device__ u32 load_1(u32 from) {
  u32 x;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(x) : "r"(from) : "memory");
  return x;
}

__device__ void store_4(u32 to, float x) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(x) : "memory");
}

__device__ void store_16(u32 to, uint4 x) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x.x), "r"(x.y), "r"(x.z),
               "r"(x.w)
               : "memory");
}

__device__ float number(u32 bits) { return __uint_as_float(bits << 16); }

__device__ u32 round(float low, float high) {
  u32 word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}

__device__ float rounded(float x) { return __uint_as_float(round(0, x) & 0xffff0000u); }

// a * b + c of pairs.
__device__ u32 fma_2(u32 a, u32 b, u32 c) {
  u32 d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

__device__ void multiply(float (&sums)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// (a & b) | c, in one instruction: with constants the compiler makes two.
__device__ u32 and_or(u32 a, u32 b, u32 c) {
  u32 d;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

// Numbers i and i + 4 of a word, or of bytes i and i + 2.
template <int I>
__device__ u32 decode(u32 word, u32 factor) {
  if constexpr (KIND == INT4) {
    return and_or(word >> 4 * I, 0x000f000fu, 0x43004300u);
  } else if constexpr (KIND == FP8) {
    const u32 value = I == 0 ? word << 4 : word >> 4, sign = I == 0 ? word << 8 : word;
    return and_or(value, 0x07f007f0u, sign & 0x80008000u);
  } else if constexpr (KIND == INT8) {  // 128 + the low seven bits - (128, or 256 if negative)
    const u32 own = word >> 8 * I;
    return fma_2(and_or(own, 0x00800080u, 0x43004300u), 0xbf80bf80u,
                 and_or(own, 0x007f007fu, 0x43004300u));
  } else {
    const u32 value = I == 0 ? word << 6 : I == 1 ? word << 2 : I == 2 ? word >> 2 : word >> 6;
    const u32 sign = I == 0 ? word << 12 : I == 1 ? word << 8 : I == 2 ? word << 4 : word;
    return fma_2(and_or(value, 0x01c001c0u, sign & 0x80008000u), factor, 0x80008000u);
  }
}

// The group of an input; the last one behind the row's end, where a piece or part may lie.
__device__ int group_of(int input, int groups) {
  if constexpr (GROUP == 0) return 0;
  const int group = input / (GROUP > 0 ? GROUP : 1);
  return group < groups ? group : groups - 1;
}

// A scale in shared memory.
__device__ float scale_at(u32 from) {
  if constexpr (SCALE == FLOAT32) return __uint_as_float(load_4(from));
  if constexpr (SCALE == BFLOAT16) return number(load_2(from));
  if constexpr (SCALE == EXPONENT) return __uint_as_float(load_1(from) << 23);
  if constexpr (SCALE == E4M3) {
    const u32 bits = load_1(from);
    return __uint_as_float((bits & 0x7f) << 20 | (bits & 0x80) << 24) * 0x1p120f;
  }
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(u16(load_2(from))));
  return value;
}

// scale * 2^60 twice, in bfloat16.
__device__ u32 factor_at(u32 from) {
  if constexpr (SCALE == EXPONENT) {
    const u32 exponent = load_1(from) + 60;
    return (exponent < 254 ? exponent : 254) * 0x00800080u;
  }
  const float factor = scale_at(from) * 0x1p60f;
  return round(factor, factor);
}

__device__ float sigmoid(float x) {
  float power, result;
  asm("ex2.approx.f32 %0, %1;" : "=f"(power) : "f"(x * -1.4426950408889634f));
  asm("rcp.approx.f32 %0, %1;" : "=f"(result) : "f"(1 + power));
  return result;
}

// activation(gate) * up; each step is rounded, as if it were a tensor. alpha, limit: of a clamped gate.
__device__ float gated(float gate, float up, float alpha, float limit) {
  gate = rounded(gate), up = rounded(up);
  if constexpr (GATE == CLAMPED) {
    gate = fminf(gate, limit);
    up = rounded(fminf(fmaxf(up, -limit), limit) + 1);
    return rounded(gate * rounded(sigmoid(rounded(gate * alpha)))) * up;
  }
  float active = gate * sigmoid(gate);
  if constexpr (GATE == GELU) {
    active = gate * sigmoid(2 * 0.7978845608028654f * (gate + 0.044715f * gate * gate * gate));
  }
  return rounded(active) * up;
}

