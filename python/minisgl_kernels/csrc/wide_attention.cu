// Attention of prompts with heads of 512 dims over the paged cache (FlashAttention, Dao et al. 2022).
//
// A block has 64 queries of one row and one head. One warp brings 64 keys and then their values into
// shared memory with the bulk copy engine, page by page; the next keys come while values are
// multiplied. Two warpgroups each compute all scores, and the sums of half of the values' dims, as
// the sums of all do not fit the registers of one. So they exchange nothing, at the cost of half as
// much arithmetic again.
//
// Compiled by NVRTC behind hopper.cuh, with BFLOAT16 defined and with `multiply` of 64 columns from
// shared memory, and of 256 from registers, before it (wide_attention.py).

constexpr int DIM = 512;
constexpr int TILE = 64;               // queries of a block, and keys of a turn
constexpr int PIECE = TILE * 128;      // bytes: 64 rows of 64 numbers, the width of the swizzle
constexpr int PIECES = DIM / 64;
constexpr int TILE_BYTES = PIECE * PIECES;
constexpr float NEVER = -1e30f;        // the best score before any key: finite

struct Task {
  unsigned short* out;  // [T, heads, 512]
  const int *table, *rows;
  long long table_stride, rows_stride;
  int num_rows, heads, sharing, page_size, box;  // box: keys that one copy brings, of one page
  float scale;                                   // of scores in base 2
};

struct Shared {
  unsigned queries, keys, values;  // addresses of tiles
  unsigned queries_full, keys_full, values_full, keys_empty, values_empty;  // of barriers
};

// A block's tile: queries [first, first + 64) of a row's.
struct Tile {
  int row, first;
};

// Finds the row of a tile: each row has as many as its tokens need.
__device__ Tile find_tile(const Task& task, int tile) {
  int before = 0;
  for (int begin = 0; begin < task.num_rows; begin += 32) {
    const int row = begin + threadIdx.x % 32;
    int tiles = 0;
    if (row < task.num_rows) tiles = (task.rows[2 * task.rows_stride + row] + TILE - 1) / TILE;
    int up_to = tiles;
#pragma unroll
    for (int apart = 1; apart < 32; apart *= 2) {
      const int other = __shfl_up_sync(~0u, up_to, apart);
      if (int(threadIdx.x % 32) >= apart) up_to += other;
    }
    const unsigned beyond = __ballot_sync(~0u, before + up_to > tile);
    if (beyond != 0) {
      const int lane = __ffs(beyond) - 1;
      const int first = before + __shfl_sync(~0u, up_to - tiles, lane);
      return {begin + lane, (tile - first) * TILE};
    }
    before += __shfl_sync(~0u, up_to, 31);
  }
  return {-1, 0};
}

// Brings keys, or values, from `key` on. Those that no row has are zeros: a position beyond the pool.
__device__ void bring(unsigned to, const TensorMap& map, const Task& task, const int* pages, int key,
                      int high, int column, unsigned barrier) {
  const int lane = threadIdx.x % 32;
  if (lane == 0) expect(barrier, TILE_BYTES);
  __syncwarp();
  for (int i = lane; i < TILE / task.box * PIECES; i += 32) {
    const int piece = i % PIECES, part = i / PIECES * task.box, at = key + part;
    const int slot = at < high ? pages[at / task.page_size] * task.page_size + at % task.page_size
                               : 0x7fffff00;
    copy(to + piece * PIECE + part * 128, map, column + piece * 64, slot, barrier);
  }
}

// Writes zeros to the values of keys from `count` on, in this warpgroup's half of the dims: their
// weights are 0, but 0 times what is there may be no number.
__device__ void clear_values(unsigned values, int group, int count) {
  for (int i = threadIdx.x % 128; i < (TILE - count) * PIECES / 2 * 8; i += 128) {
    const int row = count + i / (PIECES / 2 * 8), piece = i / 8 % (PIECES / 2);
    const unsigned at = values + (group * PIECES / 2 + piece) * PIECE + row * 128 + i % 8 * 16;
    store_16(at, {});
  }
  show_to_multiply();
  asm volatile("bar.sync %0, 128;" ::"r"(1 + group) : "memory");
}

// The descriptor of values as the right matrix, whose columns are contiguous.
__device__ unsigned long long columns(unsigned address) {
  return (1ull << 62) | (64ull << 32) | (unsigned long long)(PIECE / 16) << 16 | (address >> 4);
}

__device__ void arrive_of_warp(unsigned barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) arrive(barrier);
}

__device__ float power(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

__device__ float most_of_4(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

__device__ float sum_of_4(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// query: the position of the tile's first. high: the end of the keys that its last query sees.
__device__ void attend(const Task& task, const Shared& shared, int query, int high, int left,
                       unsigned short* out) {
  const int group = threadIdx.x / 128, lane = threadIdx.x % 32;
  const int line = threadIdx.x % 128 / 32 * 16 + lane / 4;  // of the tile; the thread also has + 8
  float sums[128], top[2] = {NEVER, NEVER}, mass[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < 128; ++i) sums[i] = 0;
  wait(shared.queries_full, 0);
  for (int key = 0, parity = 0; key < high; key += TILE, parity ^= 1) {
    float scores[TILE / 2];
    wait(shared.keys_full, parity);
    multiply_begin();
#pragma unroll
    for (int i = 0; i < DIM / 16; ++i) {
      const int at = i / 4 * PIECE + i % 4 * 32;
      multiply(scores, matrix(shared.queries + at), matrix(shared.keys + at), i > 0);
    }
    multiply_end();
    settle(scores);
    arrive_of_warp(shared.keys_empty);

    if (key + TILE - 1 > query) {
#pragma unroll
      for (int i = 0; i < TILE / 2; ++i) {
        const int column = key + i / 4 * 8 + lane % 4 * 2 + i % 2;
        if (column > query + line + i / 2 % 2 * 8) scores[i] = -__int_as_float(0x7f800000);
      }
    }
    float shrink[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float best = top[half];
#pragma unroll
      for (int i = 0; i < TILE / 2; i += 4) {
        best = fmaxf(best, fmaxf(scores[i + 2 * half], scores[i + 2 * half + 1]) * task.scale);
      }
      best = most_of_4(best);
      shrink[half] = power(top[half] - best);
      top[half] = best;
      mass[half] *= shrink[half];
#pragma unroll
      for (int i = 0; i < TILE / 2; i += 4) {
#pragma unroll
        for (int j = i + 2 * half; j < i + 2 * half + 2; ++j) {
          scores[j] = power(scores[j] * task.scale - best);
          mass[half] += scores[j];
        }
      }
    }
    unsigned weights[TILE / 16][4];
#pragma unroll
    for (int i = 0; i < TILE / 4; ++i) {
      weights[i / 4][i % 4] = round(scores[2 * i], scores[2 * i + 1]);
    }
    if (__any_sync(~0u, shrink[0] != 1 || shrink[1] != 1)) {
#pragma unroll
      for (int i = 0; i < 128; ++i) sums[i] *= shrink[i / 2 % 2];
    }
    wait(shared.values_full, parity);
    if (key + TILE > high) clear_values(shared.values, group, high - key);
    multiply_begin();
#pragma unroll
    for (int i = 0; i < TILE / 16; ++i) {
      multiply(sums, weights[i], columns(shared.values + group * (TILE_BYTES / 2) + i * 2048));
    }
    multiply_end();
    settle(sums);
    arrive_of_warp(shared.values_empty);
  }

#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float inverse = 1 / sum_of_4(mass[half]);
    const int m = line + half * 8;
    if (m >= left) continue;
    unsigned short* to = out + (long long)m * task.heads * DIM + group * (DIM / 2) + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < 128; i += 4) {
      const unsigned word = round(sums[i + 2 * half] * inverse, sums[i + 2 * half + 1] * inverse);
      *reinterpret_cast<unsigned*>(to + i * 2) = word;
    }
  }
}

extern "C" __global__ void __launch_bounds__(384, 1)
    wide_attention(const __grid_constant__ TensorMap queries, const __grid_constant__ TensorMap keys,
                   const __grid_constant__ TensorMap values, const Task task) {
  extern __shared__ unsigned char memory[];
  const unsigned base = (shared_address(memory) + 1023) & ~1023u;
  const unsigned barriers = base + 3 * TILE_BYTES;
  const Shared shared{base,         base + TILE_BYTES, base + 2 * TILE_BYTES, barriers,
                      barriers + 8, barriers + 16,     barriers + 24,         barriers + 32};
  if (threadIdx.x == 0) {
    for (int i = 0; i < 3; ++i) make_barrier(barriers + i * 8, 1);
    for (int i = 3; i < 5; ++i) make_barrier(barriers + i * 8, 8);  // warps
    show_barriers();
  }
  __syncthreads();
  let_next_begin();
  wait_for_kernel_before();
  const int head = blockIdx.x % task.heads;
  // The last tiles see the most keys, and start first.
  const Tile tile = find_tile(task, (gridDim.x - 1 - blockIdx.x) / task.heads);
  if (tile.row < 0) return;
  const int length = task.rows[2 * task.rows_stride + tile.row];
  const int end = task.rows[3 * task.rows_stride + tile.row];
  const int token = task.rows[task.rows_stride + tile.row] + tile.first;
  const int query = end - length + tile.first;
  const int high = query + TILE < end ? query + TILE : end;
  if (__shfl_sync(~0u, threadIdx.x, 0) < 256) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    unsigned short* out = task.out + ((long long)token * task.heads + head) * DIM;
    attend(task, shared, query, high, length - tile.first, out);
    return;
  }

  asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
  if (threadIdx.x >= 288) return;
  const int lane = threadIdx.x % 32, column = head / task.sharing * DIM;
  const int* pages = task.table + task.rows[tile.row] * task.table_stride;
  if (lane == 0) expect(shared.queries_full, TILE_BYTES);
  __syncwarp();
  if (lane < PIECES) {
    const int numbers = head * DIM + lane * 64;
    copy(shared.queries + lane * PIECE, queries, numbers, token, shared.queries_full);
  }
  for (int key = 0, parity = 1; key < high; key += TILE, parity ^= 1) {
    if (key > 0) wait(shared.keys_empty, parity);
    bring(shared.keys, keys, task, pages, key, high, column, shared.keys_full);
    if (key > 0) wait(shared.values_empty, parity);
    bring(shared.values, values, task, pages, key, high, column, shared.values_full);
  }
}
