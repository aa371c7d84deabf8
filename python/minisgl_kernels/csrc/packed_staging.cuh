// The task of packed_skinny.cu, its shared memory, and how rows of x are staged there.
// packed_skinny.py puts it after packed_numbers.cuh and before packed_skinny.cu.

struct Task {
  const u16 *x, *residual, *norm;  // residual, norm: or null
  const u8 *numbers, *scale, *zero;
  const float* outer;
  const u16* bias;  // or null
  u16 *out, *total;
  const int* ids;       // EXPERTS: of each pair
  const float* shares;  // EXPERTS == 2
  float eps, alpha, limit;
  int rows;             // of x: M, T, or pairs
  int outputs, inputs;  // of a matrix, gate and up counted once
  int pairs, top_k, first, count;  // EXPERTS: those of this rank
  int float_norm;       // whether the norm's weights are float32
  int most_tiles;       // of a block
};

// An expert that some pairs have chosen: its index on this rank, and each token's pair or -1.
struct Expert {
  int index, pairs[COLUMNS];
};

struct Shared {
  float squares[WARPS][COLUMNS];
  int num_experts;
  int ids[EXPERTS ? MAX_PAIRS : 1];
  Expert experts[EXPERTS ? MAX_PAIRS : 1];
};

static_assert(sizeof(Shared) <= BESIDE, "packed_skinny.py asks for less");

// Behind Shared: x, the sums of its parts, scales, zeros and sums of warps of all tiles, stages.
struct Places {
  u32 x, x_stride, x_sums, scales, scale_bytes, zeros, zero_bytes, sums, sums_bytes, stages;
  int chunks, groups, columns;  // chunks are a multiple of TURN

  __device__ Places(const Task& task, u32 base) {
    chunks = (task.inputs + CHUNK * TURN - 1) / (CHUNK * TURN) * TURN;
    groups = GROUP > 0 ? (task.inputs + GROUP - 1) / (GROUP > 0 ? GROUP : 1) : 1;
    x = base;
    x_stride = chunks * CHUNK * 2 + 64;  // conflict-free: half of the banks apart
    x_sums = x + task.rows * x_stride;
    scales = x_sums + (OFFSETS ? (task.rows * chunks * PARTS * 4 + 15) & ~15 : 0);
    columns = EXPERTS == 2 ? task.pairs / task.top_k : task.rows;
    scale_bytes = HAS_SCALES ? (BLOCKS * SCALE_ROWS * groups * SCALE_BYTES + 15) & ~15 : 0;
    zeros = scales + task.most_tiles * scale_bytes;
    zero_bytes = ZEROS ? (BLOCKS * 8 * groups + 15) & ~15 : 0;
    sums = zeros + task.most_tiles * zero_bytes;
    sums_bytes = columns * COLUMN * 4;  // of a warp and a tile
    stages = sums + task.most_tiles * WARPS * sums_bytes;
  }
};

// Eight numbers of x in the order of the instructions.
__device__ uint4 permuted(uint4 x) {
  const u32 low = 0x5410, high = 0x7632;
  if constexpr (IS_BYTE) {
    return {__byte_perm(x.x, x.y, low), __byte_perm(x.x, x.y, high), __byte_perm(x.z, x.w, low),
            __byte_perm(x.z, x.w, high)};
  }
  return {__byte_perm(x.x, x.z, low), __byte_perm(x.x, x.z, high), __byte_perm(x.y, x.w, low),
          __byte_perm(x.y, x.w, high)};
}

template <class Function>
__device__ u32 map_2(u32 x, u32 y, Function function) {
  return round(function(number(x & 0xffff), number(y & 0xffff)),
               function(number(x >> 16), number(y >> 16)));
}

template <class Function>
__device__ uint4 map(uint4 x, uint4 y, Function function) {
  return {map_2(x.x, y.x, function), map_2(x.y, y.y, function), map_2(x.z, y.z, function),
          map_2(x.w, y.w, function)};
}

__device__ uint4 add(uint4 x, uint4 y) {
  constexpr u32 ONE = 0x3f803f80u;
  return {fma_2(x.x, ONE, y.x), fma_2(x.y, ONE, y.y), fma_2(x.z, ONE, y.z), fma_2(x.w, ONE, y.w)};
}

// x * weights, for eight permuted numbers and their float32 weights in the first order.
__device__ uint4 weighted(uint4 x, const float* weights) {
  constexpr int FAR = IS_BYTE ? 2 : 4, THIRD = IS_BYTE ? 4 : 2;
  const auto two = [=](u32 word, int i) {
    return round(number(word & 0xffff) * weights[i], number(word >> 16) * weights[i + FAR]);
  };
  return {two(x.x, 0), two(x.y, 1), two(x.z, THIRD), two(x.w, THIRD + 1)};
}

template <class Function>
__device__ float sum(uint4 x, Function function) {
  float total = 0;
  for (u32 word : {x.x, x.y, x.z, x.w}) {
    total += function(number(word & 0xffff)) + function(number(word >> 16));
  }
  return total;
}

// Rows of x to shared memory: x + residual, times the norm's weights, permuted, multiplied by 2^60 for
// floats. The outputs are multiplied by the rest of the norm.
struct Staging {
  const Task& task;
  const Places& places;
  int vectors, lane;
  uint4 norm[BATCH];  // of a batch: the first is loaded before x is there

  __device__ Staging(const Task& task, const Places& places)
      : task(task), places(places), vectors(places.chunks * CHUNK / 8), lane(threadIdx.x % 32) {
    if (!PLAIN && !task.float_norm) load(norm, task.norm, 0);
  }

  // A thread's vectors of a batch. Those behind the end are zeros.
  __device__ void load(uint4 (&to)[BATCH], const u16* from, int batch) const {
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      const int v = (batch * BATCH + i) * THREADS + threadIdx.x;
      to[i] = from != nullptr && v * 8 < task.inputs
                  ? reinterpret_cast<const uint4*>(from)[v] : uint4{};
    }
  }

  __device__ u32 place(int row, int vector) const {
    const int v = vector % (CHUNK / 8), chunk = vector / (CHUNK / 8);
    int within = v * 16;  // NARROW: a piece is a word of four threads
    if constexpr (!NARROW) within = v % VECTORS * 64 + v / VECTORS * 16;
    return places.x + row * places.x_stride + chunk * CHUNK * 2 + within;
  }

  __device__ void put(int row, int vector, uint4 x) const {
    if (vector >= vectors) return;
    store_16(place(row, vector), x);
  }

  // The last step, for a permuted vector. All threads of a warp call it.
  __device__ void finish(int row, int vector, uint4 x) const {
    if constexpr (OFFSETS) {
      constexpr int SPAN = CHUNK / PARTS / 8;
      float total = sum(x, [](float a) { return a; });
      for (int step = 1; step < SPAN; step *= 2) total += __shfl_xor_sync(~0u, total, step);
      if (vector < vectors && lane % SPAN == 0) {
        const u32 to = places.x_sums + (row * places.chunks * PARTS + vector / SPAN) * 4;
        store_4(to, total);
      }
    }
    if constexpr (FLOATS) x = map(x, x, [](float a, float) { return a * 0x1p60f; });
    put(row, vector, x);
  }

  // Without a norm all rows are one long row, of which a batch is loaded at once.
  __device__ void run_plain() const {
    int row = 0, v = threadIdx.x;
    const auto step = [&](int& row, int& v, int by) {
      for (v += by; v >= vectors; v -= vectors) ++row;
    };
    step(row, v, 0);
    while (__any_sync(~0u, row < task.rows)) {
      uint4 x[BATCH]{};
      int next_row = row, next = v;
#pragma unroll
      for (int i = 0; i < BATCH; ++i, step(next_row, next, THREADS)) {
        if (next_row < task.rows && next * 8 < task.inputs) {
          const u16* from = task.x + (long long)next_row * task.inputs;
          x[i] = reinterpret_cast<const uint4*>(from)[next];
        }
      }
#pragma unroll
      for (int i = 0; i < BATCH; ++i, step(row, v, THREADS)) {
        finish(row, row < task.rows ? v : vectors, permuted(x[i]));
      }
    }
  }

  __device__ void run(Shared& shared) {
    if constexpr (PLAIN) return run_plain();
    const int batches = (vectors + BATCH * THREADS - 1) / (BATCH * THREADS);
    for (int row = 0; row < task.rows; ++row) {
      const long long first = (long long)row * task.inputs;
      float square = 0;
      for (int batch = 0; batch < batches; ++batch) {
        uint4 x[BATCH], residual[BATCH];
        load(x, task.x + first, batch);
        if (task.residual != nullptr) load(residual, task.residual + first, batch);
        if (batches > 1 && !task.float_norm) load(norm, task.norm, batch);
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
          const int v = (batch * BATCH + i) * THREADS + threadIdx.x;
          if (v - lane >= vectors) break;
          if (task.residual != nullptr) {
            x[i] = add(x[i], residual[i]);
            if (blockIdx.x == 0 && v * 8 < task.inputs) {
              reinterpret_cast<uint4*>(task.total + first)[v] = x[i];
            }
          }
          uint4 y = permuted(x[i]);
          if (task.norm != nullptr) {
            square += sum(x[i], [](float a) { return a * a; });
            if (!task.float_norm) {
              y = map(y, permuted(norm[i]), [](float a, float b) { return a * b; });
            } else if (v * 8 < task.inputs) {
              y = weighted(y, reinterpret_cast<const float*>(task.norm) + v * 8);
            }
          }
          finish(row, v, y);
        }
      }
      if (task.norm != nullptr) {
        for (int step = 16; step > 0; step /= 2) square += __shfl_xor_sync(~0u, square, step);
        if (lane == 0) shared.squares[threadIdx.x / 32][row] = square;
      }
    }
  }
};

// The factor that normalises a row.
__device__ float norm_scale(const Task& task, const Shared& shared, int row) {
  float square = 0;
  for (int w = 0; w < WARPS; ++w) square += shared.squares[w][row];
  return rsqrtf(square / task.inputs + task.eps);
}
