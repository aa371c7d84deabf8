// Small float32 GEMMs of a recurrence, and the rows of queries and keys that they take.
#pragma once

#include <algorithm>
#include <cmath>

#include "small_gemm.h"

namespace recurrent {

constexpr float EPS = 1e-6f;  // of the norm of queries and keys
constexpr int MR = 4, NR = W == 8 ? 2 : 4;  // rows, and vectors of columns, whose sums stay in registers

// c = a b, or c += a b: a [m, k], b [k, n], c [m, n], with rows lda, ldb and ldc floats apart; n is a
// multiple of W.
inline void gemm(const float* a, int lda, const float* b, int ldb, float* c, int ldc, int m, int n,
                 int k, bool add) {
  for (int j = 0; j < n;) {
    const bool wide = j + NR * W <= n;
    for (int i = 0; i < m;) {
      const bool four = i + MR <= m;
      const float *a_i = a + i * lda, *b_j = b + j;
      float* c_ij = c + i * ldc + j;
      if (wide && four) gemm_tile<MR, NR>(a_i, lda, b_j, ldb, c_ij, ldc, k, add);
      else if (wide) gemm_tile<1, NR>(a_i, lda, b_j, ldb, c_ij, ldc, k, add);
      else if (four) gemm_tile<MR, 1>(a_i, lda, b_j, ldb, c_ij, ldc, k, add);
      else gemm_tile<1, 1>(a_i, lda, b_j, ldb, c_ij, ldc, k, add);
      i += four ? MR : 1;
    }
    j += wide ? NR * W : W;
  }
}

// ld: floats of a and b, a multiple of W.
INLINE float dot(const float* a, const float* b, int ld) {
  VF acc = {};
  for (int i = 0; i < ld; i += W) acc += load(a + i) * load(b + i);
  return sum(acc);
}

INLINE float exp_of(float x) { return exp(splat(x))[0]; }

// out = x [n], for the delta rule normed to `length`; zeros from n to ld.
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
