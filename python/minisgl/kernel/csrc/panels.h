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

#include "dots.h"
#include "rows.h"

constexpr int PANEL = 16;
constexpr int NV = PANEL / W;  // vectors of a panel's sums
// Rows that meet a weight while it is in a register, TILE with two panels, of which each has TILE * NV
// sums, WIDER with one. AVX-512 has 32 registers, AVX2 has 16, NEON has 32.
#if defined(__AVX512F__)
constexpr int TILE = 12, WIDER = TILE;
#elif defined(__AVX2__)
constexpr int TILE = 2, WIDER = 4;
#else
constexpr int TILE = 2, WIDER = TILE;
#endif
// AVX-512 widens a vector of weights in the time of a load, others do not: there, more rows than
// K::FEW meet weights that were widened before, one panel and WIDE_TILE rows at a time.
constexpr bool WIDENS_FIRST = W < 16;
constexpr int few(int with_avx2) { return W == 8 ? with_avx2 : 12; }
#if defined(__AVX2__) || defined(__aarch64__)
constexpr int WIDE_TILE = 6;
#else
constexpr int WIDE_TILE = 3;
#endif
constexpr int64_t WIDE_STEPS = 128;  // widened at a time, so that they stay in the first cache

// Bytes of a panel between a fetch and what is asked for meanwhile: the hardware alone keeps too few
// reads in flight where a weight meets several rows.
constexpr int64_t AHEAD = 4096;
// With AVX2, items of at most so many rows ask for weights of 8 and 16 bits into the second cache: in
// the first they replace the inputs.
constexpr int FAR_ROWS = W == 8 ? 4 : 0;

// How a kind of numbers multiplies. X: what a row of inputs is converted to, once for all panels.
// PARTS: how many products a step takes. ROWS: those of a tile, TILE or WIDER. FEW: see WIDENS_FIRST.
// FOLDS: numbers are multiplied by their group's factor before they meet inputs, see Groups.
struct Defaults {
  static constexpr bool FOLDS = false;
  template <int P, int M>
  struct Whole {};
};
struct FloatPairs : Defaults {
  using Sum = VF;
  using X = float;
  using Inputs = VF;
  using Vector = VF;
  static constexpr int PARTS = 2;  // even and odd inputs
  static constexpr int ROWS = TILE;
  struct Weights {
    Vector parts[PARTS][NV];
  };
  static INLINE Inputs broadcast(const X* x, int part) { return splat(x[part]); }
  static INLINE void add(Sum& sum, const Vector& w, const Inputs& x) { sum += w * x; }
};

#if defined(__AVX512BF16__)
struct Bf16Pairs : Defaults {
  using Sum = VF;
  using X = bf16;
  using Inputs = __m512bh;
  using Vector = __m512bh;
  static constexpr int PARTS = 1, ROWS = TILE;
  struct Weights {
    Vector parts[PARTS][NV];
  };
  static INLINE Inputs broadcast(const X* x, int) {
    int32_t pair;
    std::memcpy(&pair, x, 4);
    return (__m512bh)_mm512_set1_epi32(pair);
  }
  static INLINE void add(Sum& sum, const Vector& w, const Inputs& x) {
    sum = (VF)_mm512_dpbf16_ps((__m512)sum, w, x);
  }
};
struct Bf16 : Bf16Pairs {
  using Fetched = Weights;
  static INLINE Fetched fetch(const uint8_t* at) {
    return {{{(__m512bh)_mm512_loadu_si512(at)}}};
  }
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
struct Bf16Pairs : Defaults {
  using Sum = VF;
  using X = bf16;
  using Inputs = bfloat16x8_t;
  using Vector = bfloat16x8_t;
  static constexpr int PARTS = 1, ROWS = TILE;
  struct Weights {
    Vector parts[PARTS][NV];
  };
  static INLINE Inputs broadcast(const X* x, int) {
    uint32_t pair;
    std::memcpy(&pair, x, 4);
    return vreinterpretq_bf16_u32(vdupq_n_u32(pair));
  }
  static INLINE void add(Sum& sum, const Vector& w, const Inputs& x) {
    sum = (VF)vbfdotq_f32((float32x4_t)sum, w, x);
  }
};
struct Bf16 : Bf16Pairs {
  using Fetched = Weights;
  static INLINE Fetched fetch(const uint8_t* at) {
    Weights w;
    for (int v = 0; v < NV; v++) w.parts[0][v] = vld1q_bf16((const bfloat16_t*)at + v * 2 * W);
    return w;
  }
#else
struct Bf16 : FloatPairs {
  using Fetched = Weights;
  static INLINE Fetched fetch(const uint8_t* at) {
    Weights w;
    for (int v = 0; v < NV; v++) {
      VU pairs;
      std::memcpy(&pairs, at + v * sizeof(VU), sizeof(VU));
      w.parts[0][v] = bit_cast<VF>(pairs << 16), w.parts[1][v] = bit_cast<VF>(pairs & 0xffff0000);
    }
    return w;
  }
#endif
  static constexpr int STEPS = 1, FETCH_BYTES = 64, FEW = few(32);
  static INLINE Weights widen(const Fetched& fetched, int) { return fetched; }
};

// Memory to ask for while weights are multiplied, `pace` bytes at each fetch.
struct Ahead {
  const uint8_t* at;
  int64_t pace;
  bool is_far;  // into the second cache
};

// What kinds that fold read beside the numbers.
struct Groups {
  const int8_t* factors;  // [O / 16, count, 16]
  int64_t count;          // groups of a panel
  int shift;              // a group has 2**shift inputs
  INLINE const int8_t* at(int64_t panel, int64_t input) const {
    return factors + (panel * count + (input >> shift)) * PANEL;
  }
};
struct Factors {
  VI pairs[NV];  // in each lane the factor of an output, twice as an int16
};

// Adds `steps` steps of P panels times M rows to the sums. A fetch has K::STEPS steps.
template <class K, int P, int M>
INLINE void add_steps(const uint8_t* const (&panels)[P], const Ahead (&ahead)[P],
                      const typename K::X* x, int64_t stride, int64_t steps,
                      typename K::Sum (&sums)[P][M][NV]) {
  typename K::Sum own[P][M][NV];  // in registers: GCC would store `sums` in each step
  const auto each_sum = [](auto f) __attribute__((always_inline)) {
    unrolled<P>([&](auto p) __attribute__((always_inline)) {
      unrolled<M>([&](auto m) __attribute__((always_inline)) {
        unrolled<NV>([&](auto v) __attribute__((always_inline)) { f(p, m, v); });
      });
    });
  };
  each_sum([&](auto p, auto m, auto v) __attribute__((always_inline)) { own[p][m][v] = sums[p][m][v]; });
  for (int64_t s = 0; s < steps; s += K::STEPS) {
    typename K::Fetched fetched[P];
    unrolled<P>([&](auto p) __attribute__((always_inline)) {
      const uint8_t* const next = ahead[p].at + s / K::STEPS * ahead[p].pace;
      for (int line = 0; line < K::FETCH_BYTES; line += 64)
        if (K::STEPS == 1 && FAR_ROWS && ahead[p].is_far) __builtin_prefetch(next + line, 0, 2);
        else __builtin_prefetch(next + line);
      fetched[p] = K::fetch(panels[p] + s / K::STEPS * K::FETCH_BYTES);
    });
    unrolled<K::STEPS>([&](auto k) __attribute__((always_inline)) {
      typename K::Weights w[P];
      unrolled<P>([&](auto p) __attribute__((always_inline)) { w[p] = K::widen(fetched[p], k); });
      unrolled<K::PARTS>([&](auto part) __attribute__((always_inline)) {
        unrolled<M>([&](auto m) __attribute__((always_inline)) {
          const auto inputs = K::broadcast(x + m * stride + 2 * (s + k), part);
          unrolled<P * NV>([&](auto i) __attribute__((always_inline)) {
            typename K::Sum& sum = own[i / NV][m][i % NV];
            K::add(sum, w[i / NV].parts[part][i % NV], inputs);
            // GCC would add products of one sum up first.
            if constexpr (W == 8 && K::STEPS * K::PARTS > 1) keep_in_register(sum);
          });
        });
      });
    });
  }
  each_sum([&](auto p, auto m, auto v) __attribute__((always_inline)) { sums[p][m][v] = own[p][m][v]; });
}

// Adds `steps` steps of one panel, widened, times M rows to the sums.
template <class K, int M>
INLINE void add_widened(const typename K::Weights* wide, const typename K::X* x, int64_t stride,
                        int64_t steps, typename K::Sum (&sums)[M][NV]) {
  for (int64_t s = 0; s < steps; s++) {
#pragma GCC unroll 2
    for (int part = 0; part < K::PARTS; part++) {
      typename K::Vector vectors[NV];
      for (int v = 0; v < NV; v++) {
        vectors[v] = wide[s].parts[part][v];
        keep_in_register(vectors[v]);
      }
#pragma GCC unroll 6
      for (int m = 0; m < M; m++) {
        const auto inputs = K::broadcast(x + m * stride + 2 * s, part);
        for (int v = 0; v < NV; v++) K::add(sums[m][v], vectors[v], inputs);
      }
    }
  }
}

// Calls f(M, first, rows) for tiles of about equal size that cover rows begin to end; M is a
// std::integral_constant. PADDED: M is 1 or a multiple of 4, so it may be rows + 3; a third as much
// is compiled.
template <bool PADDED, int M, class F>
INLINE void one_tile(int rows, int first, F f) {
  if constexpr (M == 1) {
    f(std::integral_constant<int, 1>{}, first, rows);
  } else {
    constexpr int LESS = !PADDED ? M - 1 : M > 4 ? M - 4 : 1;
    if (rows > LESS) return f(std::integral_constant<int, M>{}, first, rows);
    one_tile<PADDED, LESS>(rows, first, f);
  }
}
template <bool PADDED, int MOST, class F>
INLINE void each_tile(int begin, int end, F f) {
  const int count = end - begin, tiles = (count + MOST - 1) / MOST;
  if (!tiles) return;
  const int some = count / tiles, more = count % tiles;
  for (int t = 0, first = begin; t < tiles; t++) {
    const int rows = some + (t < more ? 1 : 0);
    one_tile<PADDED, MOST>(rows, first, f);
    first += rows;
  }
}
