// Panels (panels.h) of numbers with few bits.
//
// Integers multiply int16 inputs that have scales of their own (numbers.cpp), so that sums are exact.
// A fetch is 32 or 64 bytes of a panel:
//
//     int8   one step, as panels.h has it
//     4 bits four steps: 32 bits for each output, of which the low 16 are even inputs. Step k has
//            bits 4 k to 4 k + 3 of both halves. Int4 is in two's complement; Fp4 is e2m1.
//     Int6   eight steps, with AVX2 only: numbers plus 32. Three bytes at 0, 64 and 128 plus 4 times the output
//            plus b have numbers of 6 bits, and in their upper bits a fourth, the lowest bits first. `place`
//            says of which input each is.
//     Fp8    two steps: 16 bytes for four outputs, of which the first 8 are step 0. It is e4m3.
#pragma once

#include "panels.h"

// Stores the low halves of v's lanes in p[i:n], at most W of them.
INLINE void store_until(int16_t* p, int i, int n, VI v) {
#if defined(__AVX512F__)  // GCC 12 narrows in several steps
  const __m256i h = _mm512_cvtepi32_epi16((__m512i)v);
#elif defined(__AVX2__)
  const __m128i h = _mm_packs_epi32(_mm256_castsi256_si128((__m256i)v),
                                    _mm256_extracti128_si256((__m256i)v, 1));
#else
  typedef int16_t VS __attribute__((vector_size(W * 2)));
  const VS h = __builtin_convertvector(v, VS);
#endif
  if (i + W <= n) std::memcpy(p + i, &h, sizeof(h));
  else std::memcpy(p + i, &h, (n - i) * sizeof(int16_t));
}

INLINE VF as_float(VF v) { return v; }
INLINE VF as_float(VI v) { return __builtin_convertvector(v, VF); }

// Of 16 inputs, the place of input i where the bytes of an output's lane are numbers: 4 times the vector plus
// the byte. With 4 bits vectors are the low and the high halves of the bytes of two fetches.
constexpr int place(int i) { return i / 8 * 8 + i / 2 % 2 * 4 + i % 2 * 2 + i / 4 % 2; }

// Two int16 times two int16, added to an int32.
struct Int16Pairs : Defaults {
  using Sum = VI;
  using X = int16_t;
  static constexpr int ROWS = WIDER;
#if defined(__AVX2__)
  static constexpr int PARTS = 1;
#else
  static constexpr int PARTS = 2;  // even and odd inputs
#endif
#if defined(__AVX512BW__)
  using Inputs = __m512i;
  using Vector = __m512i;
  struct Weights {
    Vector parts[PARTS][NV];
  };
  static INLINE void add(Sum& sum, const Vector& w, const Inputs& x) {
#if defined(__AVX512VNNI__)
    sum = (VI)_mm512_dpwssd_epi32((__m512i)sum, w, x);
#else
    sum += (VI)_mm512_madd_epi16(w, x);
#endif
  }
  static INLINE Inputs broadcast(const X* x, int) {
    int32_t pair;
    std::memcpy(&pair, x, 4);
    return _mm512_set1_epi32(pair);
  }
#elif defined(__AVX2__)
  using Inputs = __m256i;
  using Vector = __m256i;
  struct Weights {
    Vector parts[PARTS][NV];
  };
  static INLINE void add(Sum& sum, const Vector& w, const Inputs& x) {
#if defined(__AVXVNNI__)
    sum = (VI)_mm256_dpwssd_avx_epi32((__m256i)sum, w, x);
#else
    sum += (VI)_mm256_madd_epi16(w, x);
#endif
  }
  static INLINE Inputs broadcast(const X* x, int) {
    int32_t pair;
    std::memcpy(&pair, x, 4);
    return _mm256_set1_epi32(pair);
  }
#else
  using Inputs = int32_t;
  using Vector = VI;
  struct Weights {
    Vector parts[PARTS][NV];
  };
  static INLINE void add(Sum& sum, const Vector& w, const Inputs& x) { sum += w * x; }
  static INLINE Inputs broadcast(const X* x, int part) { return x[part]; }
#endif
};

struct Int8 : Int16Pairs {
  static constexpr int STEPS = 1, FETCH_BYTES = 32, FEW = few(32);
#if defined(__AVX512BW__)
  using Fetched = __m256i;
  static INLINE Fetched fetch(const uint8_t* at) { return _mm256_loadu_si256((const __m256i*)at); }
  static INLINE Weights widen(Fetched bytes, int) { return {{{_mm512_cvtepi8_epi16(bytes)}}}; }
#elif defined(__AVX2__)
  using Fetched = Weights;
  static INLINE Fetched fetch(const uint8_t* at) {
    Weights w;
    unrolled<NV>([&](auto v) __attribute__((always_inline)) {
      w.parts[0][v] = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)at + v));
    });
    return w;
  }
  static INLINE Weights widen(const Fetched& w, int) { return w; }
#else
  using Fetched = Weights;
  static INLINE Fetched fetch(const uint8_t* at) {
    Weights w;
    for (int v = 0; v < NV; v++) {
      VH pairs;
      std::memcpy(&pairs, at + v * sizeof(VH), sizeof(VH));
      const VU wide = __builtin_convertvector(pairs, VU);
      w.parts[0][v] = (VI)(wide << 24) >> 24, w.parts[1][v] = (VI)(wide << 16) >> 24;
    }
    return w;
  }
  static INLINE Weights widen(const Fetched& w, int) { return w; }
#endif
};

struct Bits4 : Int16Pairs {
  static constexpr int STEPS = 4, FETCH_BYTES = 64, FEW = few(4);
  struct Fetched {
    VI words[NV];
  };
  static INLINE Fetched fetch(const uint8_t* at) {
    Fetched fetched;
    unrolled<NV>([&](auto v) __attribute__((always_inline)) {
      fetched.words[v] = bit_cast<VI>(load((const float*)at + v * W));
    });
    return fetched;
  }
};

struct Int4 : Bits4 {
#if defined(__AVX2__) && !defined(__AVX512BW__)
  // For one row, see multiply_row: 16 inputs of W outputs plus MIDDLE, as bytes, in the order of `place`.
  static constexpr int MIDDLE = 8, BYTES_OF_16 = 128;
  static INLINE void bytes(const uint8_t* at, int v, __m256i (&to)[4]) {
    unrolled<2>([&](auto i) __attribute__((always_inline)) {
      const __m256i words = _mm256_xor_si256(_mm256_loadu_si256((const __m256i*)(at + 64 * i) + v),
                                             _mm256_set1_epi8(char(0x88)));
      to[2 * i] = _mm256_and_si256(words, _mm256_set1_epi8(15));
      to[2 * i + 1] = _mm256_and_si256(_mm256_srli_epi16(words, 4), _mm256_set1_epi8(15));
    });
  }
#endif
  static INLINE Weights widen(const Fetched& fetched, int k) {
    Weights w;
#if defined(__AVX512BW__)
    w.parts[0][0] = _mm512_srai_epi16(_mm512_slli_epi16((__m512i)fetched.words[0], 12 - 4 * k), 12);
#elif defined(__AVX2__)
    for (int v = 0; v < NV; v++)
      w.parts[0][v] = _mm256_srai_epi16(_mm256_slli_epi16((__m256i)fetched.words[v], 12 - 4 * k), 12);
#else
    for (int v = 0; v < NV; v++) {
      w.parts[0][v] = (fetched.words[v] << (28 - 4 * k)) >> 28;
      w.parts[1][v] = (fetched.words[v] << (12 - 4 * k)) >> 28;
    }
#endif
    return w;
  }
};

#if defined(__AVX2__) && !defined(__AVX512BW__)
struct Int6 : Int16Pairs {
  static constexpr int STEPS = 8, FETCH_BYTES = 192, FEW = few(4);
  static constexpr int MIDDLE = 32, BYTES_OF_16 = FETCH_BYTES;  // as Int4 has them
  struct Fetched {
    __m256i bytes[NV][4];
  };
  static INLINE void bytes(const uint8_t* at, int v, __m256i (&to)[4]) {
    const auto masked = [](__m256i words, int mask) { return _mm256_and_si256(words, _mm256_set1_epi8(char(mask))); };
    __m256i words[3];
    unrolled<3>([&](auto i) __attribute__((always_inline)) {
      words[i] = _mm256_loadu_si256((const __m256i*)(at + 64 * i) + v), to[i] = masked(words[i], 63);
    });
    to[3] = _mm256_or_si256(_mm256_or_si256(masked(_mm256_srli_epi16(words[0], 6), 3),
                                            masked(_mm256_srli_epi16(words[1], 4), 12)),
                            masked(_mm256_srli_epi16(words[2], 2), 48));
  }
  static INLINE Fetched fetch(const uint8_t* at) {
    Fetched fetched;
    unrolled<NV>([&](auto v) __attribute__((always_inline)) { bytes(at, v, fetched.bytes[v]); });
    return fetched;
  }
  static INLINE Weights widen(const Fetched& fetched, int k) {
    Weights w;
    unrolled<NV>([&](auto v) __attribute__((always_inline)) {
      const __m256i bytes = fetched.bytes[v][k / 4 * 2 + k % 2];
      const __m256i numbers = k / 2 % 2 ? _mm256_srli_epi16(bytes, 8) : _mm256_and_si256(bytes, _mm256_set1_epi16(255));
      w.parts[0][v] = _mm256_sub_epi16(numbers, _mm256_set1_epi16(MIDDLE));
    });
    return w;
  }
};
#endif

// Twice the value of e2m1 numbers, which are integers: 0, 1, 2, 3, 4, 6, 8, 12 and their negatives.
struct Fp4 : Bits4 {
#if !defined(__AVX512BW__) && !defined(__AVX2__)
  static INLINE VI twice(VI bits) {
    const VI exponent = bits >> 1 & 3, mantissa = bits & 1;
    const VI normal = (mantissa | 2) << (exponent - (exponent > 0 ? 1 : 0));
    const VI magnitude = exponent > 0 ? normal : mantissa;
    return (bits & 8) != 0 ? -magnitude : magnitude;
  }
#endif
  static INLINE Weights widen(const Fetched& fetched, int k) {
    Weights w;
#if defined(__AVX512BW__)
    // The permutation reads 5 bits, of which the highest belongs to another number.
    alignas(64) static constexpr int16_t TWICE[32] = {
        0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12,
        0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    w.parts[0][0] = _mm512_permutexvar_epi16(_mm512_srli_epi16((__m512i)fetched.words[0], 4 * k),
                                       _mm512_load_si512(TWICE));
#elif defined(__AVX2__)
    const __m256i twice = _mm256_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12,
                                           0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
    for (int v = 0; v < NV; v++) {
      const __m256i bits = _mm256_and_si256(_mm256_srli_epi16((__m256i)fetched.words[v], 4 * k),
                                            _mm256_set1_epi16(15));
      const __m256i bytes = _mm256_shuffle_epi8(twice, bits);  // the upper byte gets entry 0, a 0
      w.parts[0][v] = _mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 8);
    }
#else
    for (int v = 0; v < NV; v++) {
      const VU words = (VU)fetched.words[v];
      w.parts[0][v] = twice((VI)(words >> (4 * k) & 15));
      w.parts[1][v] = twice((VI)(words >> (16 + 4 * k) & 15));
    }
#endif
    return w;
  }
};

// Integers times their group's factor, both as int16. Sums of a block then have one scale.
#if defined(__AVX2__) && !defined(__AVX512BW__)
template <class K>
struct Folded : K {
  static constexpr bool FOLDS = true;
  template <int P, int M>
  struct Whole {  // of a block: sums of groups times their factors
    VF sums[P][M][NV];
  };
  static INLINE Factors factors(const int8_t* from) {
    Factors factors;
    unrolled<NV>([&](auto v) __attribute__((always_inline)) {
      const __m256i wide = (__m256i)::widen(from + v * W);
      factors.pairs[v] = (VI)_mm256_blend_epi16(wide, _mm256_slli_epi32(wide, 16), 0xaa);
    });
    return factors;
  }
  static INLINE void fold(typename K::Weights& weights, const Factors& factors) {
    unrolled<NV>([&](auto v) __attribute__((always_inline)) {
      weights.parts[0][v] =
          _mm256_mullo_epi16(weights.parts[0][v], (__m256i)factors.pairs[v]);
    });
  }
  // Adds sums of a group, which become 0, times its factors to others.
  template <int M>
  static INLINE void fold(VI (&sums)[M][NV], const int8_t* factors, VF (&to)[M][NV]) {
    unrolled<NV>([&](auto v) __attribute__((always_inline)) {
      const VF factor = as_float(::widen(factors + v * W));
      unrolled<M>([&](auto m) __attribute__((always_inline)) {
        to[m][v] += as_float(sums[m][v]) * factor, sums[m][v] = VI{};
      });
    });
  }
};
#endif

#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
struct Fp8 : Bf16Pairs {
  static constexpr float UNIT = 1;
  struct Fetched {
    __m512i steps[2];
  };
  struct Table {  // the two bytes of the bfloat16 of each positive number
    alignas(64) uint8_t low[128], high[128];
    constexpr Table() : low(), high() {
      for (int i = 0; i < 128; i++) {
        int bits = (i << 4) + (120 << 7);
        if (i == 127) bits = 0x7fc0;  // NaN
        if (i < 8) {                  // subnormal: i * 2**-9
          int power = 0;
          while (i >> (power + 1)) power++;
          bits = i ? (127 - 9 + power) << 7 | (i - (1 << power)) << (7 - power) : 0;
        }
        low[i] = uint8_t(bits), high[i] = uint8_t(bits >> 8);
      }
    }
  };
  static INLINE Fetched fetch(const uint8_t* at) {
    static constexpr Table table;
    const __m512i bytes = _mm512_loadu_si512(at);
    const __m512i low = _mm512_permutex2var_epi8(_mm512_load_si512(table.low), bytes,
                                                 _mm512_load_si512(table.low + 64));
    const __m512i high = _mm512_permutex2var_epi8(_mm512_load_si512(table.high), bytes,
                                                  _mm512_load_si512(table.high + 64));
    const __m512i sign = _mm512_and_si512(bytes, _mm512_set1_epi8(-128));
    const __m512i upper = _mm512_or_si512(high, sign);
    return {{_mm512_unpacklo_epi8(low, upper), _mm512_unpackhi_epi8(low, upper)}};
  }
  static INLINE Weights widen(const Fetched& fetched, int k) {
    return {{{(__m512bh)fetched.steps[k]}}};
  }
#elif defined(__AVX2__) && defined(__F16C__) && !defined(__AVX512F__)
// A float16 is 2**-8 times the e4m3 with the same fields, denormals included.
struct Fp8 : FloatPairs {
  static constexpr float UNIT = 256;
  struct Fetched {
    __m256i even[NV], odd[NV];  // float16 of eight outputs: of step 0, then of step 1
  };
  // The upper byte of each lane.
  static INLINE __m256i halves(__m256i bytes) {
    const __m256i fields = _mm256_set1_epi16(short(0xbf80));
    const __m256i half = _mm256_and_si256(_mm256_srai_epi16(bytes, 1), fields);
    const __m256i is_nan =
        _mm256_cmpeq_epi16(_mm256_or_si256(half, _mm256_set1_epi16(short(0x8000))), fields);
    return _mm256_or_si256(half, is_nan);
  }
  static INLINE Fetched fetch(const uint8_t* at) {
    Fetched fetched;
    unrolled<NV>([&](auto v) __attribute__((always_inline)) {
      const __m256i quads = _mm256_loadu_si256((const __m256i*)at + v);
      const __m256i steps = _mm256_permute4x64_epi64(quads, 0xd8);
      fetched.even[v] = halves(_mm256_slli_epi16(steps, 8));
      fetched.odd[v] = halves(steps);
    });
    return fetched;
  }
  template <int K>
  static INLINE VF step(__m256i halves) {
    return (VF)_mm256_cvtph_ps(_mm256_extracti128_si256(halves, K));
  }
  static INLINE Weights widen(const Fetched& fetched, int k) {
    Weights w;
    unrolled<NV>([&](auto v) __attribute__((always_inline)) {
      w.parts[0][v] = k ? step<1>(fetched.even[v]) : step<0>(fetched.even[v]);
      w.parts[1][v] = k ? step<1>(fetched.odd[v]) : step<0>(fetched.odd[v]);
    });
    return w;
  }
#else
struct Fp8 : FloatPairs {
  static constexpr float UNIT = 1;
  using Fetched = const uint8_t*;
  static INLINE Fetched fetch(const uint8_t* at) { return at; }
  // Byte 0 of each lane. A float32 is 2**120 times the e4m3 with the same fields.
  static INLINE VF value(VU bytes) {
    const VU magnitude = bytes & 0x7f;
    const VF scaled = bit_cast<VF>(magnitude << 20) * 0x1p120f;
    const VU bits = bit_cast<VU>(scaled) | (bytes & 0x80) << 24;
    return bit_cast<VF>(magnitude == 0x7f ? bits | 0x7fc00000 : bits);
  }
  static INLINE Weights widen(const Fetched& at, int k) {
    Weights w;
    for (int v = 0; v < NV; v++) {
      VH pairs;
      for (int c = 0; c < W / 4; c++)
        std::memcpy((uint8_t*)&pairs + 8 * c, at + (v * (W / 4) + c) * 16 + 8 * k, 8);
      const VU wide = __builtin_convertvector(pairs, VU);
      w.parts[0][v] = value(wide), w.parts[1][v] = value(wide >> 8);
    }
    return w;
  }
#endif
  static constexpr int STEPS = 2, FETCH_BYTES = 64, FEW = few(1);
};
