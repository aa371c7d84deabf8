// Attention of few query vectors, limited by memory: keys and values are read from the cache itself.
//
// Axes: M query vectors of a tile, H head dim, j keys of a block. T: the inputs' type, P: the cache's.
#pragma once

#include "attention_step.h"

namespace attention {

// Up to so many query vectors read the cache itself; more are faster with converted blocks
// (attention_tiled.h). 1,024 keys in bfloat16 on one core: with 8 query vectors both take 0.3 ms, with
// 12 0.42 and 0.33 ms.
constexpr int DIRECT = 8;

#if defined(__AVX512BF16__)
// 32 numbers, of which the first n are read; the others are 0.
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

// The hardware does not foresee the addresses of one head's keys, which are short runs far apart.
// So `direct_scores`, which reads the keys of a block, prefetches its values, and `direct_values`
// prefetches the keys of the next block. Decode of 8 x 1,024 in bfloat16 on one core: 4.4 ms
// without this, 1.5 with.
INLINE void prefetch(const void* p, int bytes) {
  for (int at = 0; at < bytes; at += 64) __builtin_prefetch(static_cast<const char*>(p) + at);
}

// acc[m][h:h + HB * W] += sum over n keys j of p[m][j] * values[j][h:h + HB * W], for GB query vectors.
// ahead: bytes of each of next_keys to prefetch.
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

// scores[m][j] of GB query vectors and n keys. ahead: bytes of each value to prefetch.
template <int GB, class T, class P>
void direct_scores(const float* q, const T* q_raw, int q_stride, const P* const* keys, int H, int n,
                   float* scores, const P* const* values, int ahead) {
  constexpr int KB = W / GB;
  for (int j = 0; j < n; j += KB) {
    for (int i = 0; i < KB; i++) prefetch(values[j + i], ahead);
    dot_block<GB>(q, q_raw, q_stride, keys + j, H, scores + j);
  }
}

// acc[m][0:H] += sum over n keys j of p[m][j] * values[j], for GB query vectors. ahead: as add_values.
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

}  // namespace attention
