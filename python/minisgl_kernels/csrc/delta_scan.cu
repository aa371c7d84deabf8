// The gated delta rule of prompts, interval by interval, on Hopper (decision 0024). `delta_prepare.cu`
// has computed what needs no state. For an interval with keys K and queries Q, both normed, values V,
// weights beta, sums of log decays G, inverse T and scores P, and with S the state at its begin:
//
//   X = beta (V - exp(G) K S)      U = T X
//   out = exp(G) Q S + P U         S <- exp(G_last) S + K^T (exp(G_last - G) U)
//
// A block has one row of the step and one value head:
//
//   a warpgroup that fetches   an interval's matrices, up to STAGES intervals ahead. It multiplies keys
//                              and queries by their factors and rounds them to float16
//   two that multiply          64 of the values each, all transposed: values are the rows of the matrix
//                              instructions. So S, X and U are left operands, and a thread's sums of
//                              one product, rounded to float16, are its registers for the next
//
// The state itself is in float32. Values above float16's largest, 65,504, become infinite and then
// NaN in all that follows; nothing is clamped.
//
// Compiled by NVRTC behind delta_fetch.cuh and two instructions of 64 columns, `multiply`, and
// `multiply_across` with the right matrix transposed.

// Waits until at most the last batch of matrix instructions still runs.
__device__ void multiply_wait_but_last() {
  asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
}

// A thread's part of the left matrix of a product: 16 inputs in each step.
template <int STEPS>
struct Left {
  unsigned words[STEPS][4];

  // Keeps the compiler from writing the words behind `multiply_begin`.
  __device__ void settle() {
#pragma unroll
    for (int i = 0; i < STEPS * 4; ++i) asm volatile("" : "+r"(words[i / 4][i % 4])::"memory");
  }
};

// The words of 16 of a thread's sums are those of 16 inputs of the next product.
__device__ void round_left(unsigned (&words)[4], const float* sums) {
#pragma unroll
  for (int i = 0; i < 4; ++i) words[i] = halves(sums[i * 2], sums[i * 2 + 1]);
}

// Begins left * right^T, where right has 64 rows of 128 numbers.
__device__ void begin_wide(float (&sums)[32], const Left<8>& left, unsigned right) {
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    multiply(sums, left.words[k], matrix(right + k / 4 * MATRIX) + k % 4 * 2, k > 0);
  }
  multiply_commit();
}

// The address of a lane's row among 8 by 8 numbers of four blocks: the 16 values of a warp, and the 16
// tokens from `column` on. values: the matrix of its warpgroup, tokens by values.
__device__ unsigned block_row(unsigned values, int column) {
  const int lane = threadIdx.x % 32, chunk = threadIdx.x / 32 % 4 * 2 + lane / 8 % 2;
  return values + (column + lane / 16 * 8 + lane % 8) * 128 + ((chunk ^ lane % 8) << 4);
}

__device__ void load_across(unsigned (&words)[4], unsigned from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(from)
               : "memory");
}

__device__ void store_across(unsigned to, const unsigned (&words)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
               "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
}

// Stores a warp's 16 values of the new tokens from `base` on. It transposes them where it has read the
// values of the same interval.
__device__ void store_outputs(const Delta& delta, const Row& row, const float (&outputs)[32],
                              unsigned values, int base) {
#pragma unroll
  for (int column = 0; column < C; column += 16) {
    unsigned words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      words[i] = round(outputs[column / 2 + i * 2], outputs[column / 2 + i * 2 + 1]);
    }
    store_across(block_row(values, column), words);
  }
  __syncwarp();
  const int lane = threadIdx.x % 32, chunk = threadIdx.x / 32 % 4 * 2 + lane % 2;
#pragma unroll
  for (int j = lane / 2; j < C; j += 16) {
    const uint4 x = load_16(values + j * 128 + ((chunk ^ j % 8) << 4));
    const long long token = row.offset + base + j;
    unsigned short* to = delta.out + (token * delta.heads + row.head) * WIDTH;
    if (row.is_new(base + j)) *(uint4*)(to + threadIdx.x / GROUP * 64 + chunk * 8) = x;
  }
}

// Calls use(i, token) for each of a thread's 32 sums of an interval.
template <typename Use>
__device__ void for_sums(Use use) {
#pragma unroll
  for (int i = 0; i < 32; ++i) use(i, i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2);
}

__device__ void multiply_intervals(const Delta& delta, const Row& row, Shared& shared,
                                   unsigned stages) {
  const int group = threadIdx.x / GROUP, lane = threadIdx.x % 32, column = lane % 4 * 2;
  const int value = group * 64 + threadIdx.x / 32 % 4 * 16 + lane / 4;  // of sums 0 and 1; or + 8
  float state[2][32], sums[32], outputs[32] = {};
  Left<8> left;  // the state
  auto state_at = [&](int position) {
    const long long page = row.state_pages[position / delta.page_size - 1];
    return delta.states + (page * delta.heads + row.head) * WIDTH * WIDTH + value;
  };
  auto round_state = [&] {
#pragma unroll
    for (int k = 0; k < 8; ++k) round_left(left.words[k], &state[k / 4][k % 4 * 8]);
    left.settle();
  };
  const float* from = row.begin ? state_at(row.begin) : nullptr;
  for_sums([&](int i, int key) {
    const int place = key * WIDTH + i / 2 % 2 * 8;
    state[0][i] = from ? from[place] : 0;
    state[1][i] = from ? from[place + 64 * WIDTH] : 0;
  });
  round_state();

  int stage = 0, parity = 0;
  unsigned values = 0;  // the matrix of this warpgroup's values, of the interval before
  auto finish_interval = [&](int base, int of) {
    store_outputs(delta, row, outputs, values, base);
    __syncwarp();
    if (lane == 0) arrive(shared_address(&shared.empty[of]));
  };
  for (int base = row.begin; base < row.end; base += C) {
    const unsigned at = stages + stage * STAGE_BYTES;
    const Factors& factors = shared.factors[stage];
    auto pair = [&](const float (&of)[C], int token) { return *(const float2*)&of[token]; };
    wait(shared_address(&shared.full[stage]), parity);
    multiply_begin();
    begin_wide(sums, left, at + KEYS);
    multiply_wait_but_last();
    if (base > row.begin) finish_interval(base - C, stage ? stage - 1 : STAGES - 1);
    values = at + VALUES + group * MATRIX;
    settle(outputs);
    multiply_begin();
    begin_wide(outputs, left, at + QUERIES);
    multiply_wait_but_last();
    settle(sums);

    // X, and then the updates U.
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      unsigned words[4];
      load_across(words, block_row(values, k * 16));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int token = k * 16 + i / 2 * 8 + column, sum = k * 8 + i * 2;
        const float2 factor = pair(factors.value, token), known = pair(factors.known, token);
        sums[sum] = factor.x * low(words[i]) - known.x * sums[sum];
        sums[sum + 1] = factor.y * high(words[i]) - known.y * sums[sum + 1];
      }
    }
    if (base < row.start) {
      for_sums([&](int i, int token) {
        if (base + token >= row.start) return;
        const long long update = slot_of(delta, row, base + token) * delta.heads + row.head;
        sums[i] += delta.updates[update * WIDTH + value + i / 2 % 2 * 8];
      });
    }
    Left<4> right_side;
#pragma unroll
    for (int k = 0; k < 4; ++k) round_left(right_side.words[k], &sums[k * 8]);
    right_side.settle();
    settle(sums);
    multiply_begin();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      multiply(sums, right_side.words[k], matrix(at + INVERSE) + k * 2, k > 0);
    }
    multiply_commit();
    for_sums([&](int i, int) { state[0][i] *= factors.state, state[1][i] *= factors.state; });
    multiply_wait();
    settle(sums);

    Left<4> updates, faded;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      round_left(updates.words[k], &sums[k * 8]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 factor = pair(factors.update, k * 16 + i / 2 * 8 + column);
        const int sum = k * 8 + i * 2;
        faded.words[k][i] = halves(factor.x * sums[sum], factor.y * sums[sum + 1]);
      }
    }
    updates.settle(), faded.settle();
    settle(state[0]), settle(state[1]), settle(outputs);
    multiply_begin();
#pragma unroll
    for (int k = 0; k < 4; ++k) {  // 16 tokens are 2,048 bytes
      multiply_across(state[0], faded.words[k], matrix(at + KEYS) + k * 128);
      multiply_across(state[1], faded.words[k], matrix(at + KEYS + MATRIX) + k * 128);
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      multiply(outputs, updates.words[k], matrix(at + SCORES) + k * 2);
    }
    multiply_commit();
    if (base + C > row.end) {  // later steps need these updates
      for_sums([&](int i, int token) {
        if (!row.is_new(base + token)) return;
        const long long slot = delta.slots[row.offset + base + token];
        float* to = delta.updates + (slot * delta.heads + row.head) * WIDTH + value;
        if (slot >= 0) to[i / 2 % 2 * 8] = sums[i];
      });
    }
    multiply_wait();
    settle(state[0]), settle(state[1]), settle(outputs);
    round_state();
    if (base + C == row.end / C * C) {
      float* to = state_at(base + C);
      for_sums([&](int i, int key) {
        const int place = key * WIDTH + i / 2 % 2 * 8;
        to[place] = state[0][i], to[place + 64 * WIDTH] = state[1][i];
      });
    }
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
  finish_interval((row.end - 1) / C * C, stage ? stage - 1 : STAGES - 1);
}

// Grid: a block for each row and value head.
extern "C" __global__ void __launch_bounds__(384, 1)
    delta_scan(const __grid_constant__ Delta delta) {
  extern __shared__ unsigned char memory[];
  const unsigned base = shared_address(memory), stages = (base + 1023) & ~1023u;
  Shared& shared = *reinterpret_cast<Shared*>(memory + (stages - base) + STAGES * STAGE_BYTES);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < STAGES; ++stage) {
      make_barrier(shared_address(&shared.full[stage]), GROUP);
      make_barrier(shared_address(&shared.empty[stage]), 8);  // warps
    }
    show_barriers();
  }
  let_next_begin();
  wait_for_kernel_before();
  __syncthreads();
  const Row row = find_row(delta);
  if (row.begin == row.end) return;
  if (__any_sync(~0u, threadIdx.x >= 2 * GROUP)) {  // in uniform registers, as grouped_tiles.cuh's
    asm volatile("setmaxnreg.dec.sync.aligned.u32 72;");
    fetch(delta, row, shared, stages);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 216;");
    multiply_intervals(delta, row, shared, stages);
  }
}
