// Matrices in panels of 16 outputs, and the product of a few rows with one or two panels.
//
// A step is a pair of inputs. It has 32 numbers, two for each output of the panel:
//
//     matrix [O, I]        panel 0: outputs 0 to 15        panel 1: outputs 16 to 31        ...
//     in a panel           step 0 | step 1 | ... | step I / 2 - 1
//     in a step            w[o][2s] w[o][2s + 1] for o = 0, 1, ... 15
//
// So a vector of weights is one load, each of its 32-bit lanes is one output, and the pair of
// inputs that all lanes need is one broadcast. Sums stay in registers until a panel ends, no sum
// goes across lanes, and weights are read in the order in which they lie in memory.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "rows.h"

constexpr int PANEL = 16;
constexpr int NV = PANEL / W;  // vectors of a panel's sums
// Rows that meet a weight while it is in a register: with two panels their sums take 2 * TILE * NV
// registers. AVX-512 has 32 registers, AVX2 has 16, NEON has 32.
#if defined(__AVX512F__)
constexpr int TILE = 12;
#else
constexpr int TILE = 2;
#endif

// bfloat16. X is what a row of inputs is converted to, once for all panels.
struct Bf16 {
  using Sum = VF;
  static constexpr int STEPS = 1, FETCH_BYTES = 64;
#if defined(__AVX512BF16__)
  using X = bf16;
  using Inputs = __m512bh;
  struct Weights {
    __m512bh pairs;
  };
  using Fetched = Weights;
  static INLINE Fetched fetch(const uint8_t* at) { return {(__m512bh)_mm512_loadu_si512(at)}; }
  static INLINE Inputs broadcast(const X* x) {
    int32_t pair;
    std::memcpy(&pair, x, 4);
    return (__m512bh)_mm512_set1_epi32(pair);
  }
  static INLINE void add(Sum& sum, const Weights& w, int, const Inputs& x) {
    sum = (VF)_mm512_dpbf16_ps((__m512)sum, w.pairs, x);
  }
#else
  using X = float;
  struct Inputs {
    VF even, odd;
  };
  struct Weights {
    VF even[NV], odd[NV];
  };
  using Fetched = Weights;
  static INLINE Fetched fetch(const uint8_t* at) {
    Weights w;
    for (int v = 0; v < NV; v++) {
      VU pairs;
      std::memcpy(&pairs, at + v * sizeof(VU), sizeof(VU));
      w.even[v] = bit_cast<VF>(pairs << 16), w.odd[v] = bit_cast<VF>(pairs & 0xffff0000);
    }
    return w;
  }
  static INLINE Inputs broadcast(const X* x) { return {splat(x[0]), splat(x[1])}; }
  static INLINE void add(Sum& sum, const Weights& w, int v, const Inputs& x) {
    sum += w.even[v] * x.even;
    sum += w.odd[v] * x.odd;
  }
#endif
  static INLINE Weights widen(const Fetched& fetched, int) { return fetched; }
};

// Adds `steps` steps of two panels times M rows to the sums. A fetch has K::STEPS steps.
template <class K, int M>
INLINE void add_steps(const uint8_t* const (&panels)[2], const typename K::X* x, int64_t stride,
                      int64_t steps, typename K::Sum (&sums)[2][M][NV]) {
  for (int64_t s = 0; s < steps; s += K::STEPS) {
    typename K::Fetched fetched[2];
    for (int p = 0; p < 2; p++)
      fetched[p] = K::fetch(panels[p] + s / K::STEPS * K::FETCH_BYTES);
#pragma GCC unroll 4
    for (int k = 0; k < K::STEPS; k++) {
      const typename K::Weights w[2] = {K::widen(fetched[0], k), K::widen(fetched[1], k)};
      for (int m = 0; m < M; m++) {
        const auto pair = K::broadcast(x + m * stride + 2 * (s + k));
        for (int p = 0; p < 2; p++)
          for (int v = 0; v < NV; v++) K::add(sums[p][m][v], w[p], v, pair);
      }
    }
  }
}

// Calls f(M, first, rows) for tiles of about equal size that cover rows begin to end; M is a
// std::integral_constant. PADDED: M is 1 or a multiple of 4, so it may be rows + 3; a third as much
// is compiled.
template <bool PADDED, int M = TILE, class F>
INLINE void one_tile(int rows, int first, F f) {
  if constexpr (M == 1) {
    f(std::integral_constant<int, 1>{}, first, rows);
  } else {
    constexpr int LESS = !PADDED ? M - 1 : M > 4 ? M - 4 : 1;
    if (rows > LESS) return f(std::integral_constant<int, M>{}, first, rows);
    one_tile<PADDED, LESS>(rows, first, f);
  }
}
template <bool PADDED, class F>
INLINE void each_tile(int begin, int end, F f) {
  const int count = end - begin, tiles = (count + TILE - 1) / TILE;
  for (int t = 0; t < tiles; t++) {
    const int first = int(int64_t(count) * t / tiles), last = int(int64_t(count) * (t + 1) / tiles);
    one_tile<PADDED>(last - first, begin + first, f);
  }
}
