// The parts of a prompt's delta rule that need no state, on Hopper (decision 0024): what
// `_delta_prepare` (kernel/triton/delta_prepare.py) computes. A block has one interval of a row and
// the value heads of one key head, which share the products of keys and queries:
//
//   scores    P = q k^T * exp(G_i - G_j), on and below the diagonal
//   inverse   T = (1 + M)^-1 with M = beta k k^T * exp(G_i - G_j), below the diagonal
//
// A warp has 16 rows of both, in blocks of 16 by 16. It inverts its block on the diagonal: blocks of 2,
// then of 4, 8 and 16; where A and D are inverses of two blocks and B is M below A, the inverse of both
// has -D B A there. Then, warp after warp, T_ij = -sum over k < i of (T_ii M_ik) T_kj. Operands are
// float16, as are T and P; sums are float32.
//
// Compiled by NVRTC behind delta.cuh and `multiply` of 64 columns, with MAX_SHARE defined, the most
// value heads of a key head, and BESIDE, the bytes of Shared (delta_hopper.py).

constexpr unsigned QUERIES = 2 * MATRIX, BYTES = 4 * MATRIX;
constexpr unsigned INVERSE = 0, SCORES = MATRIX;  // in the place of keys, which are then not needed

struct Shared {
  float key[C], query[C], decay[MAX_SHARE][C], beta[MAX_SHARE][C];
};

static_assert(sizeof(Shared) <= BESIDE, "delta_hopper.py asks for less");

__device__ void wait_for_all_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// A block of 16 by 16 numbers: a thread's eight sums, and as float16 its words of a left matrix.
struct Block {
  float sums[8];

  // The row and the column of a sum.
  __device__ static int row(int i) { return threadIdx.x % 32 / 4 + i / 2 % 2 * 8; }
  __device__ static int column(int i) { return i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2; }
};

struct Words {
  unsigned at[4];
};

__device__ Words rounded(const Block& block) {
  Words words;
#pragma unroll
  for (int i = 0; i < 4; ++i) words.at[i] = halves(block.sums[i * 2], block.sums[i * 2 + 1]);
  return words;
}

// Returns a left matrix as the right matrix of a product.
__device__ Words as_right(const Words& left) {
  Words right;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(right.at[i]) : "r"(left.at[i]));
  }
  return right;
}

__device__ void multiply_half(float* sums, const Words& left, unsigned first, unsigned second) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(left.at[0]), "r"(left.at[1]), "r"(left.at[2]), "r"(left.at[3]), "r"(first), "r"(second));
}

// Adds left * right.
__device__ void add_product(Block& block, const Words& left, const Words& right) {
  multiply_half(&block.sums[0], left, right.at[0], right.at[1]);
  multiply_half(&block.sums[4], left, right.at[2], right.at[3]);
}

// The address of a lane's row among the 8 by 8 numbers of a block in a matrix of 64 columns.
__device__ unsigned block_row(unsigned matrix, int row, int column) {
  const int lane = threadIdx.x % 32, chunk = column * 2 + lane / 16;
  return matrix + (row * 16 + lane % 16) * 128 + ((chunk ^ lane % 8) << 4);
}

__device__ void store_block(unsigned to, const Words& words) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
               "r"(words.at[0]), "r"(words.at[1]), "r"(words.at[2]), "r"(words.at[3])
               : "memory");
}

__device__ Words load_right(unsigned from) {
  Words words;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.at[0]), "=r"(words.at[1]), "=r"(words.at[2]), "=r"(words.at[3])
               : "r"(from)
               : "memory");
  return words;
}

// Returns the inverse of 1 + system, a block on the diagonal.
__device__ Block invert(const Block& system) {
  Block inverse;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int row = Block::row(i), column = Block::column(i);
    inverse.sums[i] = row == column ? 1 : row / 2 == column / 2 ? -system.sums[i] : 0;
  }
#pragma unroll
  for (int size = 2; size < 16; size *= 2) {
    Block below, left{}, product{};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int row = Block::row(i) / size, column = Block::column(i) / size;
      below.sums[i] = row == column + 1 && row % 2 ? system.sums[i] : 0;
    }
    const Words blocks = rounded(inverse);
    add_product(left, blocks, as_right(rounded(below)));
    add_product(product, rounded(left), as_right(blocks));
#pragma unroll
    for (int i = 0; i < 8; ++i) inverse.sums[i] -= product.sums[i];
  }
  return inverse;
}

// Stores a warp's 16 rows of a matrix in shared memory, 2,048 bytes.
__device__ void store_rows(unsigned matrix, unsigned short* to) {
  __syncwarp();
  const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * 16 + lane / 8, chunk = lane % 8;
#pragma unroll
  for (int row = first; row < first + 16; row += 4) {
    *(uint4*)(to + row * C + chunk * 8) = load_16(matrix + row * 128 + ((chunk ^ row % 8) << 4));
  }
}

// Returns the factor of the norm of a row of two matrices, WIDTH numbers.
__device__ float norm_factor(unsigned matrices, int row) {
  float sum = 0;
#pragma unroll
  for (int chunk = 0; chunk < WIDTH / 8; ++chunk) {
    const uint4 x = load_16(matrices + chunk / 8 * MATRIX + row * 128 +
                                  ((chunk % 8 ^ row % 8) << 4));
    const unsigned words[] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (unsigned word : words) sum += low(word) * low(word) + high(word) * high(word);
  }
  return rsqrtf(sum + 1e-6f);
}

// A warp computes the sums of the log decays of a value head.
__device__ void sum_decays(const Delta& delta, const Span& span, int base, int head, float* decays,
                           float* betas) {
  const int lane = threadIdx.x % 32;
  float g[2], beta[2], old[2], carry = 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int at = base + lane * 2 + i;
    const long long from = (long long)(span.offset + at) * delta.heads + head;
    g[i] = span.is_new(at) ? delta.g[from] : 0;
    beta[i] = span.is_new(at) ? delta.beta[from] : 0;
    old[i] = at < span.start ? delta.decays[slot_of(delta, span, at) * delta.heads + head] : 0;
  }
  if (base < span.start) {
    carry = delta.decays[slot_of(delta, span, span.start - 1) * delta.heads + head];
  }
  float sum = g[0] + g[1];
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const float before = __shfl_up_sync(~0u, sum, step);
    if (lane >= step) sum += before;
  }
  const float before = __shfl_up_sync(~0u, sum, 1);
  const float first = (lane ? before : 0) + g[0], sums[] = {first, first + g[1]};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int j = lane * 2 + i;
    decays[j] = base + j < span.start ? old[i] : carry + sums[i];
    betas[j] = beta[i];
  }
}

// Finds the row of interval number `number` of all rows and the interval's first token; -1 if there
// is none.
__device__ int find_interval(const Delta& delta, int number, int& base) {
  const int lane = threadIdx.x % 32;
  const int *lengths = delta.rows + 2 * delta.rows_stride, *ends = lengths + delta.rows_stride;
  for (int first = 0; first < delta.num_rows; first += 32) {
    const int row = first + lane;
    const int end = row < delta.num_rows ? ends[row] : 0;
    const int start = row < delta.num_rows ? end - lengths[row] : 0;
    const int count = intervals(start, end);
    int sum = count;
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += other;
    }
    const unsigned behind = __ballot_sync(~0u, sum > number);
    if (behind) {
      const int of = __ffs(behind) - 1;
      base = __shfl_sync(~0u, (start / C + number - (sum - count)) * C, of);
      return first + of;
    }
    number -= __shfl_sync(~0u, sum, 31);
  }
  return -1;
}

// Grid: an upper bound of intervals, by key heads.
extern "C" __global__ void __launch_bounds__(128, 4)
    delta_prepare(const __grid_constant__ Delta delta) {
  extern __shared__ unsigned char memory[];
  const unsigned begin = shared_address(memory), keys = (begin + 1023) & ~1023u;
  Shared& shared = *reinterpret_cast<Shared*>(memory + (keys - begin) + BYTES);
  let_next_begin();
  wait_for_kernel_before();
  const int number = blockIdx.x / delta.key_heads, key_head = blockIdx.x % delta.key_heads;
  int base = 0;
  const int index = find_interval(delta, number, base);
  if (index < 0) return;
  const Span span = find_span(delta, index);
  const int share = delta.heads / delta.key_heads, thread = threadIdx.x, warp = thread / 32;
  const unsigned place = place_of(thread);
  copy_keys_and_queries(delta, span, base, key_head, thread, keys + place, keys + QUERIES + place);
  commit_copies();
  for (int i = warp; i < share; i += 4) {
    sum_decays(delta, span, base, key_head * share + i, shared.decay[i], shared.beta[i]);
  }
  wait_for_all_copies();
  show_to_multiply();
  __syncthreads();

  // Products of all rows: of keys with keys and of queries with keys.
  float system[32], scores[32];
  multiply_begin();
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    const unsigned at = keys + k / 4 * MATRIX;
    multiply(system, matrix(at) + k % 4 * 2, matrix(at) + k % 4 * 2, k > 0);
    multiply(scores, matrix(at + QUERIES) + k % 4 * 2, matrix(at) + k % 4 * 2, k > 0);
  }
  multiply_commit();
  const float factor = norm_factor(keys + (thread < C ? 0 : QUERIES), thread % C);
  if (thread < C) shared.key[thread] = factor;
  else shared.query[thread - C] = factor * rsqrtf(WIDTH);
  if (base + C > span.end) {  // later steps need these keys
#pragma unroll
    for (int i = 0; i < PASSES; ++i) {
      const int at = base + thread / 16 + i * 8;
      const long long slot = span.is_new(at) ? delta.slots[span.offset + at] : -1;
      unsigned short* to = delta.keys + (slot * delta.key_heads + key_head) * WIDTH;
      if (slot >= 0) *(uint4*)(to + thread % 16 * 8) = load_16(keys + place + i * 1024);
    }
  }
  multiply_wait();
  settle(system), settle(scores);

  for (int head = 0; head < share; ++head) {
    const float *decay = shared.decay[head], *beta = shared.beta[head];
    const int n = key_head * share + head;
    const long long at = (long long)number * delta.heads + n;
    __syncthreads();  // nothing of the head before, or of keys, is read any more
    if (thread < C) {
      float* factors = delta.factors + at * 3 * C + thread;
      factors[0] = decay[thread], factors[C] = shared.key[thread];
      factors[2 * C] = shared.query[thread];
      const int token = base + thread;
      if (base + C > span.end && span.is_new(token)) {
        const long long slot = delta.slots[span.offset + token];
        if (slot >= 0) delta.decays[slot * delta.heads + n] = decay[thread];
      }
    }
    Block on_diagonal{};
    Words below[4];  // M_ik
#pragma unroll
    for (int block = 0; block < 4; ++block) {
      Block of_system{}, of_scores{};
      if (block <= warp) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const int row = warp * 16 + Block::row(i), column = block * 16 + Block::column(i);
          const bool is_past = row >= column;
          const float between =
              is_past ? exponential(decay[row] - decay[column]) * shared.key[column] : 0;
          of_scores.sums[i] = scores[block * 8 + i] * shared.query[row] * between;
          of_system.sums[i] =
              row > column ? system[block * 8 + i] * beta[row] * shared.key[row] * between : 0;
        }
      }
      store_block(block_row(keys + SCORES, warp, block), rounded(of_scores));
      below[block] = rounded(of_system);
      if (block == warp) on_diagonal = of_system;
      if (block > warp) store_block(block_row(keys + INVERSE, warp, block), {});
    }
    const Words diagonal = rounded(invert(on_diagonal));
    store_block(block_row(keys + INVERSE, warp, warp), diagonal);
#pragma unroll
    for (int k = 0; k < 3; ++k) {
      if (k >= warp) continue;
      Block product{};
      add_product(product, diagonal, as_right(below[k]));
      below[k] = rounded(product);  // T_ii M_ik
    }
    store_rows(keys + SCORES, delta.scores + at * C * C);
    for (int turn = 1; turn < 4; ++turn) {
      __syncthreads();
      if (turn != warp) continue;
#pragma unroll
      for (int column = 0; column < 3; ++column) {
        if (column >= warp) continue;
        Block inverse{};
#pragma unroll
        for (int k = column; k < 3; ++k) {
          if (k < warp) add_product(inverse, below[k], load_right(block_row(keys + INVERSE, k, column)));
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) inverse.sums[i] = -inverse.sums[i];
        store_block(block_row(keys + INVERSE, warp, column), rounded(inverse));
      }
    }
    store_rows(keys + INVERSE, delta.inverses + at * C * C);
  }
}
