// Dot products of a few rows of weights and a few rows of floats, whose sums stay in registers.
//
// A vector has numbers of one row, so rows need no other layout than torch's. The order of summation
// is that of the inputs, whatever R and M are.
#pragma once

#include <utility>

#include "vec.h"

constexpr int LINE = 16;  // floats of a cache line
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int REGISTERS = 32;
#else
constexpr int REGISTERS = 16;
#endif

// GCC would read the vector again for each use: two loads a product instead of one.
template <class V>
INLINE void keep_in_register(V& vector) {
#if defined(__AVX512F__)
  asm("" : "+v"(vector));
#elif defined(__x86_64__)
  asm("" : "+x"(vector));
#elif defined(__aarch64__)
  asm("" : "+w"(vector));
#endif
}

// f(0), f(1), ... f(N - 1) with constants: an array that f indexes stays in registers.
template <class F, int... I>
INLINE void unrolled(std::integer_sequence<int, I...>, F f) {
  (f(std::integral_constant<int, I>{}), ...);
}
template <int N, class F>
INLINE void unrolled(F f) {
  unrolled(std::make_integer_sequence<int, N>{}, f);
}

template <bool IS_KEPT = true, class T>
INLINE VF kept(const T* p) {
  VF vector = load(p);
  if constexpr (IS_KEPT) keep_in_register(vector);
  return vector;
}

// out[r][m] = w[r] . x[m]: R rows of weights times M rows of floats, of n numbers each. ask(i) is
// called for each LINE of inputs, to prefetch.
template <int R, int M, int MOST, class T, class F>
INLINE void dots(const T* const* w, const float* const* x, int64_t n, float (&out)[R][MOST], F ask) {
  constexpr bool FITS = R * M + (R < M ? R : M) + 1 < REGISTERS;
  VF sums[R][M] = {};
  const auto step = [&](int64_t i) __attribute__((always_inline)) {
    if constexpr (R < M) {  // the fewer are loaded first and stay
      VF v[R];
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) v[r] = kept(w[r] + i);
#pragma GCC unroll 8
      for (int m = 0; m < M; m++) {
        const VF inputs = kept<FITS>(x[m] + i);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) sums[r][m] += v[r] * inputs;
      }
    } else {
      VF v[M];
#pragma GCC unroll 8
      for (int m = 0; m < M; m++) v[m] = kept(x[m] + i);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        const VF weight = kept<FITS>(w[r] + i);
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) sums[r][m] += weight * v[m];
      }
    }
  };
  int64_t i = 0;
  for (; i + LINE <= n; i += LINE) {
    ask(i);
#pragma GCC unroll 4
    for (int k = 0; k < LINE; k += W) step(i + k);
  }
  for (; i + W <= n; i += W) step(i);
  if (i < n)
    for (int m = 0; m < M; m++) {
      const VF inputs = load_first(x[m] + i, int(n - i));
      for (int r = 0; r < R; r++) sums[r][m] += load_first(w[r] + i, int(n - i)) * inputs;
    }
  for (int r = 0; r < R; r++)
    for (int m = 0; m < M; m++) out[r][m] = sum(sums[r][m]);
}
