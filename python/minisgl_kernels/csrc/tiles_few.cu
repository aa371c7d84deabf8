// Products of up to 8 rows by packed weights, out[M, F] = x[M, D] w[F, D]^T. Behind tiles.cuh, with
// TILES, WARPS, BATCH, RESIDENT, GATE and EXPERTS defined.
//
// A block has TILES tiles of outputs, and each of its warps some of their inputs, in order. A warp
// loads the next BATCH steps while it multiplies by this one's. At the end the warps' sums are added
// up in shared memory.
//
// EXPERTS: weights are a stack of `experts` matrices, from expert `first` on. A pair is a token and one
// of its experts, and has a row of out; `share` pairs have a row of x together. A block has a chunk: up
// to 8 pairs of one expert, which are `counts` [experts] of `pairs` [experts, most]; or where `counts`
// is null one pair, whose expert is in `ids`. A row of out is multiplied by the pair's weight, if there
// are weights.

// What a batch loads of one tile of outputs.
struct Batch {
  Numbers numbers[BATCH];
  Scales scales[BATCH];

  __device__ void load(const Task& task, long long tile, int step, int steps, int lane) {
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      const int at = IS_K || step + i < steps ? step + i : step;
      numbers[i].load(task.numbers + (tile * steps + at) * TILE_BYTES, lane);
      scales[i].load(task.factors, task.scales, tile, at, step / SPAN, steps, lane / 4);
    }
  }
};

struct Chunk {
  int expert, first, count;  // pairs of the expert from `first` on; none behind the last chunk
};

// Returns a chunk by its number. All lanes of a warp call it.
[[maybe_unused]] __device__ Chunk chunk_of(const Task& task, int number, int lane) {
  if (task.counts == nullptr) {
    const int expert = task.ids[number] - task.first;
    return {expert, number, expert >= 0 && expert < task.experts};
  }
  int before = 0;  // chunks of the experts before these 32
  for (int first = 0; first < task.experts; first += 32) {
    const int count = first + lane < task.experts ? task.counts[first + lane] : 0;
    int end = (count + 7) / 8;
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0u, end, step);
      if (lane >= step) end += other;
    }
    end += before;
    const unsigned ends_later = __ballot_sync(~0u, end > number);
    if (ends_later) {
      const int found = __ffs(ends_later) - 1;
      const int there = __shfl_sync(~0u, count, found);
      const int at = 8 * (number - (__shfl_sync(~0u, end, found) - (there + 7) / 8));
      return {first + found, at, min(there - at, 8)};
    }
    before = __shfl_sync(~0u, end, 31);
  }
  return {};
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, RESIDENT)
    tiles_few(const __grid_constant__ Task task) {
  __shared__ float shared[WARPS][8][16 * TILES];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int steps = task.inputs / 64, spans = (steps + SPAN - 1) / SPAN;
  const int each = (spans + WARPS - 1) / WARPS * SPAN;
  const int first = min(warp * each, steps), last = min(first + each, steps);
  const int num_tiles = task.outputs / 16, blocks = GATE ? num_tiles : (num_tiles + TILES - 1) / TILES;
  const int block = blockIdx.x % blocks;
#if EXPERTS
#if __CUDA_ARCH__ >= 900
  let_next_begin();
  wait_for_kernel_before();
#endif
  const Chunk chunk = chunk_of(task, blockIdx.x / blocks, lane);
  const int rows = chunk.count;
  if (rows == 0) return;
  const long long first_tile = (long long)chunk.expert * num_tiles * (GATE ? 2 : 1);
  auto pair_of = [&](int row) {
    if (task.counts == nullptr) return chunk.first;
    return task.pairs[(long long)chunk.expert * task.most + chunk.first + row];
  };
#else
  const int rows = task.rows;
  constexpr long long first_tile = 0;
#endif
  // GATE: a tile of gates and the tile of their ups.
  auto tile_of = [&](int i) {
    return first_tile + (GATE ? block + i * num_tiles : min(block * TILES + i, num_tiles - 1));
  };

  float totals[TILES][4] = {};
  Batch now[TILES], next[TILES];
  if (first < last) {
#pragma unroll
    for (int i = 0; i < TILES; ++i) now[i].load(task, tile_of(i), first, steps, lane);
  }
#if __CUDA_ARCH__ >= 900 && !EXPERTS
  let_next_begin();
  wait_for_kernel_before();
#endif
  int row_of_lane = min(g, rows - 1);
#if EXPERTS
  row_of_lane = pair_of(row_of_lane) / task.share;
#endif
  const uint2* x_of_lane =
      reinterpret_cast<const uint2*>(task.x + (long long)row_of_lane * task.inputs) + t;
  for (int step = first; step < last; step += BATCH) {
    if (step + BATCH < last) {
#pragma unroll
      for (int i = 0; i < TILES; ++i) next[i].load(task, tile_of(i), step + BATCH, steps, lane);
    }
#pragma unroll
    for (int s = 0; s < BATCH; ++s) {
      if (!IS_K && step + s >= last) break;
      u32 x[8];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint2 two = x_of_lane[(step + s) * 16 + j * 4];
        x[2 * j] = two.x, x[2 * j + 1] = two.y;
      }
#pragma unroll
      for (int group = 0; group < GROUPS; ++group) {
        float ones[4] = {};
        if constexpr (STEPS) {  // a matrix of ones makes the sums of x
          constexpr u32 ONES[] = {0x3f803f80u, 0x3f803f80u, 0x3f803f80u, 0x3f803f80u};
#pragma unroll
          for (int e = 0; e < GROUP / 16; ++e) {
            const int at = 2 * (group * (GROUP / 16) + e);
            multiply(ones, ONES, x[at], x[at + 1]);
          }
        }
        const float of_columns[] = {ones[0], ones[1]};
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
          Group(now[i].numbers[s], now[i].scales[s], group).add(totals[i], x, of_columns, group);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < TILES; ++i) now[i] = next[i];
  }

#pragma unroll
  for (int i = 0; i < TILES; ++i) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      shared[warp][2 * t + n % 2][i * 16 + g + n / 2 * 8] = totals[i][n];
    }
  }
  __syncthreads();
  constexpr int WIDTH = GATE ? 16 : 16 * TILES;
  for (int i = threadIdx.x; i < rows * WIDTH; i += 32 * WARPS) {
    const int row = i / WIDTH, at = i % WIDTH, output = block * WIDTH + at;
    if (output >= task.outputs) continue;
    float total[2] = {};
    for (int half = 0; half < (GATE ? 2 : 1); ++half) {
      for (int w = 0; w < WARPS; ++w) total[half] += shared[w][row][at + 16 * half];
    }
#if EXPERTS
    const int pair = pair_of(row);
    if (task.weights != nullptr) total[0] *= task.weights[pair];
    write(task, pair, output, total[0], total[1]);
#else
    write(task, row, output, total[0], total[1]);
#endif
  }
}
