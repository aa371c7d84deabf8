// Attention of few decode rows over the paged cache, with norms, rotation and the store of the new
// key and value (Flash-Decoding, Dao et al. 2023). Few rows wait more than they compute, so all that
// is older than the step is on its way before the kernel before has ended, and blocks send each other
// their sums through shared memory.
//
//   context of a row and key/value head   |== block 0 ==|== block 1 ==| ... |== block SIZE - 1 ==|
//
// A cluster of SIZE blocks has a row and a key/value head. A warp takes 16 keys and values at a time,
// copies the next ones to shared memory meanwhile, and has a softmax of its own; warps are merged in
// the block. Then each block gets its share of the outputs from all blocks.
//
// Compiled by NVRTC behind hopper.cuh, with WARPS, STAGES, DIM, WIDE, NORM, SHARED_BYTES and BFLOAT16
// defined (few_attention.py).

constexpr int THREADS = WARPS * 32;
constexpr int KEYS = 16;                       // of a warp, at a time
constexpr int CHUNKS = DIM / 8;                // of 16 bytes, in a key
constexpr int TILE_BYTES = KEYS * DIM * 2;     // of keys, or of values
constexpr int HEADS = WIDE ? 16 : 8;           // the most query heads of a key/value head
constexpr int EACH = DIM / 32;                 // numbers of a lane
constexpr int BLOCKS = 8;                      // of a cluster at most
constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LEAST = -1e30f;

struct Task {
  const unsigned short* qkv;    // [B, query heads + 2 K, DIM]
  unsigned short *k, *v;        // [pages, page size, K, DIM]
  const int *table, *rows, *slots;
  const float* cos_sin;         // [P, DIM]
  const unsigned short *q_weight, *k_weight;
  const float* sinks;           // [query heads], or nothing
  unsigned short* out;          // [B, query heads, DIM]
  long long table_stride, rows_stride;
  int heads, group, page_bits, window;
  float eps, scale;
};

// The largest score, and the sum of exponentials relative to it.
struct Mass {
  float top, sum;
};

struct Shared {
  unsigned char tiles[WARPS][STAGES][2][TILE_BYTES];  // later the sums of the warps
  unsigned char query[16 * DIM * 2];
  uint4 fresh[2][CHUNKS];                      // the new key and value
  Mass masses[WARPS][HEADS];
  float sent[HEADS * DIM];                     // this block's share, from each block
  Mass sent_masses[BLOCKS][HEADS];
};

static_assert(sizeof(Shared) <= SHARED_BYTES, "see few_attention.py");
static_assert(HEADS * DIM * 4 <= STAGES * 2 * TILE_BYTES, "a warp's sums are where its tiles were");

__device__ unsigned block_of_cluster() {
  unsigned rank;
  asm volatile("mov.u32 %0, %cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ unsigned blocks_of_cluster() {
  unsigned count;
  asm volatile("mov.u32 %0, %cluster_nctarank;" : "=r"(count));
  return count;
}

__device__ unsigned in_block(const void* pointer, int block) {
  unsigned there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(pointer)), "r"(block));
  return there;
}

// Where a chunk of a row is: chunks are exchanged, so that ldmatrix meets all banks.
__device__ int place(int row, int chunk) { return row * DIM * 2 + ((chunk ^ row % 8) << 4); }

// Four matrices of 8 x 8 numbers, one row of which begins at each lane's address.
template <bool TRANSPOSED>
__device__ void load_matrices(unsigned (&words)[4], const void* from) {
  if (TRANSPOSED) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(shared_address(from))
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(shared_address(from))
                 : "memory");
  }
}

#if BFLOAT16
#define KIND "bf16"
#else
#define KIND "f16"
#endif

// Adds the product of heads and keys. Without WIDE the heads from 8 on are zeros.
__device__ void multiply(float* sums, const unsigned (&a)[4], unsigned b0, unsigned b1) {
#if WIDE
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." KIND "." KIND ".f32 {%0, %1, %2, %3}, "
               "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
  [[maybe_unused]] float unused0, unused1;
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." KIND "." KIND ".f32 {%0, %1, %2, %3}, "
               "{%4, %6, %5, %6}, {%7, %8}, {%0, %1, %9, %9};"
               : "+f"(sums[0]), "+f"(sums[1]), "=f"(unused0), "=f"(unused1)
               : "r"(a[0]), "r"(a[2]), "r"(0), "r"(b0), "r"(b1), "f"(0.f));
#endif
}

constexpr int ROWS = WIDE ? 2 : 1;  // of a lane, in a product: lane / 4, and 8 more
constexpr int WIDTH = 2 * ROWS;     // numbers of a lane, in a product of 8 columns

__device__ float rounded(float x) { return low(round(x, 0)); }

// A head, EACH dims of it in each lane. Norms, rotates and rounds as Triton's kernel does.
struct Head {
  float at[EACH];

  __device__ void load(const unsigned short* from) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < EACH; i += 2) {
      const unsigned word = *reinterpret_cast<const unsigned*>(from + lane * EACH + i);
      at[i] = low(word), at[i + 1] = high(word);
    }
  }

  __device__ void norm(const Head& weight, float eps) {
    float square = 0;
#pragma unroll
    for (int i = 0; i < EACH; ++i) square += at[i] * at[i];
#pragma unroll
    for (int apart = 16; apart > 0; apart /= 2) square += __shfl_xor_sync(~0u, square, apart);
    const float factor = rsqrtf(square / DIM + eps);
#pragma unroll
    for (int i = 0; i < EACH; ++i) at[i] = rounded(at[i] * factor * weight.at[i]);
  }

  __device__ void rotate(const Head& cos, const Head& sin) {
    const bool is_first = threadIdx.x % 32 < 16;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const float partner = __shfl_xor_sync(~0u, at[i], 16);
      const float crossed = rounded(partner * sin.at[i]);
      at[i] = rounded(rounded(at[i] * cos.at[i]) + (is_first ? -crossed : crossed));
    }
  }

  // Stores it as one row of 16 bits; row: for the order of its chunks, 0 if they are in order.
  __device__ void store(unsigned char* to, int row) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < EACH; i += 2) {
      const int byte = (lane * EACH + i) * 2;
      *reinterpret_cast<unsigned*>(to + (((byte >> 4) ^ row % 8) << 4 | byte % 16)) =
          round(at[i], at[i + 1]);
    }
  }
};

// The keys of this block, which its warps take in turns of 16, and the newest one, which memory does
// not have.
struct Keys {
  int first, last, newest;
  const int* table;
  int page_bits;

  __device__ int begin(int turn) const { return first + (turn * WARPS + threadIdx.x / 32) * KEYS; }

  __device__ int turns() const {
    const int there = last - begin(0);
    return there > 0 ? (there + WARPS * KEYS - 1) / (WARPS * KEYS) : 0;
  }

  // Returns the page of this lane's key in a turn.
  __device__ int page(int turn) const {
    const int n = begin(turn) + threadIdx.x % KEYS;
    return n < last ? table[n >> page_bits] : 0;
  }
};

// Copies the keys and values of a turn. page: of this lane's key.
__device__ void copy_turn(unsigned char* tiles, const Task& task, const Keys& keys, int head, int turn,
                          int page) {
  constexpr int AT_ONCE = 32 / CHUNKS;
  const int lane = threadIdx.x % 32, chunk = lane % CHUNKS, begin = keys.begin(turn);
  const int offset = (begin + lane % KEYS) & ((1 << keys.page_bits) - 1);
  const int slot = (page << keys.page_bits) + offset, row = task.heads * DIM;
  const unsigned to = shared_address(tiles) + turn % STAGES * 2 * TILE_BYTES;
  const unsigned short* k = task.k + head * DIM + chunk * 8;
  const unsigned short* v = task.v + head * DIM + chunk * 8;
#pragma unroll
  for (int i = 0; i < KEYS; i += AT_ONCE) {
    const int key = i + lane / CHUNKS;
    const long long at = (long long)__shfl_sync(~0u, slot, key) * row;
    if (begin + key == keys.newest) continue;
    const bool there = begin + key < keys.last;
    copy_16(to + place(key, chunk), k + at, there);
    copy_16(to + TILE_BYTES + place(key, chunk), v + at, there);
  }
}

// A warp's softmax over its keys so far.
struct Sums {
  float values[CHUNKS][WIDTH];
  float top[ROWS], mass[ROWS];

  // Adds 16 keys and values, of which `count` are there.
  __device__ void add(const unsigned char* queries, const unsigned char* keys, int count,
                      float scale) {
    const int lane = threadIdx.x % 32;
    float scores[2][4] = {};
#pragma unroll
    for (int step = 0; step < DIM / 16; ++step) {
      unsigned query[4], key[4];
      load_matrices<false>(query, queries + place(lane % 16, step * 2 + lane / 16));
      load_matrices<false>(key, keys + place(lane / 16 * 8 + lane % 8, step * 2 + lane / 8 % 2));
      multiply(scores[0], query, key[0], key[1]);
      multiply(scores[1], query, key[2], key[3]);
    }
    unsigned weights[4] = {};
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
      float largest = top[row];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& score = scores[i / 2][row * 2 + i % 2];
        const bool there = i / 2 * 8 + lane % 4 * 2 + i % 2 < count;
        score = there ? score * scale : 2 * LEAST;
        largest = fmaxf(largest, score);
      }
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
      const float shrink = exp2f(top[row] - largest);
      top[row] = largest, mass[row] *= shrink;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& score = scores[i / 2][row * 2 + i % 2];
        score = exp2f(score - largest), mass[row] += score;
      }
#pragma unroll
      for (int chunk = 0; chunk < CHUNKS; ++chunk) {
        values[chunk][row * 2] *= shrink, values[chunk][row * 2 + 1] *= shrink;
      }
      weights[row] = round(scores[0][row * 2], scores[0][row * 2 + 1]);
      weights[row + 2] = round(scores[1][row * 2], scores[1][row * 2 + 1]);
    }
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk += 2) {
      unsigned value[4];
      load_matrices<true>(value, keys + TILE_BYTES + place(lane % 16, chunk + lane / 16));
      multiply(values[chunk], weights, value[0], value[1]);
      multiply(values[chunk + 1], weights, value[2], value[3]);
    }
  }

  // Stores what the warp has for each head, where its tiles were.
  __device__ void store(Shared& shared, int group) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float* sums = reinterpret_cast<float*>(shared.tiles[warp]);
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
      mass[row] += __shfl_xor_sync(~0u, mass[row], 1);
      mass[row] += __shfl_xor_sync(~0u, mass[row], 2);
      const int g = lane / 4 + row * 8;
      if (g >= group) continue;
      if (lane % 4 == 0) shared.masses[warp][g] = {top[row], mass[row]};
#pragma unroll
      for (int chunk = 0; chunk < CHUNKS; ++chunk) {
        *reinterpret_cast<float2*>(sums + g * DIM + chunk * 8 + lane % 4 * 2) = {
            values[chunk][row * 2], values[chunk][row * 2 + 1]};
      }
    }
  }
};

// Returns the sum of one number over all parts, relative to the largest score, and their mass. mass_of,
// number_of: of part i; those from `count` on are not read.
template <int MOST, typename MassOf, typename NumberOf>
__device__ float merged(Mass& whole, int count, MassOf mass_of, NumberOf number_of) {
  Mass masses[MOST];
  float numbers[MOST];
#pragma unroll
  for (int i = 0; i < MOST; ++i) {
    masses[i] = i < count ? mass_of(i) : Mass{LEAST, 0};
    numbers[i] = i < count ? number_of(i) : 0;
    whole.top = fmaxf(whole.top, masses[i].top);
  }
  float sum = 0;
#pragma unroll
  for (int i = 0; i < MOST; ++i) {
    const float weight = exp2f(masses[i].top - whole.top);
    sum += numbers[i] * weight, whole.sum += masses[i].sum * weight;
  }
  return sum;
}

extern "C" __global__ void __launch_bounds__(THREADS, 512 / THREADS) few_attention(const Task task) {
  extern __shared__ __align__(128) unsigned char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int size = blocks_of_cluster(), rank = block_of_cluster();
  const int pair = blockIdx.x / size, row = pair / task.heads, head = pair % task.heads;
  const int group = task.group, all_heads = task.heads * (group + 2);
  // Uploads and tables of the step are older than the kernel before.
  const long long table_idx = task.rows[row];
  const int end = task.rows[3 * task.rows_stride + row], slot = task.slots[row];
  const int low_end = task.window ? max(end - task.window, 0) : 0, count = end - low_end;
  if (count <= 0) {  // a padding row
    let_next_begin();
    wait_for_kernel_before();  // else the next kernel would not wait for it
    return;
  }
  asm volatile("barrier.cluster.arrive.relaxed.aligned;");  // others may write to this block's memory
  const int each = ((count + size - 1) / size + KEYS - 1) / KEYS * KEYS;
  Keys keys;
  keys.first = low_end + rank * each, keys.last = min(keys.first + each, end);
  keys.table = task.table + table_idx * task.table_stride, keys.page_bits = task.page_bits;
  const bool has_newest = slot >= 0 && keys.first < keys.last && keys.last == end;
  keys.newest = has_newest ? end - 1 : -1;
  unsigned char* tiles = shared.tiles[warp][0][0];
  const int turns = keys.turns();
#pragma unroll
  for (int turn = 0; turn < STAGES; ++turn) {
    if (turn < turns) copy_turn(tiles, task, keys, head, turn, keys.page(turn));
    commit_copies();
  }
  int next_page = STAGES < turns ? keys.page(STAGES) : 0;
  let_next_begin();
  Head cos, sin, q_weight, k_weight;
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const float* turn = task.cos_sin + (long long)(end - 1) * DIM + lane % 16 * EACH + i;
    cos.at[i] = rounded(turn[0]), sin.at[i] = rounded(turn[DIM / 2]);
  }
  if (NORM) q_weight.load(task.q_weight), k_weight.load(task.k_weight);

  wait_for_kernel_before();
  const unsigned short* heads = task.qkv + (long long)row * all_heads * DIM;
  for (int g = warp; g < group + 2; g += WARPS) {
    Head x;
    if (g < group) {
      x.load(heads + (head * group + g) * DIM);
      if (NORM) x.norm(q_weight, task.eps);
      x.rotate(cos, sin);
      x.store(shared.query + g * DIM * 2, g);
    }
    const int which = g - group;  // the new key and value
    if (which < 0 || which > 1 || !has_newest) continue;
    x.load(heads + ((group + which) * task.heads + head) * DIM);
    if (which == 0) {
      if (NORM) x.norm(k_weight, task.eps);
      x.rotate(cos, sin);
    }
    x.store(reinterpret_cast<unsigned char*>(shared.fresh[which]), 0);
    unsigned short* pool = which == 0 ? task.k : task.v;
    x.store(reinterpret_cast<unsigned char*>(pool + ((long long)slot * task.heads + head) * DIM), 0);
  }

  Sums sums = {};
#pragma unroll
  for (int i = 0; i < ROWS; ++i) sums.top[i] = LEAST;
  __syncthreads();  // queries, the new key and value
  for (int turn = 0; turn < turns; ++turn) {
    wait_for_copies<STAGES - 1>();
    unsigned char* tile = tiles + turn % STAGES * 2 * TILE_BYTES;
    const int begin = keys.begin(turn), newest = keys.newest - begin;
    if (newest >= 0 && newest < KEYS && lane < 2 * CHUNKS) {
      const int which = lane / CHUNKS, chunk = lane % CHUNKS;
      *reinterpret_cast<uint4*>(tile + which * TILE_BYTES + place(newest, chunk)) =
          shared.fresh[which][chunk];
    }
    __syncwarp();
    sums.add(shared.query, tile, keys.last - begin, task.scale);
    __syncwarp();
    if (turn + STAGES < turns) {
      copy_turn(tiles, task, keys, head, turn + STAGES, next_page);
      if (turn + STAGES + 1 < turns) next_page = keys.page(turn + STAGES + 1);
    }
    commit_copies();
  }
  __syncwarp();  // its tiles are not read any more
  sums.store(shared, group);
  __syncthreads();

  // Merge the warps, and send each block its share.
  const int share = group * DIM / size;
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");  // all blocks have begun
  for (int i = thread; i < group * DIM; i += THREADS) {
    const int g = i / DIM;
    Mass whole = {LEAST, 0};
    const float sum = merged<WARPS>(
        whole, WARPS, [&](int w) { return shared.masses[w][g]; },
        [&](int w) { return reinterpret_cast<const float*>(shared.tiles[w])[i]; });
    const unsigned to = in_block(shared.sent + rank * share + i % share, i / share);
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(to), "f"(sum) : "memory");
    if (i % DIM >= size) continue;
    const unsigned mass_to = in_block(&shared.sent_masses[rank][g], i % DIM);
    asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(mass_to), "f"(whole.top),
                 "f"(whole.sum)
                 : "memory");
  }
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");

  for (int i = thread; i < share; i += THREADS) {
    const int at = rank * share + i, g = at / DIM, n = head * group + g;
    Mass whole = {LEAST, 0};
    float sum = merged<BLOCKS>(
        whole, size, [&](int block) { return shared.sent_masses[block][g]; },
        [&](int block) { return shared.sent[block * share + i]; });
    if (task.sinks) {
      const float sink = task.sinks[n] * LOG2_E, top = fmaxf(whole.top, sink);
      const float before = exp2f(whole.top - top);
      sum *= before, whole.sum = whole.sum * before + exp2f(sink - top);
    }
    task.out[((long long)row * task.heads * group + n) * DIM + at % DIM] =
        (unsigned short)(round(sum / whole.sum, 0));
  }
}
