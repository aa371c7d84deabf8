// Common parts of `delta_prepare.cu` and `delta_scan.cu`: the arguments, matrices in shared memory and
// conversions. Behind hopper.cuh.

constexpr int C = 64;              // tokens of an interval
constexpr int WIDTH = 128;         // of keys and values
constexpr int GROUP = 128;         // threads of a warpgroup
constexpr unsigned MATRIX = C * 128;  // bytes: 64 rows of 64 numbers, swizzled
constexpr int PASSES = 8;          // rows of an interval of which a thread copies a part

struct Delta {
  const unsigned short* mixed;  // [T, (2 K + N) WIDTH]: queries, keys, values
  const float *g, *beta;        // [T, N]
  float* states;                // [P, N, WIDTH, WIDTH]
  unsigned short* keys;         // [slots, K, WIDTH]
  float *updates, *decays;      // [slots, N, WIDTH], [slots, N]
  const int *slots, *state_table;
  unsigned short* out;          // [T, N, WIDTH]
  unsigned short *inverses, *scores;  // float16 [intervals, N, C, C]
  float* factors;               // [intervals, N, 3, C]: decays, factors of keys and of queries
  const int *row_table, *rows;
  int num_rows, rows_stride, row_stride, state_stride, heads, key_heads, page_size;

  __device__ int width() const { return (2 * key_heads + heads) * WIDTH; }
};

// Some of a row's tokens. Token number `at` of the row is number `offset + at` of the step.
struct Span {
  int start, end, offset;
  const int* pages;

  __device__ bool is_new(int at) const { return at >= start && at < end; }
};

__device__ int intervals(int start, int end) { return (end + C - 1) / C - start / C; }

__device__ Span find_span(const Delta& delta, int row) {
  const int *of = delta.rows + row, stride = delta.rows_stride;
  const int end = of[3 * stride], start = end - of[2 * stride];
  return {start, end, of[stride] - start, delta.row_table + (long long)of[0] * delta.row_stride};
}

// Returns the slot of a token of an earlier step.
__device__ long long slot_of(const Delta& delta, const Span& span, int at) {
  return (long long)span.pages[at / delta.page_size] * delta.page_size + at % delta.page_size;
}

__device__ float exponential(float x) {
  float power;
  asm("ex2.approx.f32 %0, %1;" : "=f"(power) : "f"(x * 1.4426950408889634f));
  return power;
}

// Two numbers, rounded to float16, in a word.
__device__ unsigned halves(float low, float high) {
  unsigned word;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}

__device__ unsigned scaled(unsigned word, float factor) {
  return halves(low(word) * factor, high(word) * factor);
}

__device__ uint4 scaled(uint4 x, float factor) {
  return {scaled(x.x, factor), scaled(x.y, factor), scaled(x.z, factor), scaled(x.w, factor)};
}

// Returns a lane's key of a token, 16 bytes from `chunk` on: of this step or in the pool.
__device__ const unsigned short* key_of(const Delta& delta, const Span& span, int at, int key_head,
                                        int chunk) {
  if (at < span.start) {
    const long long key = slot_of(delta, span, at) * delta.key_heads + key_head;
    return delta.keys + key * WIDTH + chunk * 8;
  }
  const long long token = span.is_new(at) ? span.offset + at : 0;
  return delta.mixed + token * delta.width() + (delta.key_heads + key_head) * WIDTH + chunk * 8;
}

// Begins the copies of a thread's part of an interval's keys and queries; zeros where it has no token.
// to: of row thread / 16, chunk thread % 16.
__device__ void copy_keys_and_queries(const Delta& delta, const Span& span, int base, int key_head,
                                      int thread, unsigned keys, unsigned queries) {
  const int chunk = thread % 16;
#pragma unroll
  for (int i = 0; i < PASSES; ++i) {
    const int at = base + thread / 16 + i * 8;
    const bool is_new = span.is_new(at);
    const long long token = is_new ? span.offset + at : 0;
    const unsigned short* query = delta.mixed + token * delta.width() + key_head * WIDTH + chunk * 8;
    copy_16(keys + i * 1024, key_of(delta, span, at, key_head, chunk), at < span.end);
    copy_16(queries + i * 1024, query, is_new);
  }
}

// The place of a fetching thread's first 16 bytes in two matrices side by side; the next are 8 rows,
// 1,024 bytes, further.
__device__ unsigned place_of(int thread) {
  const int chunk = thread % 16, first = thread / 16;
  return chunk / 8 * MATRIX + first * 128 + ((chunk % 8 ^ first) << 4);
}
