// Skinny GEMMs of up to 64 rows, out[M, F] = x[M, D] w[F, D]^T, which take as long as reading w. Or
// w has a gate and an up half, [2 F, D], and out is silu(gate) * up.
//
// A block has WIDTH rows of w. One thread has the bulk copy engine bring 64 inputs of them and of x
// into shared memory, turn after turn, and two warpgroups multiply (wgmma). It brings as many
// weights as there is room for before it waits for the kernel that makes x (programmatic dependent
// launch). How the warpgroups share the work:
//
//   alternate   each has every other turn, and every other stage: half as many consecutive waits
//   HALVES      one has the gate's columns and one the up's: wider blocks, which read x less often
//
// Blocks with the SPLIT parts of one tile's inputs are a cluster. They send each other sums through
// its shared memory, and each adds up a share of the columns, in the order of the parts.
//
// Compiled by NVRTC behind hopper.cuh, with N, SPLIT, GATED, HALVES, WIDE (out is float32) and
// BFLOAT16 defined and with `multiply` before it, which has an operand for each sum of a thread
// (hopper.py, skinny.py).

static_assert(HALVES ? GATED && SPLIT == 1 : N % 16 == 0, "not a config of skinny.py");
static_assert(!(WIDE && GATED), "not a config of skinny.py");

constexpr int WIDTH = HALVES ? 2 * N : N;
constexpr int BOX = WIDTH / 2;  // rows of w that one copy brings
constexpr int CHUNKS = N / 8;   // of 8 columns: 4 sums a thread
constexpr int PAIRS = GATED && !HALVES ? CHUNKS / 2 : CHUNKS;  // chunks of the output
constexpr int INPUTS = 64;      // of a turn: 128 bytes, the width of the swizzle
constexpr int W_BYTES = WIDTH * INPUTS * 2;
constexpr int OWNED = (PAIRS + SPLIT - 1) / SPLIT;  // pairs that one block of a cluster adds up

// A stage holds x's rows, a multiple of 8, and then the weights. The matrix instructions read 64
// rows, so behind x's rows they read weights and more; the sums of these rows are not stored.
struct Ring {
  unsigned base, full, empty;  // in shared memory: stages, and barriers of 8 bytes
  int stages, x_bytes;

  __device__ int stage_bytes() const { return x_bytes + W_BYTES; }

  // The address of the sums that other blocks of the cluster send: behind the barriers, and behind
  // the sums that warpgroups exchange.
  __device__ unsigned sums() const {
    const unsigned end = empty + stages * 8;
    return ((end > base + N * 256 ? end : base + N * 256) + 15) & ~15u;
  }
};

struct Product {
  void* out;  // float if WIDE, else of the type of x
  const unsigned short* bias;  // or null
  int rows, outputs;
};

// The barrier of all threads of all blocks of the cluster.
__device__ void cluster_arrive() {
  __syncwarp();
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

__device__ void cluster_wait() {
  __syncwarp();
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ void warpgroups_barrier() {
  __syncwarp();
  asm volatile("bar.sync 1, 256;" ::: "memory");
}

__device__ unsigned in_block(unsigned address, int part) {
  unsigned there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(part));
  return there;
}

// A thread's sums of a chunk: columns c and c + 1 of rows r and r + 8.
struct Four {
  float at[4];

  __device__ void add(const Four& other) {
    for (int i = 0; i < 4; ++i) at[i] += other.at[i];
  }

  __device__ void add_bias(const unsigned short* bias) {
    for (int i = 0; i < 4; ++i) at[i] += number(bias[i % 2]);
  }
};

__device__ void send(unsigned to, const Four& x) {
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(x.at[0]),
               "f"(x.at[1]), "f"(x.at[2]), "f"(x.at[3])
               : "memory");
}

__device__ void keep(unsigned at, const Four& x) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(at), "f"(x.at[0]), "f"(x.at[1]),
               "f"(x.at[2]), "f"(x.at[3])
               : "memory");
}

__device__ Four kept(unsigned at) {
  Four x;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.at[0]), "=f"(x.at[1]), "=f"(x.at[2]), "=f"(x.at[3])
               : "r"(at)
               : "memory");
  return x;
}

// Returns the place in shared memory for a thread's sums of a chunk, which the other warpgroup reads.
__device__ unsigned between_groups(unsigned base, int chunk) {
  return base + (chunk * 128 + threadIdx.x % 128) * 16;
}

// The place in the owner's shared memory for the sums that block `part` has of a pair: two chunks
// if GATED.
__device__ unsigned between_blocks(unsigned base, int part, int owner, int chunk) {
  const int sender = part < owner ? part : part - 1;
  const int pair = chunk % PAIRS - (owner * PAIRS + SPLIT - 1) / SPLIT;
  const int place = (sender * OWNED + pair) * (CHUNKS / PAIRS) + chunk / PAIRS;
  return base + (place * 128 + threadIdx.x % 128) * 16;
}

__device__ void store(const Product& product, int row, int column, Four x, Four up) {
  if (column >= product.outputs) return;
  if (product.bias != nullptr) {
    x.add_bias(product.bias + column);
    if (GATED) up.add_bias(product.bias + product.outputs + column);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (row + half * 8 < product.rows) {
      const long long to = (long long)(row + half * 8) * product.outputs + column;
      const float *two = &x.at[half * 2], *ups = &up.at[half * 2];
      if (WIDE)
        reinterpret_cast<float2*>(product.out)[to / 2] = make_float2(two[0], two[1]);
      else
        reinterpret_cast<unsigned*>(product.out)[to / 2] =
            GATED ? gated(two[0], two[1], ups[0], ups[1]) : round(two[0], two[1]);
    }
  }
}

// first, count: turns. The up half's rows are `outputs` behind the gate's.
__device__ void produce(const TensorMap& x, const TensorMap& w, const Ring& ring, int output,
                        int outputs, int first, int count) {
  const int ahead = count < ring.stages ? count : ring.stages;
  auto copy_weights = [&](int turn, int stage) {
    const unsigned barrier = ring.full + stage * 8;
    const unsigned to = ring.base + stage * ring.stage_bytes() + ring.x_bytes;
    const int input = (first + turn) * INPUTS;
    expect(barrier, ring.stage_bytes());
    copy(to, w, input, output, barrier);
    copy(to + W_BYTES / 2, w, input, output + (GATED ? outputs : BOX), barrier);
  };
  auto copy_x = [&](int turn, int stage) {
    copy(ring.base + stage * ring.stage_bytes(), x, (first + turn) * INPUTS, 0,
         ring.full + stage * 8);
  };
  for (int turn = 0; turn < ahead; ++turn) copy_weights(turn, turn);
  wait_for_kernel_before();
  for (int turn = 0; turn < ahead; ++turn) copy_x(turn, turn);
  for (int turn = ahead, stage = 0, parity = 0; turn < count; ++turn) {
    wait(ring.empty + stage * 8, parity);
    copy_weights(turn, stage);
    copy_x(turn, stage);
    if (++stage == ring.stages) stage = 0, parity ^= 1;
  }
}

// Adds up the products of a warpgroup's turns, out of `count` turns.
__device__ void consume(float (&sums)[N / 2], const Ring& ring, int group, int count) {
  constexpr int STEP = HALVES ? 1 : 2;
#pragma unroll
  for (int i = 0; i < N / 2; ++i) sums[i] = 0;
  int stage = HALVES ? 0 : group;
  for (int turn = stage, parity = 0; turn < count; turn += STEP) {
    wait(ring.full + stage * 8, parity);
    const unsigned at = ring.base + stage * ring.stage_bytes();
    const unsigned long long a = matrix(at);
    const unsigned long long b = matrix(at + ring.x_bytes + (HALVES ? group * (W_BYTES / 2) : 0));
    multiply_begin();
#pragma unroll
    for (int k = 0; k < 4; ++k) multiply(sums, a + k * 2, b + k * 2);  // 16 inputs, 32 bytes
    multiply_end();
    if (threadIdx.x % 128 == 0) arrive(ring.empty + stage * 8);
    if ((stage += STEP) >= ring.stages) stage -= ring.stages, parity ^= 1;
  }
  settle(sums);
}

__device__ Four four(const float (&sums)[N / 2], int chunk) {
  const float* sum = &sums[chunk * 4];
  return {{sum[0], sum[1], sum[2], sum[3]}};
}

// Adds up the sums of the blocks of a cluster and stores them; each block does this for its share
// of the pairs.
__device__ void finish_in_blocks(const float (&sums)[N / 2], const Product& product, unsigned base,
                                 int part, int group, int column, int row) {
  if constexpr (SPLIT > 1) {
    cluster_wait();  // all blocks have begun
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; ++chunk) {
      const int owner = chunk % PAIRS * SPLIT / PAIRS;
      if (owner == part || chunk % PAIRS % 2 != group || row >= product.rows) continue;
      send(in_block(between_blocks(base, part, owner, chunk), owner), four(sums, chunk));
    }
    cluster_arrive();
    cluster_wait();
  }
  if (row >= product.rows) return;
#pragma unroll
  for (int pair = 0; pair < PAIRS; ++pair) {
    const int owner = pair * SPLIT / PAIRS;
    if (owner != part || pair % 2 != group) continue;
    Four totals[2]{};  // the second is up's
#pragma unroll
    for (int from = 0; from < SPLIT; ++from) {
#pragma unroll
      for (int chunk = pair; chunk < CHUNKS; chunk += PAIRS) {
        totals[chunk / PAIRS].add(from == part
                                      ? four(sums, chunk)
                                      : kept(between_blocks(base, from, owner, chunk)));
      }
    }
    store(product, row, column + pair * 8, totals[0], totals[1]);
  }
}

// Adds up the sums of warpgroups and blocks, or exchanges those of gate and up, and stores the
// outputs. Each warpgroup does this for every other pair. column, row: of a thread's first sum; if
// this row is behind x's last, so are its others.
__device__ void finish(float (&sums)[N / 2], const Product& product, const Ring& ring, int part,
                       int group, int column, int row) {
  const unsigned base = ring.base;
  warpgroups_barrier();  // neither reads stages any more
#pragma unroll
  for (int chunk = 0; chunk < CHUNKS; ++chunk) {
    if (chunk % PAIRS % 2 == group || row >= product.rows) continue;
    keep(between_groups(base, chunk), four(sums, chunk));
  }
  warpgroups_barrier();
#pragma unroll
  for (int chunk = 0; chunk < CHUNKS; ++chunk) {
    if (chunk % PAIRS % 2 != group || row >= product.rows) continue;
    const Four mine = four(sums, chunk), other = kept(between_groups(base, chunk));
    if constexpr (HALVES) {
      store(product, row, column + chunk * 8, group == 0 ? mine : other,
            group == 0 ? other : mine);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[chunk * 4 + i] += other.at[i];
    }
  }
  if constexpr (!HALVES) finish_in_blocks(sums, product, ring.sums(), part, group, column, row);
}

// Grid: tiles x SPLIT, in clusters of SPLIT. inputs: a multiple of 64; outputs: of 8.
extern "C" __global__ void __launch_bounds__(288, 1)
    skinny_gemm(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w,
                 const Product product, int inputs, int stages) {
  extern __shared__ unsigned char memory[];
  const unsigned base = (shared_address(memory) + 1023) & ~1023u;
  Ring ring{base, 0, 0, stages, (product.rows + 7) / 8 * 8 * INPUTS * 2};
  ring.full = base + stages * ring.stage_bytes();
  ring.empty = ring.full + stages * 8;
  const int part = blockIdx.x % SPLIT, output = blockIdx.x / SPLIT * (GATED ? BOX : WIDTH);
  const int turns = inputs / INPUTS;
  const int first = part * turns / SPLIT, count = (part + 1) * turns / SPLIT - first;
  // This block has begun, so others may write to its shared memory. It has written nothing that
  // they read.
  if (SPLIT > 1) asm volatile("barrier.cluster.arrive.relaxed.aligned;");
  if (threadIdx.x == 256) {
    asm volatile("prefetch.tensormap [%0];\nprefetch.tensormap [%1];" ::"l"(&w), "l"(&x)
                 : "memory");
    for (int stage = 0; stage < stages; ++stage) {
      make_barrier(ring.full + stage * 8, 1);
      make_barrier(ring.empty + stage * 8, HALVES ? 2 : 1);
    }
    show_barriers();
  }
  __syncthreads();

  // The next kernel may begin when all copies have been issued. If it began earlier, its blocks
  // would all go to the multiprocessors that have no block of this kernel.
  if (threadIdx.x >= 256) {
    if (threadIdx.x == 256) produce(x, w, ring, output, product.outputs, first, count);
    __syncwarp();
    let_next_begin();
    if (SPLIT > 1) {
      cluster_wait();
      cluster_arrive();
      cluster_wait();
    }
    return;
  }
  const int group = threadIdx.x / 128, lane = threadIdx.x % 32;
  const int row = threadIdx.x % 128 / 32 * 16 + lane / 4, column = output + lane % 4 * 2;
  float sums[N / 2];
  consume(sums, ring, group, count);
  let_next_begin();

  finish(sums, product, ring, part, group, column, row);
}
