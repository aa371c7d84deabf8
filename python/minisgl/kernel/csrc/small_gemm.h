// Small float32 GEMMs, whose operands are in the caches.
#pragma once

#include "vec.h"

// c = a b, or c += a b: a [ROWS, k], b [k, COLUMNS * W], c [ROWS, COLUMNS * W], with rows lda, ldb and
// ldc floats apart.
template <int ROWS, int COLUMNS>
INLINE void gemm_tile(const float* a, int lda, const float* b, int ldb, float* c, int ldc, int k,
                      bool add) {
  VF sums[ROWS][COLUMNS] = {};
  if (add)
    for (int i = 0; i < ROWS; i++)
      for (int j = 0; j < COLUMNS; j++) sums[i][j] = load(c + i * ldc + j * W);
  for (int p = 0; p < k; p++) {
    VF columns[COLUMNS];
    for (int j = 0; j < COLUMNS; j++) columns[j] = load(b + p * ldb + j * W);
    for (int i = 0; i < ROWS; i++) {
      VF factor = splat(a[i * lda + p]);
      for (int j = 0; j < COLUMNS; j++) sums[i][j] += factor * columns[j];
    }
  }
  for (int i = 0; i < ROWS; i++)
    for (int j = 0; j < COLUMNS; j++) store(c + i * ldc + j * W, sums[i][j]);
}
