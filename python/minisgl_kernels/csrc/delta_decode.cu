// The gated delta rule of decode rows (decision 0024): each state is read once, in the order of
// memory. Keys and values of 128 dims.
//
// A block has one row, one value head and VALUES of its values. LANES threads hold four values each;
// there are PARTS such groups, of which each reads a share of the state's keys and of the rows since
// then. So no sum crosses threads until all is read. The token at which an interval ends writes
// the next state instead of a row; its block reads the state again.
//
// Compiled by NVRTC behind hopper.cuh, with VALUES, SHARED_BYTES and BFLOAT16 defined
// (delta_decode.py).

constexpr int DIM = 128;           // of keys and of values
constexpr int THREADS = 128;
constexpr int LANES = VALUES / 4;
constexpr int PARTS = THREADS / LANES;
constexpr int KEYS = DIM / PARTS;  // of the state that a part reads
constexpr int MOST = 64;           // tokens of an interval
constexpr int AHEAD = 8;           // reads of a thread that are under way

struct Task {
  const unsigned short* mixed;  // [T, query heads, key heads, value heads], 128 numbers each
  const float *g, *beta;        // [T, heads]
  float* states;                // [pages, heads, 128 of keys, 128 of values]
  unsigned short* keys;         // [slots, key heads, 128]
  float *updates, *decays;      // [slots, heads, 128], [slots, heads]
  const int *slots, *rows, *row_table, *state_table;
  unsigned short* out;          // [T, heads, 128]
  long long rows_stride, row_stride, state_stride;
  int heads, key_heads, interval, page_size;
  float scale;
};

struct Shared {
  float query[DIM], key[DIM];  // as they are; their norms are factors of the sums
  float2 weights[MOST];        // of each row since the state, for the query and the key
  float factors[MOST];         // the decay since then and the norm of its key
  float decays[MOST];
  int slots[MOST];
  float4 sums[2][PARTS][LANES];
  float update[VALUES];
};

static_assert(sizeof(Shared) <= SHARED_BYTES, "see delta_decode.py");

__device__ float4 scaled(float4 x, float by) { return {x.x * by, x.y * by, x.z * by, x.w * by}; }

__device__ void add(float4& sum, float4 x, float by) {
  sum.x += x.x * by, sum.y += x.y * by, sum.z += x.z * by, sum.w += x.w * by;
}

// Eight numbers of 16 bits.
struct Eight {
  float at[8];

  __device__ explicit Eight(const unsigned short* from) {
    const uint4 words = *reinterpret_cast<const uint4*>(from);
    at[0] = low(words.x), at[1] = high(words.x), at[2] = low(words.y), at[3] = high(words.y);
    at[4] = low(words.z), at[5] = high(words.z), at[6] = low(words.w), at[7] = high(words.w);
  }
};

// The sum over eight neighbouring lanes, in all of them.
__device__ float sum_of_8(float x) {
#pragma unroll
  for (int apart = 4; apart > 0; apart /= 2) x += __shfl_xor_sync(~0u, x, apart);
  return x;
}

__device__ float inverse_norm(float square) { return rsqrtf(square + 1e-6f); }

extern "C" __global__ void __launch_bounds__(THREADS, 6) delta_decode(const Task task) {
  extern __shared__ __align__(16) unsigned char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  let_next_begin();
  wait_for_kernel_before();
  const int heads = task.heads, key_heads = task.key_heads, thread = threadIdx.x;
  const int n = blockIdx.x % heads, key_head = n / (heads / key_heads);
  const int row = blockIdx.x / heads / (DIM / VALUES);
  const int first_value = blockIdx.x / heads % (DIM / VALUES) * VALUES;
  const int part = thread / LANES, lane = thread % LANES;
  const long long table_idx = task.rows[row], token = task.rows[task.rows_stride + row];
  const int position = task.rows[3 * task.rows_stride + row] - 1;
  const int interval = task.interval, size = task.page_size;
  const int base = position / interval * interval, count = position - base;
  const int* state_pages = task.state_table + table_idx * task.state_stride;
  const long long matrix_of_head = n * DIM * DIM + first_value + 4 * lane;
  const float* state = nullptr;  // the part's first key, the thread's values
  if (base > 0) {
    const long long page = state_pages[base / size - 1];
    state = task.states + page * heads * DIM * DIM + matrix_of_head + part * KEYS * DIM;
  }

  // Queries, keys, and where the rows since the state are.
  const unsigned short* query = task.mixed + token * (2 * key_heads + heads) * DIM + key_head * DIM;
  const unsigned short* key = query + key_heads * DIM;
  shared.query[thread] = number(query[thread]);
  shared.key[thread] = number(key[thread]);
  if (thread < count) {
    const int at = base + thread;
    const int page = task.row_table[table_idx * task.row_stride + at / size];
    const int slot = page * size + at % size;
    shared.slots[thread] = slot;
    shared.decays[thread] = task.decays[(long long)slot * heads + n];
  }
  float decay = task.g[token * heads + n];
  __syncthreads();
  if (count > 0) decay += shared.decays[count - 1];
  const float faded = expf(decay);

  // Products of keys with the query and the key: eight lanes have 16 dims each.
  const int dims = thread % 8 * 8;
  float q_square = 0, k_square = 0, q_with_k = 0;
  {
    const Eight q0(query + dims), q1(query + dims + 64), k0(key + dims), k1(key + dims + 64);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      q_square += q0.at[i] * q0.at[i] + q1.at[i] * q1.at[i];
      k_square += k0.at[i] * k0.at[i] + k1.at[i] * k1.at[i];
      q_with_k += q0.at[i] * k0.at[i] + q1.at[i] * k1.at[i];
    }
    q_square = sum_of_8(q_square), k_square = sum_of_8(k_square), q_with_k = sum_of_8(q_with_k);
    for (int first = 0; first < count; first += THREADS / 8) {
      const int j = first + thread / 8;
      float square = 0, with_q = 0, with_k = 0;
      if (j < count) {
        const unsigned short* old =
            task.keys + ((long long)shared.slots[j] * key_heads + key_head) * DIM + dims;
        const Eight old0(old), old1(old + 64);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          square += old0.at[i] * old0.at[i] + old1.at[i] * old1.at[i];
          with_q += old0.at[i] * q0.at[i] + old1.at[i] * q1.at[i];
          with_k += old0.at[i] * k0.at[i] + old1.at[i] * k1.at[i];
        }
      }
      square = sum_of_8(square), with_q = sum_of_8(with_q), with_k = sum_of_8(with_k);
      if (j < count && thread % 8 == 0) {
        const float factor = expf(decay - shared.decays[j]) * inverse_norm(square);
        shared.factors[j] = factor;
        shared.weights[j] = {factor * with_q, factor * with_k};
      }
    }
  }

  float4 q_sum = {0, 0, 0, 0}, k_sum = {0, 0, 0, 0};
  if (state != nullptr) {
    for (int first = 0; first < KEYS; first += AHEAD) {
      float4 numbers[AHEAD];
#pragma unroll
      for (int i = 0; i < AHEAD; ++i) {
        numbers[i] = __ldcs(reinterpret_cast<const float4*>(state + (first + i) * DIM));
      }
#pragma unroll
      for (int i = 0; i < AHEAD; ++i) {
        add(q_sum, numbers[i], shared.query[part * KEYS + first + i]);
        add(k_sum, numbers[i], shared.key[part * KEYS + first + i]);
      }
    }
    q_sum = scaled(q_sum, faded), k_sum = scaled(k_sum, faded);
  }
  __syncthreads();  // weights
  const float* updates = task.updates + n * DIM + first_value + 4 * lane;
  auto update_at = [&](int j) {
    return *reinterpret_cast<const float4*>(updates + (long long)shared.slots[j] * heads * DIM);
  };
#pragma unroll 4
  for (int j = part; j < count; j += PARTS) {
    const float4 update = update_at(j);
    add(q_sum, update, shared.weights[j].x);
    add(k_sum, update, shared.weights[j].y);
  }
  shared.sums[0][part][lane] = q_sum;
  shared.sums[1][part][lane] = k_sum;
  __syncthreads();

  const float k_factor = inverse_norm(k_square);
  const int slot = task.slots[token];
  const bool ends = count == interval - 1;
  if (thread < VALUES) {
    float from_q = 0, from_k = 0;
#pragma unroll
    for (int other = 0; other < PARTS; ++other) {
      from_q += reinterpret_cast<const float*>(shared.sums[0][other])[thread];
      from_k += reinterpret_cast<const float*>(shared.sums[1][other])[thread];
    }
    const int v = first_value + thread;
    const float value = number(query[(2 * key_heads + n - key_head) * DIM + v]);
    const float update = (value - k_factor * from_k) * task.beta[token * heads + n];
    const float q_factor = task.scale * inverse_norm(q_square);
    const float out = q_factor * (from_q + k_factor * q_with_k * update);
    task.out[(token * heads + n) * DIM + v] = (unsigned short)(round(out, 0));
    shared.update[thread] = update;
    if (!ends && slot >= 0) task.updates[((long long)slot * heads + n) * DIM + v] = update;
  }
  if (!ends) {
    if (slot >= 0 && first_value == 0) {
      if (thread == 0) task.decays[(long long)slot * heads + n] = decay;
      if (n % (heads / key_heads) == 0) {
        task.keys[((long long)slot * key_heads + key_head) * DIM + thread] = key[thread];
      }
    }
    return;
  }

  // The next state: eight keys at a time.
  __syncthreads();  // updates
  const float4 update = *reinterpret_cast<const float4*>(shared.update + 4 * lane);
  const long long next_page = state_pages[(position + 1) / size - 1];
  float* next = task.states + next_page * heads * DIM * DIM + matrix_of_head + part * KEYS * DIM;
  for (int first = 0; first < KEYS; first += 8) {
    float4 sums[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      sums[i] = scaled(update, k_factor * shared.key[part * KEYS + first + i]);
      if (state != nullptr) {
        add(sums[i], *reinterpret_cast<const float4*>(state + (first + i) * DIM), faded);
      }
    }
#pragma unroll 2
    for (int j = 0; j < count; ++j) {
      const float4 old = scaled(update_at(j), shared.factors[j]);
      const Eight keys(task.keys + ((long long)shared.slots[j] * key_heads + key_head) * DIM +
                       part * KEYS + first);
#pragma unroll
      for (int i = 0; i < 8; ++i) add(sums[i], old, keys.at[i]);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) *reinterpret_cast<float4*>(next + (first + i) * DIM) = sums[i];
  }
}
