// Attention of many query vectors as two small GEMMs, limited by arithmetic. Each block of keys and
// values is converted once, and its keys are transposed.
//
// Axes: M query vectors of a tile, H head dim, j keys of a block. T: the inputs' type, P: the cache's.
#pragma once

#include "attention_direct.h"
#include "small_gemm.h"

namespace attention {

// Rows, and vectors of columns, whose sums stay in registers.
constexpr int MR = W == 8 ? 6 : 4, NR = W == 8 ? 2 : 4;

// keys_HJ[h][j] in float32, from a block of keys.
template <class P>
void transpose_keys(const P* const* keys, int H, float* keys_HJ) {
  for (int j = 0; j < BLOCK; j += W)
    for (int h = 0; h < H; h += W) {
      VF rows[W];
      for (int i = 0; i < W; i++) rows[i] = load_until(keys[j + i], h, H);
      transpose(rows);
      for (int i = 0; i < W; i++) store(keys_HJ + (h + i) * BLOCK + j, rows[i]);
    }
}

#if defined(__AVX512BF16__)
// The same for bfloat16: one instruction multiplies and adds pairs along H, with float32 sums. A
// pair is one 32-bit element of a vector here.
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

// As `gemm_tile`, for pairs of bfloat16.
template <int N>
INLINE void pair_gemm_tile(const bf16* a, int lda, const float* b, int ldb, float* c, int ldc,
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
      pair_gemm_tile<BLOCK / W>(q_raw + m * ld, ld, room, BLOCK, scores + m * BLOCK, BLOCK,
                                (H + 1) / 2);
    return;
  }
#endif
  transpose_keys(keys, H, room);
  for (int m = 0; m < padded_M; m += MR)
    for (int j = 0; j < BLOCK; j += NR * W)
      gemm_tile<MR, NR>(q + m * ld, ld, room + j, BLOCK, scores + m * BLOCK + j, BLOCK, H, false);
}

// values_JH[j][h] in float32, from a block of values.
template <class P>
void widen_values(const P* const* values, int H, int ld, float* values_JH) {
  for (int j = 0; j < BLOCK; j++)
    for (int h = 0; h < H; h += W) store(values_JH + j * ld + h, load_until(values[j], h, H));
}

}  // namespace attention
