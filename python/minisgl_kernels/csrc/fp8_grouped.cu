// Multiplies tiles of grouped GEMMs (grouped_tiles.cuh) by fp8 weights with a scale for each block of
// 128 x 128, on fp8 tensor cores. x is fp8, with a scale for each 128 inputs of a row.
//
// A turn has 128 inputs. The products of a half of the tile are summed by themselves, multiplied by
// both scales and added to the tile's sums in float32: the tensor cores add with fewer bits
// (DeepSeek-V3, 2024, section 3.3.2). While one warpgroup adds, the other multiplies.
//
// Behind gate.cuh and grouped_tiles.cuh, with GATE defined.

constexpr int SCALE_BLOCK = 128;

// Returns the scales of a half's weights, one for each turn: 128 rows of weights have the same. A half
// behind the last row gets the last scales.
__device__ const float* scales_of(const Task& task, int row) {
  const int blocks = task.outputs * (GATED ? 2 : 1) / SCALE_BLOCK * task.experts;
  return (const float*)task.scale + (long long)min(row / SCALE_BLOCK, blocks - 1) * task.groups;
}

// Adds a half's products of a turn, times both scales, to its sums.
template <int COUNT>
__device__ __forceinline__ void add(float (&sums)[COUNT], float (&products)[COUNT], float scale,
                                    const float* x_scales) {
  settle(products);
  const unsigned from = shared_address(x_scales + threadIdx.x % 4 * 2);
#pragma unroll
  for (int i = 0; i < COUNT; i += 4) {  // of 8 pairs
    float first, second;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                 : "=f"(first), "=f"(second)
                 : "r"(from + i * 8)
                 : "memory");
    first *= scale, second *= scale;
    sums[i] += products[i] * first;
    sums[i + 1] += products[i + 1] * second;
    sums[i + 2] += products[i + 2] * first;
    sums[i + 3] += products[i + 3] * second;
  }
}

template <int N>
__device__ __forceinline__ void multiply_tile(const Task& task, Shared& shared, unsigned stages,
                                              Stage& at, const TilePairs& tile_pairs) {
  const int group = threadIdx.x / 128;
  const Tile& tile = tile_pairs.tile;
  const int row = tile.expert * task.outputs * (GATED ? 2 : 1) + tile.block * OUTPUTS;
  const float* scales[2] = {scales_of(task, row), scales_of(task, row + (GATED ? task.outputs : BOX))};
  float sums[2][N / 2], products[N / 2];  // of both halves; of one
#pragma unroll
  for (int i = 0; i < N / 2; ++i) sums[0][i] = sums[1][i] = 0;
  float next[2] = {*scales[0], *scales[1]};
  for (int turn = 0; turn < task.groups; ++turn, at.advance()) {
    const float now[2] = {next[0], next[1]};
    wait(shared_address(&shared.full[at.index]), at.parity);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // x's rows were not bulk copies
    const unsigned stage = stages + at.index * STAGE_BYTES;
    const unsigned long long x = matrix(stage + W_BYTES);
    const unsigned long long weights = matrix(stage + group * 64 * 128);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      multiply_begin();
#pragma unroll
      for (int k = 0; k < 4; ++k) {  // 32 inputs, 32 bytes
        multiply(products, weights + half * (W_BYTES / 2 >> 4) + k * 2, x + k * 2, k > 0);
      }
      multiply_commit();
      if (turn + 1 < task.groups) next[half] = scales[half][turn + 1];
      multiply_wait();
      add(sums[half], products, now[half], shared.x_scales[at.index]);
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(shared_address(&shared.empty[at.index]));
  }

  const int output = tile.block * OUTPUTS + group * 64;
  if constexpr (GATED) {
    store<N>(task, shared, tile_pairs, output, 0, [&](int i, int) {
      return round(gated(sums[0][i], sums[1][i], task.alpha, task.limit),
                   gated(sums[0][i + 1], sums[1][i + 1], task.alpha, task.limit));
    });
  } else {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      store<N>(task, shared, tile_pairs, output + half * BOX, 0, [&](int i, int column) {
        return round(sums[half][i] * tile_pairs.scales[column],
                     sums[half][i + 1] * tile_pairs.scales[column + 1]);
      });
    }
  }
}
