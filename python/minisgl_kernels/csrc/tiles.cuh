// Packed weights of GGUF files in tiles (minisgl_zoo/gguf/tiles.py), in registers. For compute
// capability 8.0 and later. The host side (tiles.py) puts it behind hopper.cuh and before a kernel's
// file, with BITS, GROUP, BLOCK, STEPS, MIDDLE and TABLE defined, and what the kernel asks for.
//
// A tile has 16 outputs and 64 inputs: the registers of the left operand of m16n8k16, four times. So a
// warp loads it with whole lines, and no shared memory is between. Lane 4g + t has outputs g and g + 8
// (rows r), and of x columns 2t and 2t + 1 of each eight rows. Numbers become pairs of bfloat16 in two
// to five instructions, without rounding. The float32 sum of a group is multiplied by the group's
// scale. Where the format has steps, numbers are decoded with 128 added: this and the zeros are taken
// from the sums of x.

using u8 = unsigned char;
using u32 = unsigned;

struct Task {
  const u8 *numbers, *factors, *scales;
  const unsigned short* x;     // of many rows in the order of lanes
  const float* sums;           // of x, of many rows
  const unsigned short* bias;  // or null
  void* out;
  const int* ids;              // the outputs whose values are asked for, or null for all; EXPERTS: pairs' experts
  float* partial;              // sums of the blocks that share inputs
  int* done;                   // such blocks that have ended, of each part of out
  // EXPERTS, see tiles_few.cu.
  const int *counts, *pairs;
  const float* weights;
  int rows, outputs, inputs;
  int stride;                  // of a row of out
  int is_float;                // whether out is float32
  int experts, first, most, share;
};

constexpr int SPAN = 4;  // steps of a block of 256 inputs
constexpr bool IS_K = BLOCK == 256;
constexpr bool HAS_LOW = BITS >= 4 && BITS <= 6, IS_BYTE = BITS == 8;
constexpr int HIGH_BITS = BITS == 6 || BITS <= 3 ? 2 : 0;  // of the plane of two bits
constexpr bool HAS_TOP = BITS == 5 || BITS == 3;           // the plane of one bit
[[maybe_unused]] constexpr int TILE_BYTES = 128 * BITS;
constexpr int HALVES = (STEPS ? 2 : 1) * (IS_K ? 1 : 2);  // of a row: scales, then steps
constexpr int FACTORS = IS_K ? 64 / GROUP * (STEPS && GROUP == 32 ? 2 : 1) : 0;  // bytes of a row
constexpr int GROUPS = 64 / GROUP;

__device__ u32 fma_2(u32 a, u32 b, u32 c) {
  u32 d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

// (a & b) | c, in one instruction.
__device__ u32 and_or(u32 a, u32 b, u32 c) {
  u32 d;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

__device__ void multiply(float (&sums)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ float from_half(u32 bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"((unsigned short)bits));
  return value;
}

// Byte i of a word, in bits 8 to 15 of the float 2^15, minus `added`.
__device__ float from_byte(u32 word, int i, int added) {
  return __uint_as_float(__byte_perm(word, 0x47000000u, 0x7404 | i << 4)) - float(32768 + added);
}

// Four bytes of llama.cpp's table for the four numbers in the low half of a word.
__device__ u32 look_up(u32 word) {
  const u32 at = word & 0x7777u;
  const u32 low = __byte_perm(0xbfad9881u, 0xf6eaddcfu, at);   // -127 -104 -83 -65 -49 -35 -22 -10
  const u32 high = __byte_perm(0x26190d01u, 0x71594535u, at);  // 1 13 25 38 53 69 89 113
  return __byte_perm(low, high, and_or(word >> 1, 0x4444u, 0x3210u));
}

// Bytes i and i + 2 of a word, with their signs.
__device__ u32 of_bytes(u32 word, int i) {  // 128 + the low seven bits - (128, or 256 if negative)
  const u32 own = word >> 8 * i;
  return fma_2(and_or(own, 0x00800080u, 0x43004300u), 0xbf80bf80u,
               and_or(own, 0x007f007fu, 0x43004300u));
}

// Adds the bits of a plane to a pair: `width` bits that are at `from` in a word, to `at`.
__device__ u32 with_plane(u32 word, u32 pair, int width, int from, int at) {
  const u32 moved = from >= at ? word >> (from - at) : word << (at - from);
  return and_or(moved, ((1u << width) - 1) * 0x10001u << at, pair);
}

// Two numbers in shared memory.
__device__ void load_sums(float (&to)[2], u32 from) {
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(to[0]), "=f"(to[1]) : "r"(from) : "memory");
}

__device__ void load_2(u32* to, const void* from, int i) {
  const uint2 words = __ldcs(static_cast<const uint2*>(from) + i);
  to[0] = words.x, to[1] = words.y;
}

__device__ void load_4(u32* to, const void* from, int i) {
  const uint4 words = __ldcs(static_cast<const uint4*>(from) + i);
  to[0] = words.x, to[1] = words.y, to[2] = words.z, to[3] = words.w;
}

// A lane's numbers of a tile. Indices are constants wherever this is inlined.
struct Numbers {
  u32 low[IS_BYTE ? 8 : 4], high[2], top;

  __device__ void load(const u8* tile, int lane) {
    if constexpr (HAS_LOW || IS_BYTE) load_4(low, tile, lane);
    if constexpr (IS_BYTE) load_4(low + 4, tile + 512, lane);
    constexpr int TO_HIGH = HAS_LOW ? 512 : 0, TO_TOP = TO_HIGH + 128 * HIGH_BITS;
    if constexpr (HIGH_BITS != 0) load_2(high, tile + TO_HIGH, lane);
    if constexpr (HAS_TOP) top = __ldcs(reinterpret_cast<const u32*>(tile + TO_TOP) + lane);
  }

  // The numbers of row r and inputs 16j + 4t + 2h and the next: minus MIDDLE, or with steps plus 128.
  __device__ u32 pair(int r, int j, int h) const {
    const int q = 2 * j + h;
    if constexpr (IS_BYTE) return of_bytes(low[2 * j + r], h);
    const u32 word = low[j / 2 * 2 + r];
    if constexpr (TABLE) return of_bytes(look_up(word >> j % 2 * 16), h);
    u32 pair = 0x43004300u;
    if constexpr (HAS_LOW) pair = with_plane(word, pair, 4, q % 4 * 4, 0);
    if constexpr (HIGH_BITS != 0) pair = with_plane(high[r], pair, 2, 2 * q, HAS_LOW ? 4 : 0);
    if constexpr (HAS_TOP) pair = with_plane(top, pair, 1, q + 8 * r, HAS_LOW ? 4 : 2);
    return STEPS ? pair : fma_2(pair, 0x3f803f80u, (0xc300u + MIDDLE) * 0x10001u);
  }
};

// A lane's scales of a tile: of rows g and g + 8.
struct Scales {
  u32 factors[FACTORS == 4 ? 2 : 1], halves[HALVES];

  // block: of 256 inputs, in which the step is.
  __device__ void load(const Task& task, long long tile, int step, int block, int steps, int g) {
    const long long at = (tile * steps + step) * 8 + g;
    if constexpr (FACTORS == 4) load_2(factors, task.factors, at);
    if constexpr (FACTORS == 2) factors[0] = reinterpret_cast<const u32*>(task.factors)[at];
    const long long of_halves = IS_K ? (tile * (steps / SPAN) + block) * 8 + g : at;
    if constexpr (HALVES == 4) load_4(halves, task.scales, of_halves);
    if constexpr (HALVES == 2) load_2(halves, task.scales, of_halves);
    if constexpr (HALVES == 1) halves[0] = reinterpret_cast<const u32*>(task.scales)[of_halves];
  }

  // Float16 number i of row r.
  __device__ float half_of(int r, int i) const {
    const int at = r * HALVES + i;
    return from_half(halves[at / 2] >> at % 2 * 16);
  }

  // Byte i of row r, minus `added`; with formats of 2 bits a nibble of it.
  __device__ float byte_of(int r, int i, int added) const {
    if constexpr (BITS == 2) {
      const int at = r * FACTORS + i % GROUPS;
      const u32 nibble = factors[at / 4] >> (at % 4 * 8 + i / GROUPS * 4);
      return __uint_as_float(and_or(nibble, 15, 0x4b000000u)) - 0x1p23f;
    }
    const int at = r * FACTORS + i;
    return from_byte(factors[at / 4], at % 4, added);
  }

  // The scale of a group of a tile, and what is subtracted: step * zero, or 0.
  __device__ void get(int r, int group, float& scale, float& offset) const {
    offset = 0;
    if constexpr (!IS_K) {
      scale = half_of(r, group);
      if constexpr (STEPS) offset = half_of(r, 2 + group);
    } else {
      scale = half_of(r, 0) * byte_of(r, group, 128);
      if constexpr (STEPS) offset = half_of(r, 1) * byte_of(r, GROUPS + group, 0);
    }
  }
};

// The left operands of a group of a tile, its scales, and what is subtracted for each input.
struct Group {
  u32 a[GROUP / 16][4];
  float scale[2], offset[2];

  Group() = default;
  __device__ Group(const Numbers& numbers, const Scales& scales, int group) {
#pragma unroll
    for (int e = 0; e < GROUP / 16; ++e) {
#pragma unroll
      for (int n = 0; n < 4; ++n) a[e][n] = numbers.pair(n % 2, group * (GROUP / 16) + e, n / 2);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      scales.get(r, group, scale[r], offset[r]);
      if constexpr (STEPS) offset[r] += 128 * scale[r];
    }
  }

  // Adds the products with eight rows of x. x: of the tile's inputs. ones: the sums of x.
  __device__ void add(float (&totals)[4], const u32 (&x)[8], const float (&ones)[2], int group) const {
    float sums[4] = {};
#pragma unroll
    for (int e = 0; e < GROUP / 16; ++e) {
      const int at = 2 * (group * (GROUP / 16) + e);
      multiply(sums, a[e], x[at], x[at + 1]);
    }
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      totals[n] += scale[n / 2] * sums[n];
      if constexpr (STEPS) totals[n] -= offset[n / 2] * ones[n % 2];
    }
  }
};

// Writes a number of a row of x: a sum and, with GATE, that of its up.
__device__ void write(const Task& task, int row, int output, float total, [[maybe_unused]] float up) {
  if (task.bias != nullptr) total += number(task.bias[output]);
  const long long to = (long long)row * task.stride + output;
#if GATE
  if (task.bias != nullptr) up += number(task.bias[output + task.outputs]);
  static_cast<unsigned short*>(task.out)[to] = (unsigned short)gated<GATE == 2>(total, 0, up, 0);
#else
  if (task.is_float) {
    static_cast<float*>(task.out)[to] = total;
  } else {
    static_cast<unsigned short*>(task.out)[to] = (unsigned short)round(total, 0);
  }
#endif
}
