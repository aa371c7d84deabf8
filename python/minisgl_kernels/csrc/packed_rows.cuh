// The four rows of a thread in packed weights (minisgl_zoo/weights/packed.py), for packed_grouped.cu.
//
// A thread decodes 8 or 16 bytes of each row in a batch. The order of inputs is free, so x comes with
// its columns in the order in which decoding yields the weights' (`input_at`). The outputs of GATED are
// the next GEMM's x, so they are written in that order, too, but not with STREAM.
//
// Sums of weights whose groups have scales (SCALED) are kept in units of the group's scale. When the
// group changes, they are multiplied by the ratio of the two. Numbers of int4 whose scales have 16 bits
// (DEQUANTISED) are multiplied by them first, and rounded.
//
// x and the outputs of GATED are multiplied by X_UNIT, and decoding multiplies floats by a power of
// two as well: so all products stay normal numbers.
//
// Behind decode.cuh and grouped_tiles.cuh, with KIND, SCALE, GROUP, ROWS, ZEROS, MIDDLE and OUTER
// defined.

constexpr bool FLOATS = KIND == FP4 || KIND == FP8;
constexpr bool DEQUANTISED = KIND == INT4 && GROUP > 0 && SCALE != F32;
constexpr bool SCALED = GROUP > 0 && !FACTORED && !DEQUANTISED;
static_assert(!GROUPED || DEQUANTISED);
constexpr int PIECE = INPUTS / 4;      // inputs of a thread's 16 bytes in a turn
constexpr int PERIODS = SCALED && GROUP > PERIOD ? GROUP / PERIOD : 1;  // of a group
// Scales of a row that a thread uses in a period.
constexpr int PARTS = FACTORED ? PIECE / (GROUP ? GROUP : PIECE) : SCALED && GROUP < PERIOD ? 2 : 1;
constexpr float X_UNIT = FLOATS ? 0x1p60f : 1;
constexpr float UNIT = KIND == FP8 ? 0x1p60f : KIND == FP4 ? 0x1p6f : 1;  // of sums
constexpr float LEAST_SCALE = 0x1p-80f;  // stands for 0, whose ratio to the next scale is infinite

static_assert(INPUTS == (IS_BYTE ? 64 : 128) && ROW_BYTES == 64, "a piece has 16 bytes");
static_assert(!SCALED || GROUP % (IS_BYTE ? 64 : 128) == 0, "a batch has one group");
static_assert(!FACTORED || GROUP == 32 || GROUP == 16, "groups of fp4");
static_assert(!DEQUANTISED || GROUP % PIECE == 0, "a thread's piece has one group");

// The input, and the row of weights whose output it is, that has place `place` in x.
__device__ int input_at(int place) {
  const int step = place % INPUTS / 16, half = place / 8 % 2, piece = place / 2 % 4, far = place % 2;
  const int inside = IS_BYTE ? step * 4 + half + far * 2
                             : step / 2 * 8 + step % 2 * 2 + half + far * 4;
  return place / INPUTS * INPUTS + piece * PIECE + inside;
}

// What a thread reads of its four rows of weights beside their numbers, for a period.
struct PeriodScales {
  u32 bits[4][PARTS], zeros[4];
};

// The four rows of weights of a thread: two of the tile's first half, two of its second.
struct Rows {
  int local[4];         // of the expert's outputs
  int in_box[2];        // of a half
  long long scale[4];   // index of a row's scales, `groups` each
  long long number[4];  // of all weights' rows

  __device__ Rows(const Task& task, const Tile& tile) {
    const int place = threadIdx.x / 128 * 64 + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
    const int total = task.outputs * (GATED ? 2 : 1);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = GATED && !STREAM ? input_at(place + i % 2 * 8) : place + i % 2 * 8;
      if (i < 2) in_box[i] = row;
      local[i] = tile.block * OUTPUTS + row + (GATED ? 0 : i / 2 * BOX);
      const int there = local[i] < task.outputs ? local[i] : task.outputs - 1;
      number[i] = (long long)tile.expert * total + there + (GATED ? i / 2 * task.outputs : 0);
      scale[i] = number[i] / ROWS * task.groups;
    }
  }
};

__device__ u32 scale_bits(const Task& task, long long index) {
  if constexpr (SCALE == F32) return ((const u32*)task.scale)[index];
  if constexpr (SCALE == EXPONENT || SCALE == E4M3) return task.scale[index];
  return ((const u16*)task.scale)[index];
}

__device__ void load_scales(PeriodScales& scales, const Task& task, const Rows& rows, int period) {
  if constexpr (GROUP == 0 || GROUPED) return;
  const int piece = period * 4 + threadIdx.x % 4;
  const int first = FACTORED ? piece * PARTS : DEQUANTISED ? piece * PIECE / GROUP : period * PARTS / PERIODS;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      const int group = min(first + part, task.groups - 1);
      scales.bits[i][part] = scale_bits(task, rows.scale[i] + group);
      if (ZEROS) scales.zeros[i] = task.zero[rows.scale[i] + group];
    }
  }
}

// GROUPED: loads the scales of a turn from its stage.
__device__ void load_scales(PeriodScales& scales, const Rows& rows, unsigned stage) {
  const int group = threadIdx.x % 4 * PIECE / SCALED_INPUTS;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int half = i / 2, row = rows.in_box[i % 2];
    u16 scale, zero;
    asm volatile("ld.shared.u16 %0, [%1];"
                 : "=h"(scale)
                 : "r"(stage + SCALES_AT + half * SCALES_BYTES + in_box<SCALES_ROW>(group, row * 2))
                 : "memory");
    scales.bits[i][0] = scale;
    if constexpr (ZEROS) {
      asm volatile("ld.shared.u8 %0, [%1];"
                   : "=h"(zero)
                   : "r"(stage + FACTORS_AT + half * FACTORS_BYTES + in_box<FACTORS_ROW>(group, row))
                   : "memory");
      scales.zeros[i] = zero;
    }
  }
}

// Loads the words of a batch from a row of 64 bytes, which is swizzled. second: the words behind the
// first ones of a thread's 16 bytes.
__device__ void load_words(u32 (&words)[IS_BYTE ? 4 : 2], unsigned weights, int row, bool second) {
  const unsigned from = weights + row * 64 + ((threadIdx.x % 4 ^ row / 2 % 4) << 4);
  if constexpr (IS_BYTE) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(from)
                 : "memory");
  } else {
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                 : "=r"(words[0]), "=r"(words[1])
                 : "r"(from + second * 8)
                 : "memory");
  }
}

// What `decode` multiplies by, or adds (int4).
__device__ u32 factor_or_zero(const PeriodScales& scales, int row, int part) {
  if constexpr (FACTORED) return factor_of(scales.bits[row][part]);
  if constexpr (KIND == INT4) return 0xc300c300u + (ZEROS ? scales.zeros[row] : MIDDLE) * 0x00010001u;
  return 0;
}

// Twice the bfloat16 next to a scale, and twice the rest of a float16, which has three bits more.
struct Factor {
  u32 near, rest;

  __device__ explicit Factor(u32 bits) : near(bits * 0x00010001u), rest(0) {
    if constexpr (SCALE == F16) {
      const float scale = scale_of(bits);
      near = round(scale, scale);
      rest = round(scale - low(near), scale - low(near));
    }
  }
};

// Two numbers of a word, without their zero; of DEQUANTISED times their scale. The product with the
// rest is exact, so the number is rounded once.
template <int I>
__device__ u32 centred(u32 word, u32 zero, const Factor& scale) {
  constexpr u32 NO = 0x80008000u;
  const u32 pair = decode<I>(word, zero);
  if constexpr (KIND != INT4) return pair;
  const u32 own = fma_2(pair, 0x3f803f80u, zero);
  if constexpr (!DEQUANTISED) return own;
  return fma_2(own, scale.near, SCALE == F16 ? fma_2(own, scale.rest, NO) : NO);
}

// Decodes row `ROW`, 0 or 1, of a half from step K on.
template <int ROW, int K = 0>
__device__ void decode_row(u32 (&a)[BATCH][4], const u32 (&words)[IS_BYTE ? 4 : 2], u32 zero,
                           const Factor& scale) {
  if constexpr (K < BATCH) {
    constexpr int WORD = IS_BYTE ? K : K / 2, I = IS_BYTE ? 0 : K % 2 * 2;
    a[K][ROW] = centred<I>(words[WORD], zero, scale);
    a[K][ROW + 2] = centred<I + 1>(words[WORD], zero, scale);
    decode_row<ROW, K + 1>(a, words, zero, scale);
  }
}

// second: whether it is the second batch of its period.
__device__ __forceinline__ void decode_batch(Operands& a, const Rows& rows, PeriodScales& scales,
                                             unsigned stage, bool second) {
  if constexpr (GROUPED) {
    if (!second) load_scales(scales, rows, stage);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int part = PARTS == 2 && second;
    u32 words[IS_BYTE ? 4 : 2], more[IS_BYTE ? 4 : 2];
    load_words(words, stage + half * W_BYTES / 2, rows.in_box[0], second);
    load_words(more, stage + half * W_BYTES / 2, rows.in_box[1], second);
    const int row = half * 2;
    decode_row<0>(a[half], words, factor_or_zero(scales, row, part), Factor(scales.bits[row][0]));
    decode_row<1>(a[half], more, factor_or_zero(scales, row + 1, part), Factor(scales.bits[row + 1][0]));
  }
}

// Puts the sums, which are in units of `units`, in units of other scales.
template <int COUNT>
__device__ __forceinline__ void rescale(float (&sums)[2][COUNT], float (&units)[4],
                                        const PeriodScales& scales, int part) {
  float ratios[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float scale = scale_of(scales.bits[i][part]);
    const float now = fabsf(scale) < LEAST_SCALE ? LEAST_SCALE : scale;
    asm("div.full.f32 %0, %1, %2;" : "=f"(ratios[i]) : "f"(units[i]), "f"(now));
    units[i] = now;
  }
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    sums[0][i] *= ratios[i / 2 % 2];
    sums[1][i] *= ratios[2 + i / 2 % 2];
  }
}
