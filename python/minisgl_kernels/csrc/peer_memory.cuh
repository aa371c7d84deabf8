// Memory that the GPUs of one machine write into each other, and the sum of what arrives there.
//
// There is no barrier and no flag. A receiver's memory is EMPTY until a word of data replaces it, so a
// word itself shows that it has arrived (the idea of NCCL's LL protocol, where every 4 bytes travel
// with a flag; without flags the links carry only data, as in the "Lamport" all-reduce of
// TensorRT-LLM). A receiver that has read a word makes it EMPTY again.
//
// A rank's memory: rooms of N x capacity packs, one part for each sender, then a turn per block.
//
//   turn 0, phase 0 | turn 0, phase 1 | turn 1, phase 0 | turn 1, phase 1 | turns
//
// Sums are made in the order of the ranks, in float32: every rank has the same bits.
//
// all_reduce.py puts it before all_reduce.cu.

constexpr int N = NUM_RANKS;
constexpr unsigned EMPTY = 0xffffffffu;  // a NaN in every dtype here
constexpr unsigned OTHER_NAN = 0x7fffffffu;  // what is sent for it

struct alignas(16) Pack {
  unsigned words[4];
};

struct Ranks {
  Pack* memory[N];  // each rank's, at this GPU's addresses
  long long rank, capacity;
};

// Reads words that another GPU writes: when it is called, each word by itself.
__device__ Pack read(const Pack* from) {
  Pack pack;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(pack.words[0]), "=r"(pack.words[1]), "=r"(pack.words[2]),
                 "=r"(pack.words[3])
               : "l"(from)
               : "memory");
  return pack;
}

// Writes words that another GPU reads.
__device__ void write(Pack* to, Pack pack) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to),
               "r"(pack.words[0]), "r"(pack.words[1]), "r"(pack.words[2]), "r"(pack.words[3])
               : "memory");
}

// Writes a pack of data, which must not be EMPTY.
__device__ void send(Pack* to, Pack pack) {
#pragma unroll
  for (unsigned& word : pack.words) {
    if (word == EMPTY) word = OTHER_NAN;
  }
  write(to, pack);
}

// Waits for the packs at from, from + capacity, ..., `count` in all, reads them, and makes their
// places EMPTY.
__device__ void receive(Pack (&packs)[N], Pack* from, long long capacity, int count) {
  bool whole;
  do {
    whole = true;
#pragma unroll
    for (int r = 0; r < N; ++r) {
      if (r < count) packs[r] = read(from + r * capacity);
    }
#pragma unroll
    for (int r = 0; r < N; ++r) {
      if (r < count) {
#pragma unroll
        for (unsigned word : packs[r].words) whole &= word != EMPTY;
      }
    }
  } while (!whole);
#pragma unroll
  for (int r = 0; r < N; ++r) {
    if (r < count) write(from + r * capacity, Pack{{EMPTY, EMPTY, EMPTY, EMPTY}});
  }
}

// The part of rank `of`'s memory to which `sender` writes.
__device__ Pack* part(const Ranks& ranks, int of, unsigned turn, int phase, int sender) {
  return ranks.memory[of] + ((turn * 2 + phase) * N + sender) * ranks.capacity;
}

// Lets the kernel after this one begin, and waits for the one before (programmatic dependent launch).
__device__ void start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Returns the block's turn, 0 or 1, and stores the other for its next call.
__device__ unsigned take_turn(const Ranks& ranks) {
  Pack* turns = ranks.memory[ranks.rank] + 4 * N * ranks.capacity;
  unsigned& next = reinterpret_cast<unsigned*>(turns)[blockIdx.x];
  unsigned turn = next & 1;
  __syncthreads();
  if (threadIdx.x == 0) next = turn ^ 1;
  return turn;
}

// How a word holds COUNT numbers: `add` them to floats, `round` floats to a word.
struct Float32 {
  static constexpr int COUNT = 1;
  __device__ static void add(float (&sum)[2], unsigned word) { sum[0] += __uint_as_float(word); }
  __device__ static unsigned round(const float (&sum)[2]) { return __float_as_uint(sum[0]); }
};

struct BFloat16 {
  static constexpr int COUNT = 2;
  __device__ static void add(float (&sum)[2], unsigned word) {
    sum[0] += __uint_as_float(word << 16);
    sum[1] += __uint_as_float(word & 0xffff0000u);
  }
  __device__ static unsigned round(const float (&sum)[2]) {
    unsigned word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(sum[1]), "f"(sum[0]));
    return word;
  }
};

struct Float16 {
  static constexpr int COUNT = 2;
  __device__ static void add(float (&sum)[2], unsigned word) {
    float low, high;
    asm("{ .reg .f16 low, high;\n"
        "mov.b32 {low, high}, %2;\n"
        "cvt.f32.f16 %0, low;\n"
        "cvt.f32.f16 %1, high; }"
        : "=f"(low), "=f"(high)
        : "r"(word));
    sum[0] += low;
    sum[1] += high;
  }
  __device__ static unsigned round(const float (&sum)[2]) {
    unsigned word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(sum[1]), "f"(sum[0]));
    return word;
  }
};

template <class T>
__device__ Pack sum(const Pack (&packs)[N]) {
  Pack total;
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    float sum[2] = {0, 0};
#pragma unroll
    for (const Pack& pack : packs) T::add(sum, pack.words[w]);
    total.words[w] = T::round(sum);
  }
  return total;
}
