// All-reduce on the GPUs of one machine, by ranks that write into each other's memory
// (peer_memory.cuh).
//
//   one_shot   every rank sends all of its data to each rank, which sums     N - 1 times the data
//   two_shot   rank r sums the r-th share and sends the sum to each rank     2 (N - 1) / N times
//
// Why two turns suffice: thread i of the grid reads and writes the i-th pack of each part in every
// call, so a pack's calls are its block's calls, which take turns. A rank sends into the room of call c
// again in call c + 2. By then its call c + 1 has ended, so it has received words of call c + 1 from
// every rank (in two_shot at least as a part of the sums). A rank that sent words of call c + 1 had
// ended call c, so it had read the room and made it EMPTY: kernels of a stream run one after another.
// The turn is in memory, not an argument, because a CUDA graph repeats its arguments.
//
// After the all-reduce a decoder adds a residual to each row and norms it. `add_norm_*` do this in
// the same kernel: in one_shot each rank for all rows, in two_shot for the rows of its share, whose
// residuals it alone has. There a block has a row, and the argument above holds for rows instead of
// packs: they have rooms and turns of their own, and all calls have rows of one length.
//
// Compiled by NVRTC behind peer_memory.cuh, with NUM_RANKS, NUM_THREADS and ROW_THREADS defined
// (all_reduce.py).

// x: `count` packs, in place.
template <class T>
__device__ void one_shot(Pack* x, long long count, const Ranks& ranks) {
  const long long i = (long long)(blockIdx.x) * NUM_THREADS + threadIdx.x;
  const int rank = int(ranks.rank);
  Pack packs[N];
  if (i < count) packs[0] = x[i];
  const unsigned turn = take_turn(ranks);
  if (i >= count) return;
#pragma unroll
  for (int step = 1; step <= N; ++step) {  // each begins with its neighbour, itself comes last
    send(part(ranks, (rank + step) % N, turn, 0, rank) + i, packs[0]);
  }
  receive(packs, part(ranks, rank, turn, 0, 0) + i, ranks.capacity, N);
  x[i] = sum<T>(packs);
}

template <class T>
__device__ void two_shot(Pack* x, long long count, const Ranks& ranks) {
  const long long i = (long long)(blockIdx.x) * NUM_THREADS + threadIdx.x;
  const long long share = (count + N - 1) / N;  // the last ranks' may be smaller, or empty
  const int rank = int(ranks.rank);
  int present = 0;  // shares that have an i-th pack: those of the first ranks
#pragma unroll
  for (int r = 0; r < N; ++r) present += i < share && r * share + i < count;
  Pack packs[N];
#pragma unroll
  for (int step = 0; step < N; ++step) {
    const int r = (rank + 1 + step) % N;
    if (r < present) packs[step] = x[r * share + i];
  }
  const unsigned turn = take_turn(ranks);
  if (i >= share) return;
#pragma unroll
  for (int step = 0; step < N; ++step) {
    const int r = (rank + 1 + step) % N;
    if (r < present) send(part(ranks, r, turn, 0, rank) + i, packs[step]);
  }
  if (rank < present) {
    receive(packs, part(ranks, rank, turn, 0, 0) + i, ranks.capacity, N);
    const Pack total = sum<T>(packs);
#pragma unroll
    for (int step = 1; step <= N; ++step) {
      send(part(ranks, (rank + step) % N, turn, 1, rank) + i, total);
    }
  }
  receive(packs, part(ranks, rank, turn, 1, 0) + i, ranks.capacity, present);
#pragma unroll
  for (int r = 0; r < N; ++r) {
    if (r < present) x[r * share + i] = packs[r];
  }
}

// --- rows: sum, add the residual, norm -------------------------------------------------------------

constexpr int ITEMS = 4;  // packs of a row that a thread holds, at most

struct Rows {
  Pack* x;               // the ranks' parts of a sum; then the normed rows
  Pack* residual;        // of this rank's rows: added if `has_residual`; then the sum with it
  const Pack* weight;    // of the norm; float32 if `float_weight`
  long long count, packs, has_residual, float_weight;  // rows, packs in each
  float eps;
};

template <class T>
__device__ Pack plus(Pack a, Pack b) {
  for (int w = 0; w < 4; ++w) {
    float both[2] = {0, 0};
    T::add(both, a.words[w]);
    T::add(both, b.words[w]);
    a.words[w] = T::round(both);
  }
  return a;
}

template <class T>
__device__ float squares(Pack x) {
  float total = 0;
  for (int w = 0; w < 4; ++w) {
    float value[2] = {0, 0};
    T::add(value, x.words[w]);
    total += value[0] * value[0] + value[1] * value[1];
  }
  return total;
}

// x * scale * weight, rounded once.
template <class T>
__device__ Pack scaled(Pack x, float scale, Pack weight) {
  for (int w = 0; w < 4; ++w) {
    float value[2] = {0, 0}, factor[2] = {0, 0};
    T::add(value, x.words[w]);
    T::add(factor, weight.words[w]);
    for (int i = 0; i < 2; ++i) value[i] = value[i] * scale * factor[i];
    x.words[w] = T::round(value);
  }
  return x;
}

// The same, with as many float32 weights as a pack has numbers.
template <class T>
__device__ Pack scaled(Pack x, float scale, const float* weight) {
  for (int w = 0; w < 4; ++w) {
    float value[2] = {0, 0};
    T::add(value, x.words[w]);
    for (int i = 0; i < T::COUNT; ++i) value[i] = value[i] * scale * weight[w * T::COUNT + i];
    x.words[w] = T::round(value);
  }
  return x;
}

__device__ float block_sum(float x) {
  __shared__ float of_warp[32];
  for (int lane = 16; lane; lane /= 2) x += __shfl_xor_sync(0xffffffffu, x, lane);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = x;
  __syncthreads();
  float total = 0;
  for (int warp = 0; warp < int(blockDim.x + 31) / 32; ++warp) total += of_warp[warp];
  return total;
}

// The residual of a row and the norm's weights, loaded before the row has arrived.
struct Before {
  Pack residual[ITEMS], weight[ITEMS];

  __device__ Before(const Rows& rows) {
    const int packs = int(rows.packs);
    const Pack* from = rows.residual + (long long)(blockIdx.x) * packs;
#pragma unroll
    for (int k = 0; k < ITEMS; ++k) {
      const int p = threadIdx.x + k * blockDim.x;
      if (p >= packs) break;
      if (rows.has_residual) residual[k] = from[p];
      if (!rows.float_weight) weight[k] = rows.weight[p];
    }
  }
};

// Adds the residual to a row's sums, stores the result as the new residual, and norms the row in place.
template <class T>
__device__ void add_norm(Pack (&row)[ITEMS], const Rows& rows, const Before& before) {
  const int packs = int(rows.packs);
  Pack* residual = rows.residual + (long long)(blockIdx.x) * packs;
  float square = 0;
#pragma unroll
  for (int k = 0; k < ITEMS; ++k) {
    const int p = threadIdx.x + k * blockDim.x;
    if (p >= packs) break;
    if (rows.has_residual) row[k] = plus<T>(row[k], before.residual[k]);
    residual[p] = row[k];
    square += squares<T>(row[k]);
  }
  const float scale = rsqrtf(block_sum(square) / (packs * 4 * T::COUNT) + rows.eps);
#pragma unroll
  for (int k = 0; k < ITEMS; ++k) {
    const int p = threadIdx.x + k * blockDim.x;
    if (p >= packs) break;
    row[k] = rows.float_weight
                 ? scaled<T>(row[k], scale,
                             reinterpret_cast<const float*>(rows.weight) + p * 4 * T::COUNT)
                 : scaled<T>(row[k], scale, before.weight[k]);
  }
}

template <class T>
__device__ void add_norm_one_shot(const Rows& rows, const Ranks& ranks) {
  const int rank = int(ranks.rank), packs = int(rows.packs);
  Pack* x = rows.x + (long long)(blockIdx.x) * packs;
  const long long slot = (long long)(blockIdx.x) * packs;
  Pack row[ITEMS];
#pragma unroll
  for (int k = 0; k < ITEMS; ++k) {  // before the turn is waited for
    const int p = threadIdx.x + k * blockDim.x;
    if (p < packs) row[k] = x[p];
  }
  const unsigned turn = take_turn(ranks);
#pragma unroll
  for (int k = 0; k < ITEMS; ++k) {
    const int p = threadIdx.x + k * blockDim.x;
    if (p >= packs) break;
#pragma unroll
    for (int step = 1; step <= N; ++step) {
      send(part(ranks, (rank + step) % N, turn, 0, rank) + slot + p, row[k]);
    }
  }
  const Before before(rows);
#pragma unroll
  for (int k = 0; k < ITEMS; ++k) {
    const int p = threadIdx.x + k * blockDim.x;
    if (p >= packs) break;
    Pack parts[N];
    receive(parts, part(ranks, rank, turn, 0, 0) + slot + p, ranks.capacity, N);
    row[k] = sum<T>(parts);
  }
  add_norm<T>(row, rows, before);
#pragma unroll
  for (int k = 0; k < ITEMS; ++k) {
    const int p = threadIdx.x + k * blockDim.x;
    if (p < packs) x[p] = row[k];
  }
}

template <class T>
__device__ void add_norm_two_shot(const Rows& rows, const Ranks& ranks) {
  const int rank = int(ranks.rank), packs = int(rows.packs);
  const long long share = (rows.count + N - 1) / N, i = blockIdx.x, slot = i * packs;
  int present = 0;  // shares that have an i-th row: those of the first ranks
#pragma unroll
  for (int r = 0; r < N; ++r) present += r * share + i < rows.count;
  const unsigned turn = take_turn(ranks);
#pragma unroll
  for (int k = 0; k < ITEMS; ++k) {
    const int p = threadIdx.x + k * blockDim.x;
    if (p >= packs) break;
#pragma unroll
    for (int step = 1; step <= N; ++step) {
      const int r = (rank + step) % N;
      if (r >= present) continue;
      send(part(ranks, r, turn, 0, rank) + slot + p, rows.x[(r * share + i) * packs + p]);
    }
  }
  if (rank < present) {
    const Before before(rows);
    Pack row[ITEMS];
#pragma unroll
    for (int k = 0; k < ITEMS; ++k) {
      const int p = threadIdx.x + k * blockDim.x;
      if (p >= packs) break;
      Pack parts[N];
      receive(parts, part(ranks, rank, turn, 0, 0) + slot + p, ranks.capacity, N);
      row[k] = sum<T>(parts);
    }
    add_norm<T>(row, rows, before);
#pragma unroll
    for (int k = 0; k < ITEMS; ++k) {
      const int p = threadIdx.x + k * blockDim.x;
      if (p >= packs) break;
#pragma unroll
      for (int step = 1; step <= N; ++step) {
        send(part(ranks, (rank + step) % N, turn, 1, rank) + slot + p, row[k]);
      }
    }
  }
#pragma unroll
  for (int k = 0; k < ITEMS; ++k) {
    const int p = threadIdx.x + k * blockDim.x;
    if (p >= packs) break;
    Pack done[N];
    receive(done, part(ranks, rank, turn, 1, 0) + slot + p, ranks.capacity, present);
#pragma unroll
    for (int r = 0; r < N; ++r) {
      if (r < present) rows.x[(r * share + i) * packs + p] = done[r];
    }
  }
}

#define KERNEL(algorithm, T)                                                                     \
  extern "C" __global__ void __launch_bounds__(NUM_THREADS)                                      \
      algorithm##_##T(Pack* x, long long count, const __grid_constant__ Ranks ranks) {           \
    start();                                                                                     \
    algorithm<T>(x, count, ranks);                                                               \
  }                                                                                              \
  extern "C" __global__ void __launch_bounds__(ROW_THREADS) add_norm_##algorithm##_##T(          \
      const __grid_constant__ Rows rows, const __grid_constant__ Ranks ranks) {                  \
    start();                                                                                     \
    add_norm_##algorithm<T>(rows, ranks);                                                        \
  }
KERNEL(one_shot, Float32)
KERNEL(one_shot, BFloat16)
KERNEL(one_shot, Float16)
KERNEL(two_shot, Float32)
KERNEL(two_shot, BFloat16)
KERNEL(two_shot, Float16)
