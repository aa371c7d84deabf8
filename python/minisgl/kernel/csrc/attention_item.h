// One item of attention, with the online softmax of FlashAttention (Dao 2022), and the merge of items
// that are spans of one tile, as in Flash-Decoding (Dao et al. 2023).
//
// Axes: M query vectors of a tile, H head dim, j keys of a block. T: the inputs' type, P: the cache's.
#pragma once

#include <cmath>

#include "attention_tiled.h"

namespace attention {

// Replaces the scores of one query vector and a block by their weights, e**(score - top), and
// returns the sum of these. Keys outside [low, high) of the block are hidden. top: the largest
// score so far, which is updated; `shrink` becomes the factor of the sums so far. softcap: x
// becomes softcap * tanh(x / softcap), unless it is 0. QUANTISED: the block has scales of keys and
// values; those of values multiply the weights, but not their sum.
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

// Computes one item. partial: memory for the result of a span, or null: then it is the tile's output.
template <class T, class P>
void attend(const Step<T, P>& s, const Item& item, Scratch& scratch, float* partial) {
  const int H = s.H, G = s.group, M = item.num_queries * G, padded_M = round_up(M, MR);
  const int ld = round_up(H, 32);  // 32: a vector of bfloat16 pairs
  const bool direct = M <= DIRECT;
  scratch.begin(size_t(padded_M) * (3 * ld + BLOCK + 2) + 2 * BLOCK * ld);
  float* q = scratch.take(padded_M * ld);
  T* q_raw = reinterpret_cast<T*>(scratch.take(padded_M * ld));
  float* acc = scratch.take(padded_M * ld);
  float* scores = scratch.take(padded_M * BLOCK);
  float* tops = scratch.take(padded_M);
  float* totals = scratch.take(padded_M);
  float* keys_HJ = scratch.take(BLOCK * ld);
  float* values_JH = scratch.take(BLOCK * ld);

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
    for (int h = 0; h < H; h += W) store(q + m * ld + h, load_until(from, h, H));
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
      // Query at position i sees keys (i - window, key_end); without a window, [0, key_end).
      int i = item.position + m / G;
      int low = s.window ? i - s.window + 1 - begin : 0;
      int high = std::min(key_end(s, item.token + m / G, i) - begin, n);
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
          gemm_tile<MR, NR>(scores + m * BLOCK, BLOCK, values_JH + h, ld, acc + m * ld + h, ld, n,
                            true);
        for (; h < H; h += W)
          gemm_tile<MR, 1>(scores + m * BLOCK, BLOCK, values_JH + h, ld, acc + m * ld + h, ld, n,
                           true);
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
    for (int h = 0; h < H; h += W) store_until(to, h, H, load(acc + m * ld + h) * inverse);
  }
}

// Merges the spans of a tile: the sums of each are multiplied by e**(its top - the largest top).
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
      store_until(to, h, H, x / total);
    }
  }
}

}  // namespace attention
