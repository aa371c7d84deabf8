// Causal attention of one step over the paged KV cache; nothing of the cache is copied but for a
// block of keys at a time, into the core's own cache.
//
// The work is cut into items (row, tile of its queries, key/value head, span of keys):
//
//   queries  |== tile ==|== tile ==|=|        a tile: up to TILE query vectors (tokens x the heads
//   keys     |=== span ===|=== span ==|       that share the key/value head)
//                                             spans: only where tiles are too few for the cores
//
// An item walks its keys in blocks with the online softmax of FlashAttention (Dao 2022); items that
// cover spans of the same tile leave partial results that are merged at the end, as Flash-Decoding
// does (Dao et al. 2023). A tile of few query vectors reads keys and values where they lie, limited
// by memory; a larger one converts each block to float32, keys transposed, and runs as two small
// matrix products, limited by arithmetic.
//
// The cache has the inputs' type T, or numbers of 8 bits (quantised.h): P. A key's scale multiplies its
// score, a value's its weight.
//
// Axes: M query vectors of a tile, H head dim, j keys of a block.
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "quantised.h"
#include "rows.h"

namespace {

constexpr int BLOCK = 64;      // keys; scores, keys and values of a block stay in the L1/L2 cache
constexpr int TILE = 64;       // query vectors: a transposed block of keys is worth its making
constexpr int MR = 4;          // query vectors and ...
constexpr int NR = W == 8 ? 2 : 4;  // ... columns of W that a product keeps in registers
constexpr int DIRECT = 8;      // query vectors that read the cache in place: here both ways take
                               // 0.3 ms (1,024 keys, bfloat16, one core), at 12 it is 0.42 to 0.33
constexpr int MIN_SPAN = 256;  // keys: a shorter span costs more to merge than it saves
constexpr float LOWEST = std::numeric_limits<float>::lowest();

template <class T, class P>
struct Step {
  static constexpr bool QUANTISED = !std::is_same_v<T, P>;
  const T* q;
  T* out;
  P *k_pool, *v_pool;
  float *k_scales, *v_scales;  // where QUANTISED, of slot s and head k at [s * scale_stride + k]
  int64_t scale_stride;        // 0: all slots share the scales of their head
  int64_t q_stride, table_stride;  // elements between tokens, rows
  const int32_t *slots, *table, *table_idxs, *lengths, *ends;
  int num_tokens, num_rows, num_heads, num_kv_heads, group, H, page_size, window;
  const float* sinks;  // a logit per query head, or null
  float scale, softcap;  // softcap 0: none
};

struct Item {
  int row, kv_head;
  int token, position, num_queries;  // of the tile's first query: index in the batch, position
  int key_begin, key_end;
  int partial;  // index of this span's partial result, -1 where the tile has one span only
};

struct Merge {  // partial results [begin, end) make one tile
  Item tile;
  int begin, end;
};

struct Scratch {
  std::vector<float> floats;
  float* take(size_t& used, size_t count) {
    float* p = floats.data() + used;
    used += (count + 15) / 16 * 16;
    return p;
  }
};

int round_up(int n, int to) { return (n + to - 1) / to * to; }

// Of a tile whose first query is at `position`.
template <class T, class P>
int first_key(const Step<T, P>& s, int position) {
  return s.window ? std::max(0, position - s.window + 1) : 0;
}

// --- direct: few query vectors ------------------------------------------------------------------

#if defined(__AVX512BF16__)
INLINE __m512bh load_pairs(const bf16* p, int n) {
  __mmask32 mask = n >= 32 ? ~0u : (1u << n) - 1;
  return (__m512bh)_mm512_maskz_loadu_epi16(mask, p);
}
#endif

// scores[m][j] for GB query vectors and W / GB keys.
template <int GB, class T, class P>
INLINE void dot_block(const float* q, const T* q_raw, int q_stride, const P* const* keys, int H,
                      float* scores) {
  constexpr int KB = W / GB;
  VF acc[W] = {};
#if defined(__AVX512BF16__)
  if constexpr (std::is_same_v<T, bf16>) {
    for (int h = 0; h < H; h += 32) {
      __m512bh q_pairs[GB];
      for (int g = 0; g < GB; g++) q_pairs[g] = load_pairs(q_raw + g * q_stride + h, 32);
      for (int j = 0; j < KB; j++) {
        __m512bh k_pairs = load_pairs(keys[j] + h, H - h);
        for (int g = 0; g < GB; g++)
          acc[g * KB + j] =
              (VF)_mm512_dpbf16_ps((__m512)acc[g * KB + j], q_pairs[g], k_pairs);
      }
    }
  } else
#endif
  {
    int h = 0;
    for (; h + W <= H; h += W)
      for (int j = 0; j < KB; j++) {
        VF k = load(keys[j] + h);
        for (int g = 0; g < GB; g++) acc[g * KB + j] += load(q + g * q_stride + h) * k;
      }
    if (h < H)
      for (int j = 0; j < KB; j++) {
        VF k = load_first(keys[j] + h, H - h);
        for (int g = 0; g < GB; g++) acc[g * KB + j] += load(q + g * q_stride + h) * k;
      }
  }
  float sums[W];
  store(sums, sum_rows(acc));
  for (int g = 0; g < GB; g++) std::memcpy(scores + g * BLOCK, sums + g * KB, KB * 4);
}

// One head's keys are short runs far apart, which the hardware does not foresee: whoever reads the
// keys of a block asks for its values, whoever reads values asks for the keys of the next block.
// Decode of 8 x 1,024 in bfloat16 on one core: 4.4 ms without this, 1.5 ms with it.
INLINE void prefetch(const void* p, int bytes) {
  for (int at = 0; at < bytes; at += 64) __builtin_prefetch(static_cast<const char*>(p) + at);
}

// acc[m][0:HB * W] += p[m][j] * values[j][0:HB * W] over n keys, for GB query vectors.
template <int GB, int HB, class P>
INLINE void add_values(const float* p, const P* const* values, int h, int n, float* acc, int ld,
                       const P* const* next_keys, int ahead) {
  VF sums[GB][HB];
  for (int g = 0; g < GB; g++)
    for (int i = 0; i < HB; i++) sums[g][i] = load(acc + g * ld + h + i * W);
  for (int j = 0; j < n; j++) {
    prefetch(next_keys[j], ahead);
    VF v[HB];
    for (int i = 0; i < HB; i++) v[i] = load(values[j] + h + i * W);
    for (int g = 0; g < GB; g++) {
      VF weight = splat(p[g * BLOCK + j]);
      for (int i = 0; i < HB; i++) sums[g][i] += weight * v[i];
    }
  }
  for (int g = 0; g < GB; g++)
    for (int i = 0; i < HB; i++) store(acc + g * ld + h + i * W, sums[g][i]);
}

template <int GB, class T, class P>
void direct_scores(const float* q, const T* q_raw, int q_stride, const P* const* keys, int H, int n,
                   float* scores, const P* const* values, int ahead) {
  constexpr int KB = W / GB;
  for (int j = 0; j < n; j += KB) {
    for (int i = 0; i < KB; i++) prefetch(values[j + i], ahead);
    dot_block<GB>(q, q_raw, q_stride, keys + j, H, scores + j);
  }
}

template <int GB, class P>
void direct_values(const float* p, const P* const* values, int H, int n, float* acc, int ld,
                   const P* const* next_keys, int ahead) {
  constexpr int HB = GB == 4 ? 4 : 8;
  int h = 0;
  for (; h + HB * W <= H; h += HB * W, ahead = 0)
    add_values<GB, HB>(p, values, h, n, acc, ld, next_keys, ahead);
  for (; h + W <= H; h += W, ahead = 0)
    add_values<GB, 1>(p, values, h, n, acc, ld, next_keys, ahead);
  if (h < H)
    for (int g = 0; g < GB; g++) {
      VF sums = load(acc + g * ld + h);
      for (int j = 0; j < n; j++)
        sums += splat(p[g * BLOCK + j]) * load_first(values[j] + h, H - h);
      store(acc + g * ld + h, sums);
    }
}

// --- tiled: two small matrix products -----------------------------------------------------------

// C[MR][N * W] = (ADD ? C : 0) + A[MR][K] B[K][N * W]
template <int N, bool ADD>
INLINE void product(const float* a, int lda, const float* b, int ldb, float* c, int ldc, int K) {
  VF sums[MR][N] = {};
  if constexpr (ADD)
    for (int m = 0; m < MR; m++)
      for (int i = 0; i < N; i++) sums[m][i] = load(c + m * ldc + i * W);
  for (int k = 0; k < K; k++) {
    VF columns[N];
    for (int i = 0; i < N; i++) columns[i] = load(b + k * ldb + i * W);
    for (int m = 0; m < MR; m++) {
      VF factor = splat(a[m * lda + k]);
      for (int i = 0; i < N; i++) sums[m][i] += factor * columns[i];
    }
  }
  for (int m = 0; m < MR; m++)
    for (int i = 0; i < N; i++) store(c + m * ldc + i * W, sums[m][i]);
}

// keys_HJ[h][j], float32, from BLOCK rows.
template <class P>
void transpose_keys(const P* const* keys, int H, float* keys_HJ) {
  for (int j = 0; j < BLOCK; j += W)
    for (int h = 0; h < H; h += W) {
      VF rows[W];
      for (int i = 0; i < W; i++)
        rows[i] = h + W <= H ? load(keys[j + i] + h) : load_first(keys[j + i] + h, H - h);
      transpose(rows);
      for (int i = 0; i < W; i++) store(keys_HJ + (h + i) * BLOCK + j, rows[i]);
    }
}

#if defined(__AVX512BF16__)
// The same two for bfloat16, whose pairs along H multiply and add in one instruction: exact
// products, float32 sums. A pair is one 32-bit element of a vector here.
template <class P>
void transpose_pairs(const P* const* keys, int H, float* pairs_HJ) {
  for (int j = 0; j < BLOCK; j += W)
    for (int h = 0; h < H; h += 2 * W) {
      VF rows[W];
      for (int i = 0; i < W; i++) rows[i] = (VF)load_pairs(keys[j + i] + h, H - h);
      transpose(rows);
      for (int i = 0; i < W; i++) store(pairs_HJ + (h / 2 + i) * BLOCK + j, rows[i]);
    }
}

template <int N>
INLINE void pair_product(const bf16* a, int lda, const float* b, int ldb, float* c, int ldc,
                         int pairs) {
  VF sums[MR][N] = {};
  for (int k = 0; k < pairs; k++) {
    VF columns[N];
    for (int i = 0; i < N; i++) columns[i] = load(b + k * ldb + i * W);
    for (int m = 0; m < MR; m++) {
      int32_t pair;
      std::memcpy(&pair, a + m * lda + 2 * k, 4);
      __m512bh factor = (__m512bh)_mm512_set1_epi32(pair);
      for (int i = 0; i < N; i++)
        sums[m][i] = (VF)_mm512_dpbf16_ps((__m512)sums[m][i], factor, (__m512bh)columns[i]);
    }
  }
  for (int m = 0; m < MR; m++)
    for (int i = 0; i < N; i++) store(c + m * ldc + i * W, sums[m][i]);
}
#endif

// scores[m][j] of padded_M query vectors and BLOCK keys; room holds BLOCK * ld floats.
template <class T, class P>
void tiled_scores(const float* q, const T* q_raw, int ld, const P* const* keys, int H, int padded_M,
                  float* room, float* scores) {
#if defined(__AVX512BF16__)
  if constexpr (std::is_same_v<T, bf16>) {
    transpose_pairs(keys, H, room);
    for (int m = 0; m < padded_M; m += MR)
      pair_product<BLOCK / W>(q_raw + m * ld, ld, room, BLOCK, scores + m * BLOCK, BLOCK,
                              (H + 1) / 2);
    return;
  }
#endif
  transpose_keys(keys, H, room);
  for (int m = 0; m < padded_M; m += MR)
    for (int j = 0; j < BLOCK; j += NR * W)
      product<NR, false>(q + m * ld, ld, room + j, BLOCK, scores + m * BLOCK + j, BLOCK, H);
}

template <class P>
void widen_values(const P* const* values, int H, int ld, float* values_JH) {
  for (int j = 0; j < BLOCK; j++)
    for (int h = 0; h < H; h += W)
      store(values_JH + j * ld + h,
            h + W <= H ? load(values[j] + h) : load_first(values[j] + h, H - h));
}

// --- one item -----------------------------------------------------------------------------------

// The keys and values of a block: where they are, and their scales.
template <class P>
struct Block {
  const P *keys[BLOCK], *values[BLOCK];
  float key_scales[BLOCK], value_scales[BLOCK];
};

// A block from position `begin` on; past `end`, the last key and value again, so that every address is
// one that was written: unwritten memory may hold NaN.
template <class T, class P>
void locate(const Step<T, P>& s, const Item& item, int begin, int end, Block<P>& block) {
  const int32_t* pages = s.table + s.table_idxs[item.row] * s.table_stride;
  int64_t stride = int64_t(s.num_kv_heads) * s.H, head = int64_t(item.kv_head) * s.H;
  int page = begin / s.page_size, offset = begin % s.page_size;
  int64_t slot = 0;
  for (int j = 0; j < BLOCK; j++) {
    if (begin + j < end) {
      slot = int64_t(pages[page]) * s.page_size + offset;
      if (++offset == s.page_size) offset = 0, page++;
    }
    block.keys[j] = s.k_pool + slot * stride + head;
    block.values[j] = s.v_pool + slot * stride + head;
    if constexpr (Step<T, P>::QUANTISED) {
      block.key_scales[j] = s.k_scales[slot * s.scale_stride + item.kv_head];
      block.value_scales[j] = s.v_scales[slot * s.scale_stride + item.kv_head];
    }
  }
}

// Scores of one query vector become weights, in place; returns their sum. Keys outside [low, high)
// of the block are hidden. `top` is the largest score so far; the caller's sums shrink by `shrink`.
// softcap: x becomes softcap * tanh(x / softcap), unless it is 0. block: where the cache is QUANTISED,
// the scales of its keys, and of its values, which multiply the weights but not their sum.
template <bool QUANTISED, class P>
INLINE float soften(float* scores, float scale, float softcap, const Block<P>& block, int low,
                    int high, float& top, float& shrink) {
  VF x[BLOCK / W], largest = splat(LOWEST);
  for (int i = 0; i < BLOCK / W; i++) {
    x[i] = load(scores + i * W) * scale;
    if constexpr (QUANTISED) x[i] *= load(block.key_scales + i * W);
    if (softcap > 0) x[i] = softcap * tanh(x[i] / softcap);
    if (low > 0 || high < BLOCK) {
      VI j = lanes() + i * W;
      x[i] = select((j >= low) & (j < high), x[i], splat(-INFINITY));
    }
    largest = max(x[i], largest);
  }
  float new_top = std::max(top, max(largest));
  VF total = {};
  for (int i = 0; i < BLOCK / W; i++) {
    VF weights = exp(x[i] - new_top);
    total += weights;
    if constexpr (QUANTISED) weights *= load(block.value_scales + i * W);
    store(scores + i * W, weights);
  }
  shrink = new_top == top ? 1.0f : exp(splat(top - new_top))[0];
  top = new_top;
  return sum(total);
}

template <class T, class P>
void attend(const Step<T, P>& s, const Item& item, Scratch& scratch, float* partial) {
  const int H = s.H, G = s.group, M = item.num_queries * G, padded_M = round_up(M, MR);
  const int ld = round_up(H, 32);  // 32: a vector of bfloat16 pairs
  const bool direct = M <= DIRECT;
  size_t used = 0, need = size_t(padded_M) * (3 * ld + BLOCK + 2) + 2 * BLOCK * ld + 128;
  if (scratch.floats.size() < need + 16) scratch.floats.resize(need + 16);
  used = (64 - reinterpret_cast<uintptr_t>(scratch.floats.data()) % 64) % 64 / 4;
  float* q = scratch.take(used, padded_M * ld);
  T* q_raw = reinterpret_cast<T*>(scratch.take(used, padded_M * ld));
  float* acc = scratch.take(used, padded_M * ld);
  float* scores = scratch.take(used, padded_M * BLOCK);
  float* tops = scratch.take(used, padded_M);
  float* totals = scratch.take(used, padded_M);
  float* keys_HJ = scratch.take(used, BLOCK * ld);
  float* values_JH = scratch.take(used, BLOCK * ld);

  std::memset(q, 0, size_t(padded_M) * ld * 4);
  std::memset(q_raw, 0, size_t(padded_M) * ld * sizeof(T));
  std::memset(acc, 0, size_t(padded_M) * ld * 4);
  std::fill(tops, tops + padded_M, LOWEST);
  std::fill(totals, totals + padded_M, 0.0f);
  // A sink counts as a key without a value before the tile's first key.
  if (s.sinks && item.key_begin == first_key(s, item.position))
    for (int m = 0; m < M; m++) tops[m] = s.sinks[item.kv_head * G + m % G], totals[m] = 1.0f;
  for (int m = 0; m < M; m++) {
    const T* from = s.q + (item.token + m / G) * s.q_stride + (item.kv_head * G + m % G) * H;
    std::memcpy(q_raw + m * ld, from, H * sizeof(T));
    for (int h = 0; h < H; h += W)
      store(q + m * ld + h, h + W <= H ? load(from + h) : load_first(from + h, H - h));
  }

  Block<P> blocks[2] = {}, *block = &blocks[0], *next = &blocks[1];
  locate(s, item, item.key_begin, item.key_end, *block);
  for (int begin = item.key_begin; begin < item.key_end; begin += BLOCK) {
    const int n = std::min(BLOCK, item.key_end - begin);
    const bool more = begin + BLOCK < item.key_end;
    if (more) locate(s, item, begin + BLOCK, item.key_end, *next);
    const P *const *keys = block->keys, *const *values = block->values;
    const int ahead = more ? H * sizeof(P) : 0;  // bytes of a key to ask for
    if (direct) {
      int m = 0;
      for (; m + 4 <= M; m += 4)
        direct_scores<4>(q + m * ld, q_raw + m * ld, ld, keys, H, n, scores + m * BLOCK,
                         values, ahead);
      for (; m + 2 <= M; m += 2)
        direct_scores<2>(q + m * ld, q_raw + m * ld, ld, keys, H, n, scores + m * BLOCK,
                         values, ahead);
      for (; m < M; m++)
        direct_scores<1>(q + m * ld, q_raw + m * ld, ld, keys, H, n, scores + m * BLOCK,
                         values, ahead);
    } else {
      tiled_scores(q, q_raw, ld, keys, H, padded_M, keys_HJ, scores);
      widen_values(values, H, ld, values_JH);
    }
    for (int m = 0; m < M; m++) {
      // Query at position i sees keys (i - window, i]; without a window, [0, i].
      int i = item.position + m / G;
      int low = s.window ? i - s.window + 1 - begin : 0, high = std::min(i + 1 - begin, n);
      float shrink;
      float total = soften<Step<T, P>::QUANTISED>(scores + m * BLOCK, s.scale, s.softcap, *block,
                                                  low, high, tops[m], shrink);
      totals[m] = totals[m] * shrink + total;
      if (shrink != 1.0f)
        for (int h = 0; h < H; h += W) store(acc + m * ld + h, load(acc + m * ld + h) * shrink);
    }
    if (direct) {
      int m = 0;
      for (; m + 4 <= M; m += 4)
        direct_values<4>(scores + m * BLOCK, values, H, n, acc + m * ld, ld, next->keys, ahead);
      for (; m + 2 <= M; m += 2)
        direct_values<2>(scores + m * BLOCK, values, H, n, acc + m * ld, ld, next->keys, ahead);
      for (; m < M; m++)
        direct_values<1>(scores + m * BLOCK, values, H, n, acc + m * ld, ld, next->keys, ahead);
    } else {
      for (int m = 0; m < M; m += MR) {
        int h = 0;
        for (; h + NR * W <= H; h += NR * W)
          product<NR, true>(scores + m * BLOCK, BLOCK, values_JH + h, ld, acc + m * ld + h, ld, n);
        for (; h < H; h += W)
          product<1, true>(scores + m * BLOCK, BLOCK, values_JH + h, ld, acc + m * ld + h, ld, n);
      }
    }
    std::swap(block, next);
  }

  if (partial) {  // [M][ld] sums, then tops, then totals
    std::memcpy(partial, acc, size_t(M) * ld * 4);
    std::memcpy(partial + size_t(M) * ld, tops, M * 4);
    std::memcpy(partial + size_t(M) * ld + M, totals, M * 4);
    return;
  }
  for (int m = 0; m < M; m++) {
    T* to = s.out + (int64_t(item.token + m / G) * s.num_heads + item.kv_head * G + m % G) * H;
    float inverse = 1.0f / totals[m];
    for (int h = 0; h < H; h += W) {
      VF x = load(acc + m * ld + h) * inverse;
      h + W <= H ? store(to + h, x) : store_first(to + h, x, H - h);
    }
  }
}

// Adds up the spans of a tile: each counts e**(its top - the overall top).
template <class T, class P>
void merge(const Step<T, P>& s, const Merge& work, const std::vector<float*>& partials) {
  const Item& tile = work.tile;
  const int H = s.H, G = s.group, M = tile.num_queries * G, ld = round_up(H, 32);
  for (int m = 0; m < M; m++) {
    float top = LOWEST, total = 0;
    for (int p = work.begin; p < work.end; p++)
      top = std::max(top, partials[p][size_t(M) * ld + m]);
    std::vector<float> shares;
    for (int p = work.begin; p < work.end; p++) {
      shares.push_back(std::exp(partials[p][size_t(M) * ld + m] - top));
      total += shares.back() * partials[p][size_t(M) * ld + M + m];
    }
    T* to = s.out + (int64_t(tile.token + m / G) * s.num_heads + tile.kv_head * G + m % G) * H;
    for (int h = 0; h < H; h += W) {
      VF x = {};
      for (int p = work.begin; p < work.end; p++)
        x += load(partials[p] + size_t(m) * ld + h) * shares[p - work.begin];
      x /= total;
      h + W <= H ? store(to + h, x) : store_first(to + h, x, H - h);
    }
  }
}

// --- all items ----------------------------------------------------------------------------------

// prepare(t, keys, values) makes token t's query, and its keys and values [K, H], which are null for a
// token whose key and value are in a page of the prefix cache already (slot -1).
template <class T, class P, class Prepare>
void run(const Step<T, P>& s, int num_threads, Prepare prepare) {
  const int tile_queries = std::max(1, TILE / s.group), ld = round_up(s.H, 32);
  std::vector<Item> tiles;
  double work = 0;  // query vectors x keys
  int token = 0;
  for (int row = 0; row < s.num_rows; row++)
    for (int begin = s.ends[row] - s.lengths[row]; begin < s.ends[row]; begin += tile_queries) {
      int n = std::min(tile_queries, s.ends[row] - begin);
      int key_begin = first_key(s, begin);
      for (int head = 0; head < s.num_kv_heads; head++)
        tiles.push_back({row, head, token, begin, n, key_begin, begin + n, -1});
      work += double(n * s.group) * (begin + n - key_begin) * s.num_kv_heads;
      token += n;
    }
  // Starting the other threads takes a few microseconds: as long as about 100,000 products.
  if (work * s.H < 100e3) num_threads = 1;

  std::vector<Item> items;
  std::vector<Merge> merges;
  std::vector<size_t> offsets;
  size_t partial_floats = 0;
  for (const Item& tile : tiles) {
    int M = tile.num_queries * s.group;
    // Four items to a thread even out; a tile longer than that is cut into equal spans.
    double share = work / (4.0 * num_threads) / M;
    int length = tile.key_end - tile.key_begin;
    int spans = num_threads == 1 ? 1 : int(length / std::max(share, double(MIN_SPAN)) + 0.5);
    if (spans <= 1) {
      items.push_back(tile);
      continue;
    }
    int step = round_up((length + spans - 1) / spans, BLOCK);
    Merge merge{tile, int(offsets.size()), 0};
    for (int begin = tile.key_begin; begin < tile.key_end; begin += step) {
      Item item = tile;
      item.key_begin = begin;
      item.key_end = std::min(begin + step, tile.key_end);
      item.partial = int(offsets.size());
      items.push_back(item);
      offsets.push_back(partial_floats);
      partial_floats += size_t(M) * (ld + 2);
    }
    merge.end = int(offsets.size());
    merges.push_back(merge);
  }
  std::vector<float> partial_memory(partial_floats);
  std::vector<float*> partials;
  for (size_t offset : offsets) partials.push_back(partial_memory.data() + offset);
  // Long items first: a causal prefill's last tiles see the most keys.
  std::stable_sort(items.begin(), items.end(), [](const Item& a, const Item& b) {
    return int64_t(a.num_queries) * (a.key_end - a.key_begin) >
           int64_t(b.num_queries) * (b.key_end - b.key_begin);
  });

  const int64_t width = int64_t(s.num_kv_heads) * s.H;
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
  {
    static thread_local Scratch scratch;
    std::vector<T> made(Step<T, P>::QUANTISED ? 2 * width : 0);
#pragma omp for schedule(static)
    for (int t = 0; t < s.num_tokens; t++) {
      const int64_t slot = s.slots[t], at = slot * width;
      if (slot < 0) {
        prepare(t, nullptr, nullptr);
      } else if constexpr (Step<T, P>::QUANTISED) {
        T *keys = made.data(), *values = keys + width;
        prepare(t, keys, values);
        float *k_scales = s.k_scales + slot * s.scale_stride,
              *v_scales = s.v_scales + slot * s.scale_stride;
        for (int k = 0, h = 0; k < s.num_kv_heads; k++, h += s.H) {
          quantise_row(keys + h, s.k_pool + at + h, s.H, k_scales + k);
          quantise_row(values + h, s.v_pool + at + h, s.H, v_scales + k);
        }
      } else {
        prepare(t, s.k_pool + at, s.v_pool + at);
      }
    }
    // The barrier here keeps the contract: everything is stored before anything attends.
#pragma omp for schedule(dynamic)
    for (size_t i = 0; i < items.size(); i++)
      attend(s, items[i], scratch, items[i].partial < 0 ? nullptr : partials[items[i].partial]);
#pragma omp for schedule(dynamic)
    for (size_t i = 0; i < merges.size(); i++) merge(s, merges[i], partials);
  }
}

bool is_int32(const TensorView& x) { return x.dtype().code == kDLInt && x.dtype().bits == 32; }
bool is_float32(const TensorView& x) {
  return x.dtype().code == kDLFloat && x.dtype().bits == 32;
}

using Scales = tvm::ffi::Optional<TensorView>;

// One for each head, or for each slot and head.
float* scales_of(const Scales& scales, int64_t num_slots, int64_t K, bool of_slots) {
  CHECK(scales && (*scales).dtype().code == kDLFloat && (*scales).dtype().bits == 32 &&
            (*scales).IsContiguous() && (*scales).numel() == (of_slots ? num_slots * K : K),
        "attention: a pool of 8 bits needs float32 scales, of each head (e4m3) or of each token and "
        "head (int8)");
  return data<float>(*scales);
}

// What both doors share. rows [4, B]: table indices, first tokens in the batch, lengths, ends.
template <class T, class P>
Step<T, P> make_step(int64_t num_tokens, int64_t N, int64_t H, const TensorView& k_pool,
                     const TensorView& v_pool, const Scales& k_scales, const Scales& v_scales,
                     const TensorView& slots, const TensorView& page_table, const TensorView& rows,
                     const TensorView& out, const tvm::ffi::Optional<TensorView>& sinks,
                     double scale, double softcap, int64_t window) {
  const int64_t K = k_pool.size(2);
  CHECK(rows.ndim() == 2 && rows.size(0) == 4, "attention: rows must be [4, rows]");
  CHECK(k_pool.ndim() == 4 && k_pool.IsContiguous() && v_pool.IsContiguous(),
        "attention: the pools must be contiguous [pages, page size, heads, head dim]");
  CHECK(k_pool.size(3) == H && N % K == 0, "attention: " << N << " query heads of " << H
                                                         << " do not fit a pool of " << K
                                                         << " heads of " << k_pool.size(3));
  CHECK(v_pool.dtype() == k_pool.dtype(), "attention: keys and values must share a dtype");
  CHECK(is_int32(slots) && slots.IsContiguous() && slots.size(0) == num_tokens &&
            is_int32(page_table) && page_table.stride(1) == 1 && is_int32(rows) &&
            rows.IsContiguous() && out.IsContiguous(),
        "attention: slots, page table and rows must be int32, packed");
  CHECK(!sinks || ((*sinks).numel() == N && (*sinks).dtype().code == kDLFloat &&
                   (*sinks).dtype().bits == 32 && (*sinks).IsContiguous()),
        "attention: sinks must be float32, one per query head");
  Step<T, P> s;
  s.q = s.out = data<T>(out), s.q_stride = N * H;
  s.k_pool = data<P>(k_pool), s.v_pool = data<P>(v_pool);
  s.k_scales = s.v_scales = nullptr, s.scale_stride = 0;
  if constexpr (Step<T, P>::QUANTISED) {
    const bool of_slots = std::is_same_v<P, i8>;
    const int64_t num_slots = k_pool.size(0) * k_pool.size(1);
    s.k_scales = scales_of(k_scales, num_slots, K, of_slots);
    s.v_scales = scales_of(v_scales, num_slots, K, of_slots);
    s.scale_stride = of_slots ? K : 0;
  }
  s.slots = data<int32_t>(slots), s.table = data<int32_t>(page_table);
  s.table_stride = page_table.stride(0);
  s.num_rows = rows.size(1), s.table_idxs = data<int32_t>(rows);
  s.lengths = s.table_idxs + 2 * s.num_rows, s.ends = s.lengths + s.num_rows;
  s.num_tokens = num_tokens, s.num_heads = N, s.num_kv_heads = K, s.group = N / K, s.H = H;
  s.page_size = k_pool.size(1), s.scale = scale, s.softcap = softcap;
  s.sinks = sinks ? data<float>(*sinks) : nullptr;
  s.window = int(std::min<int64_t>(window, std::numeric_limits<int>::max()));
  int64_t tokens = 0;
  for (int row = 0; row < s.num_rows; row++) tokens += s.lengths[row];
  CHECK(tokens == num_tokens,
        "attention: the rows have " << tokens << " tokens, the inputs " << num_tokens);
  return s;
}

}  // namespace

// q [T, N, H] and k, v [T, K, H]: tokens may be apart, heads are packed. out [T, N, H], pools
// [pages, page size, K, H], all of one dtype; or pools of int8 with scales float32 [pages, page size,
// K], or of e4m3 with scales [K]. slots [T], page_table [R, P], rows [4, B]: int32. sinks float32 [N]
// or None. softcap 0, window 0: none.
void paged_attention(TensorView q, TensorView k, TensorView v, TensorView k_pool, TensorView v_pool,
                     Scales k_scales, Scales v_scales, TensorView slots, TensorView page_table, TensorView rows, TensorView out,
                     tvm::ffi::Optional<TensorView> sinks, double scale, double softcap,
                     int64_t window, int64_t num_threads) {
  for (const TensorView& x : {q, k, v})
    CHECK(x.ndim() == 3 && x.size(0) == q.size(0) && x.size(2) == q.size(2) &&
              x.dtype() == out.dtype() && x.stride(2) == 1 &&
              (x.stride(1) == x.size(2) || x.size(1) == 1),
          "attention: q, k and v must be [tokens, heads, head dim], heads packed, of one dtype");
  CHECK(k.size(1) == k_pool.size(2) && v.size(1) == k_pool.size(2),
        "attention: " << k.size(1) << " key heads do not fit a pool of " << k_pool.size(2));
  with_dtype(q.dtype(), [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    with_pool<T>(k_pool.dtype(), out.dtype(), [&](auto* pool_type) {
      using P = std::remove_pointer_t<decltype(pool_type)>;
      auto s = make_step<T, P>(q.size(0), q.size(1), q.size(2), k_pool, v_pool, k_scales, v_scales,
                               slots, page_table, rows, out, sinks, scale, softcap, window);
      s.q = data<T>(q), s.q_stride = q.stride(0);
      const size_t bytes = k.size(1) * k.size(2) * sizeof(T);
      run(s, num_threads, [&](int64_t t, T* keys, T* values) {
        if (!keys) return;
        std::memcpy(keys, data<T>(k) + t * k.stride(0), bytes);
        std::memcpy(values, data<T>(v) + t * v.stride(0), bytes);
      });
    });
  });
}

// As paged_attention, from what the projection gave: qkv [T, (N + 2K) * H]. Queries and keys are
// normed with q_weight and k_weight [H] (None: not), then rotated by cos_sin float32 [P, R] at
// positions int32 [T]. Queries wait in `out` until their tile is written over them.
void qkv_attention(TensorView qkv, tvm::ffi::Optional<TensorView> q_weight,
                   tvm::ffi::Optional<TensorView> k_weight, double eps, TensorView cos_sin,
                   TensorView positions, TensorView k_pool, TensorView v_pool, Scales k_scales,
                   Scales v_scales, TensorView slots, TensorView page_table, TensorView rows,
                   TensorView out,
                   tvm::ffi::Optional<TensorView> sinks, double scale, double softcap,
                   int64_t window, int64_t num_threads) {
  CHECK(k_pool.ndim() == 4 && qkv.ndim() == 2 && out.ndim() == 2, "attention: wrong axes");
  const int64_t K = k_pool.size(2), H = k_pool.size(3), N = out.size(1) / H, R = cos_sin.size(1);
  CHECK(qkv.size(1) == (N + 2 * K) * H && qkv.stride(1) == 1 && qkv.dtype() == out.dtype() &&
            qkv.size(0) == out.size(0) && out.size(1) % H == 0,
        "attention: qkv must be [tokens, (" << N << " + 2 * " << K << ") * " << H << "]");
  CHECK(is_int32(positions) && positions.IsContiguous() && cos_sin.IsContiguous() &&
            cos_sin.dtype().code == kDLFloat && cos_sin.dtype().bits == 32,
        "attention: positions must be int32, cosines and sines float32, packed");
  for (const auto& weight : {q_weight, k_weight})
    CHECK(!weight || ((*weight).numel() == H && (*weight).IsContiguous() &&
                      ((*weight).dtype() == qkv.dtype() || is_float32(*weight))),
          "attention: norm weights must be one per head dim, of the dtype of qkv or float32");
  check_rotary(H, R);
  with_dtype(qkv.dtype(), [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    float weights[2][MAX_HEAD_DIM];  // of queries and keys
    for (int i = 0; i < 2; ++i) {
      const auto& weight = i ? k_weight : q_weight;
      const auto copy = [&](VF v, int h) { store_until(weights[i], h, int(H), v); };
      if (weight && is_float32(*weight)) each(data<float>(*weight), H, copy);
      else if (weight) each(data<T>(*weight), H, copy);
    }
    with_pool<T>(k_pool.dtype(), out.dtype(), [&](auto* pool_type) {
      using P = std::remove_pointer_t<decltype(pool_type)>;
      auto s = make_step<T, P>(qkv.size(0), N, H, k_pool, v_pool, k_scales, v_scales, slots,
                               page_table, rows, out, sinks, scale, softcap, window);
      run(s, num_threads, [&](int64_t t, T* keys, T* values) {
        const T* row = data<T>(qkv) + t * qkv.stride(0);
        Angles<T> angles(data<float>(cos_sin) + data<int32_t>(positions)[t] * R, R);
        for (int64_t head = 0; head < (keys ? N + K : N); head++) {
          const T* from = row + head * H;
          T* to = head < N ? s.out + (t * N + head) * H : keys + (head - N) * H;
          if (head < N ? bool(q_weight) : bool(k_weight)) {
            norm_row(from, weights[head >= N], to, H, eps);
            from = to;
          }
          rotate_row(from, angles, to, H);
        }
        if (values) std::memcpy(values, row + (N + K) * H, K * H * sizeof(T));
      });
    });
  });
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(paged_attention, paged_attention);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(qkv_attention, qkv_attention);
