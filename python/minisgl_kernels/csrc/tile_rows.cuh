// The four rows of a thread in weights of GGUF files (tile_numbers.cuh), for packed_grouped.cu.
//
// A warp has a tile of 16 rows of each half; the registers of the matrix instructions of a warpgroup are
// those of its four tiles. Numbers are multiplied by their scale and rounded, as if they were
// dequantised. x comes with the columns of each 16 in the order of the lanes.
//
// Behind tile_numbers.cuh and grouped_tiles.cuh.

constexpr bool SCALED = false;
constexpr int PARTS = 1, PERIODS = 1;
constexpr float X_UNIT = 1, UNIT = 1;

static_assert(INPUTS == 128 && ROW_BYTES == 16 * BITS && TILED, "a turn is two steps of each tile");

struct PeriodScales {};  // they come with the numbers

// The four rows of weights of a thread: two of the tile's first half, two of its second.
struct Rows {
  int local[4];         // of the expert's outputs
  long long number[4];  // of all weights' rows
  int in_box;           // of a half's tiles

  __device__ Rows(const Task& task, const Tile& tile) {
    in_box = threadIdx.x / 32;  // 0 to 3 of the first warpgroup, 4 to 7 of the second
    const int total = task.outputs * (GATED ? 2 : 1);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = in_box * 16 + threadIdx.x % 32 / 4 + i % 2 * 8;
      local[i] = tile.block * OUTPUTS + row + (GATED ? 0 : i / 2 * BOX);
      const int there = local[i] < task.outputs ? local[i] : task.outputs - 1;
      number[i] = (long long)tile.expert * total + there + (GATED ? i / 2 * task.outputs : 0);
    }
  }
};

__device__ void load_scales(PeriodScales&, const Task&, const Rows&, int) {}

// Two numbers times their scale, minus the offset.
__device__ u32 value_of(u32 pair, float scale, float offset) {
  return round(fmaf(low(pair), scale, -offset), fmaf(high(pair), scale, -offset));
}

// second: whether it is the second batch of its period.
__device__ __forceinline__ void decode_batch(Operands& a, const Rows& rows, const PeriodScales&,
                                             unsigned stage, bool second) {
  const int g = threadIdx.x % 32 / 4, of_scales = IS_K ? 0 : second * SCALES_ROW / 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    Numbers numbers;
    Scales scales;
    scales.load_factors(stage + FACTORS_AT + half * FACTORS_BYTES + in_box<FACTORS_ROW>(
                            rows.in_box, second * FACTORS_ROW / 2 + g * 2 * FACTORS), 0);
    scales.load_halves(stage + SCALES_AT + half * SCALES_BYTES + in_box<SCALES_ROW>(
                           rows.in_box, of_scales + g * 4 * HALVES), 0);
    numbers.load(stage + half * W_BYTES / 2 + (rows.in_box * 2 + second) * TILE_BYTES, threadIdx.x % 32);
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float scale, offset;
        scales.get(r, group, scale, offset);
        offset += ADDED * scale;
#pragma unroll
        for (int j = group * GROUP / 16; j < (group + 1) * GROUP / 16; ++j) {
          a[half][j][r] = value_of(numbers.decoded(r, j, 0), scale, offset);
          a[half][j][r + 2] = value_of(numbers.decoded(r, j, 1), scale, offset);
        }
      }
    }
  }
}
