// Copies packed weights to shared memory and reads their scales there. packed_skinny.py puts it behind
// hopper.cuh, decode.cuh and gate.cuh; it uses the macros of packed_skinny.cu.

constexpr int THREADS = WARPS * 32, COLUMNS = 8;
constexpr int PIECE = IS_BYTE ? 16 : 32, CHUNK = 4 * PIECE;  // inputs; a piece has 16 bytes
constexpr int WORDS = 4, VECTORS = PIECE / 8;  // of a piece: words of numbers, vectors of x
constexpr bool FLOATS = KIND == FP4 || KIND == FP8;
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
constexpr int SCALE_BYTES = SCALE == F32 ? 4 : SCALE >= E4M3 ? 1 : 2;
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

// Copies 4 or 8 bytes.
template <int BYTES>
__device__ void copy(u32 to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(BYTES)
               : "memory");
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

__device__ void multiply(float (&sums)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The group of an input; the last one behind the row's end, where a piece or part may lie.
__device__ int group_of(int input, int groups) {
  if constexpr (GROUP == 0) return 0;
  const int group = input / (GROUP > 0 ? GROUP : 1);
  return group < groups ? group : groups - 1;
}

// The bits of a scale in shared memory.
__device__ u32 scale_bits(u32 from) {
  if constexpr (SCALE == F32) return load_4(from);
  if constexpr (SCALE == EXPONENT || SCALE == E4M3) return load_1(from);
  return load_2(from);
}

__device__ float scale_at(u32 from) { return scale_of(scale_bits(from)); }

__device__ u32 factor_at(u32 from) { return factor_of(scale_bits(from)); }
