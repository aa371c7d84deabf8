// Small float32 products, and the rows of queries and keys that they take.
#pragma once

#include <algorithm>
#include <cmath>

#include "tensor.h"

namespace recurrent {

constexpr float EPS = 1e-6f;  // of the norm of queries and keys
constexpr int MR = 4, NR = 4;  // rows and vectors of a product that stay in registers

// c[m][n] (+)= a[m][k] * b[k][n]; n is a multiple of W.
template <int ROWS, int COLUMNS>
INLINE void tile(const float* a, int lda, const float* b, int ldb, float* c, int ldc, int k, bool add) {
  VF acc[ROWS][COLUMNS] = {};
  if (add)
    for (int i = 0; i < ROWS; i++)
      for (int j = 0; j < COLUMNS; j++) acc[i][j] = load(c + i * ldc + j * W);
  for (int p = 0; p < k; p++)
    for (int j = 0; j < COLUMNS; j++) {
      VF column = load(b + p * ldb + j * W);
      for (int i = 0; i < ROWS; i++) acc[i][j] += splat(a[i * lda + p]) * column;
    }
  for (int i = 0; i < ROWS; i++)
    for (int j = 0; j < COLUMNS; j++) store(c + i * ldc + j * W, acc[i][j]);
}

inline void product(const float* a, int lda, const float* b, int ldb, float* c, int ldc, int m, int n,
             int k, bool add) {
  for (int j = 0; j < n;) {
    const bool wide = j + NR * W <= n;
    for (int i = 0; i < m;) {
      const bool four = i + MR <= m;
      const float *a_i = a + i * lda, *b_j = b + j;
      float* c_ij = c + i * ldc + j;
      if (wide && four) tile<MR, NR>(a_i, lda, b_j, ldb, c_ij, ldc, k, add);
      else if (wide) tile<1, NR>(a_i, lda, b_j, ldb, c_ij, ldc, k, add);
      else if (four) tile<MR, 1>(a_i, lda, b_j, ldb, c_ij, ldc, k, add);
      else tile<1, 1>(a_i, lda, b_j, ldb, c_ij, ldc, k, add);
      i += four ? MR : 1;
    }
    j += wide ? NR * W : W;
  }
}

INLINE float dot(const float* a, const float* b, int ld) {
  VF acc = {};
  for (int i = 0; i < ld; i += W) acc += load(a + i) * load(b + i);
  return sum(acc);
}

INLINE float exp_of(float x) { return exp(splat(x))[0]; }

// out = x, normed to length `length` for the delta rule; zeros up to ld.
template <bool DELTA, class T>
INLINE void unit(const T* x, float* out, int n, int ld, float length) {
  float scale = 1.0f;
  if constexpr (DELTA) {
    VF squares = {};
    each(x, n, [&](VF v, int) { squares += v * v; });
    scale = length / std::sqrt(sum(squares) + EPS);
  }
  std::fill(out + n, out + ld, 0.0f);
  each(x, n, [&](VF v, int i) { store_until(out, i, n, v * scale); });
}

}  // namespace recurrent
