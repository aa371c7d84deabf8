// Products of many rows by packed weights, out[M, F] = x[M, D] w[F, D]^T. Behind tiles.cuh, with
// COLUMNS, TILES, OUT_WARPS, STAGES, RESIDENT and GATE defined.
//
// A block has 8 * COLUMNS rows of x and OUT_WARPS * TILES tiles of outputs. Two sets of warps take turns
// with the steps of inputs. x, in the order of lanes, is copied to shared
// memory some turns ahead (cp.async); a warp loads its next tiles while it multiplies these. If there
// are too few outputs for the device, blocks share the inputs: the last of them to end adds up the
// partial sums of all, in the order of the blocks.

constexpr int SETS = 2, THREADS = 32 * OUT_WARPS * SETS, SLOTS = OUT_WARPS * TILES;
constexpr int OUTPUTS = SLOTS * 16 / (GATE ? 2 : 1);
constexpr int X_BYTES = COLUMNS * 1024, SUM_BYTES = STEPS ? COLUMNS * GROUPS * 32 : 0;  // of a step
constexpr int STEP_BYTES = X_BYTES + SUM_BYTES;
constexpr int WIDTH = SLOTS * 16 + 8;  // of a row of sums, without conflicts of banks
static_assert(STAGES * SETS * STEP_BYTES >= COLUMNS * 8 * WIDTH * 4, "sums fit where x was");

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    tiles_many(const __grid_constant__ Task task) {
  extern __shared__ __align__(16) unsigned char memory[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int set = warp / OUT_WARPS, own = warp % OUT_WARPS;
  const int steps = task.inputs / 64, num_tiles = task.outputs / 16;
  const int parts = (task.outputs + OUTPUTS - 1) / OUTPUTS, shares = gridDim.x / parts;
  const int part = blockIdx.x % parts, share = blockIdx.x / parts;
  const int each = (steps + shares - 1) / shares;
  const int first = min(share * each, steps), last = min(first + each, steps);
  const int turns = (last - first + SETS - 1) / SETS;
  // GATE: tiles of gates and of their ups take turns.
  auto tile_of = [&](int i) {
    const int slot = own * TILES + i;
    if (GATE) return min(part * (SLOTS / 2) + slot / 2, num_tiles - 1) + slot % 2 * num_tiles;
    return min(part * SLOTS + slot, num_tiles - 1);
  };

  Numbers now[TILES], next[TILES];
  Scales scales[TILES], next_scales[TILES];
  auto load = [&](int turn) {
    const int step = min(first + turn * SETS + set, last - 1);
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
      const long long tile = tile_of(i);
      next[i].load(task.numbers + (tile * steps + step) * TILE_BYTES, lane);
      next_scales[i].load(task.factors, task.scales, tile, step, step / SPAN, steps, g);
    }
  };
  if (turns > 0) load(0);
#if __CUDA_ARCH__ >= 900
  let_next_begin();
  wait_for_kernel_before();
#endif
  const unsigned base = shared_address(memory);
  const u8* x = reinterpret_cast<const u8*>(task.x);
  const u8* sums = reinterpret_cast<const u8*>(task.sums);
  auto copy = [&](int turn) {
    if (turn < turns) {
      const unsigned to = base + turn % STAGES * SETS * STEP_BYTES;
      constexpr int VECTORS = X_BYTES / 16, SUM_VECTORS = SUM_BYTES / 16, ALL = VECTORS + SUM_VECTORS;
      for (int i = threadIdx.x; i < SETS * ALL; i += THREADS) {
        const int v = i % ALL;
        const long long step = min(first + turn * SETS + i / ALL, last - 1);
        const u8* from = v < VECTORS ? x + step * X_BYTES + v * 16
                                     : sums + step * SUM_BYTES + (v - VECTORS) * 16;
        copy_16(to + i * 16, from, true);
      }
    }
    commit_copies();
  };
  for (int turn = 0; turn < STAGES - 1; ++turn) copy(turn);

  float totals[TILES][COLUMNS][4] = {};
  for (int turn = 0; turn < turns; ++turn) {
#pragma unroll
    for (int i = 0; i < TILES; ++i) now[i] = next[i], scales[i] = next_scales[i];
    if (turn + 1 < turns) load(turn + 1);
    wait_for_copies<STAGES - 2>();
    __syncthreads();
    copy(turn + STAGES - 1);
    if (first + turn * SETS + set >= last) continue;
    const unsigned from = base + (turn % STAGES * SETS + set) * STEP_BYTES;
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
      Group groups[TILES];
#pragma unroll
      for (int i = 0; i < TILES; ++i) groups[i] = Group(now[i], scales[i], group);
#pragma unroll
      for (int column = 0; column < COLUMNS; ++column) {
        const int half = group * GROUP / 32;
        const uint4 four = load_16(from + ((half * COLUMNS + column) * 32 + lane) * 16);
        u32 words[8];
        words[half * 4] = four.x, words[half * 4 + 1] = four.y;
        words[half * 4 + 2] = four.z, words[half * 4 + 3] = four.w;
        float ones[2] = {};
        if constexpr (STEPS) {
          load_sums(ones, from + X_BYTES + ((group * COLUMNS + column) * 8 + 2 * t) * 4);
        }
#pragma unroll
        for (int i = 0; i < TILES; ++i) groups[i].add(totals[i][column], words, ones, group);
      }
    }
  }

  // The sums of the second set, then of both.
  float* all = reinterpret_cast<float*>(memory);
  for (int turn = SETS - 1; turn >= 0; --turn) {
    wait_for_copies<0>();
    __syncthreads();
    if (set != turn) continue;
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
#pragma unroll
      for (int column = 0; column < COLUMNS; ++column) {
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          float& to = all[(column * 8 + 2 * t + n % 2) * WIDTH + (own * TILES + i) * 16 + g + n / 2 * 8];
          to = turn == SETS - 1 ? totals[i][column][n] : to + totals[i][column][n];
        }
      }
    }
  }
  __syncthreads();
  constexpr int EACH_ROW = SLOTS * 16, ALL = COLUMNS * 8 * EACH_ROW;
  if (shares > 1) {
    const long long apart = (long long)parts * ALL;
    float* mine = task.partial + (long long)part * ALL;
    for (int i = threadIdx.x; i < ALL; i += THREADS) {
      mine[share * apart + i] = all[i / EACH_ROW * WIDTH + i % EACH_ROW];
    }
    __threadfence();
    __syncthreads();
    __shared__ int is_last;
    if (threadIdx.x == 0) {
      is_last = atomicAdd(task.done + part, 1) == shares - 1;
      if (is_last) task.done[part] = 0;
    }
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    for (int i = threadIdx.x; i < ALL; i += THREADS) {
      float total = 0;
      for (int other = 0; other < shares; ++other) total += __ldcg(mine + other * apart + i);
      all[i / EACH_ROW * WIDTH + i % EACH_ROW] = total;
    }
    __syncthreads();
  }
  for (int i = threadIdx.x; i < COLUMNS * 8 * OUTPUTS; i += THREADS) {
    const int row = i / OUTPUTS, at = i % OUTPUTS, output = part * OUTPUTS + at;
    if (row >= task.rows || output >= task.outputs) continue;
    // GATE: each gate's tile stands before that of its ups.
    const float* from = all + i / OUTPUTS * WIDTH + (GATE ? at / 16 * 32 + at % 16 : at);
    write(task, row, output, from[0], from[GATE ? 16 : 0]);
  }
}
