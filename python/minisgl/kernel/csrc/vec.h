// Float vectors of the machine's width, and what the kernels do with them.
//
// GCC's vector extensions instead of intrinsics: one source serves AVX-512, AVX2, NEON and later
// instruction sets. Intrinsics appear only where the extensions have no operation (float16, dot
// products of bfloat16) or where GCC 12 compiles them badly.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define INLINE inline __attribute__((always_inline))

#if defined(__AVX512F__)
constexpr int W = 16;  // floats in a vector
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

constexpr int round_up(int n, int to) { return (n + to - 1) / to * to; }

typedef float VF __attribute__((vector_size(W * 4)));
typedef int32_t VI __attribute__((vector_size(W * 4)));
typedef uint32_t VU __attribute__((vector_size(W * 4)));
typedef uint16_t VH __attribute__((vector_size(W * 2)));

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

template <class To, class From>
INLINE To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

INLINE VF splat(float x) { return x - VF{}; }
INLINE VI lanes() {
  VI v;
  for (int i = 0; i < W; i++) v[i] = i;
  return v;
}
INLINE VF select(VI mask, VF yes, VF no) { return mask ? yes : no; }
INLINE VF max(VF a, VF b) { return a > b ? a : b; }  // b where either is NaN
INLINE VF min(VF a, VF b) { return a < b ? a : b; }

// --- loads and stores: memory of any of the three types, arithmetic in float --------------------

INLINE VF load(const float* p) {
  VF v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}
INLINE VF load(const bf16* p) {
#if defined(__AVX512F__)  // GCC 12 widens in two halves
  return (VF)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
#else
  VH h;
  std::memcpy(&h, p, sizeof(h));
  return bit_cast<VF>(__builtin_convertvector(h, VU) << 16);
#endif
}
INLINE float half_to_float(uint16_t h) {
  uint32_t sign = uint32_t(h & 0x8000) << 16, magnitude = h & 0x7fff;
  if (magnitude >= 0x7c00) return bit_cast<float>(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
  // A float16 is 2**112 times the float32 with the same exponent and mantissa fields.
  float value = bit_cast<float>(magnitude << 13) * 0x1p112f;
  return bit_cast<float>(sign | bit_cast<uint32_t>(value));
}
INLINE uint16_t float_to_half(float x) {
  uint32_t bits = bit_cast<uint32_t>(x), sign = bits >> 16 & 0x8000;
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return sign | 0x7e00;
  if (bits >= 0x47800000) return sign | 0x7c00;  // 65,536 and more
  if (bits < 0x38800000)                         // subnormal: let a float addition round
    return sign | (bit_cast<uint32_t>(bit_cast<float>(bits) + 0.5f) - 0x3f000000);
  return sign | ((bits - 0x38000000 + 0xfff + (bits >> 13 & 1)) >> 13);
}
INLINE VF load(const f16* p) {
#if defined(__AVX512F__)
  return (VF)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__AVX2__) && defined(__F16C__)
  return (VF)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
  VF v;
  for (int i = 0; i < W; i++) v[i] = half_to_float(p[i].bits);
  return v;
#endif
}

INLINE void store(float* p, VF v) { std::memcpy(p, &v, sizeof(v)); }
// To the nearest bfloat16, ties to even, in the upper half of each lane.
INLINE VU round_bf16(VF v) {
  VU bits = bit_cast<VU>(v);
  VU rounded = bits + 0x7fff + (bits >> 16 & 1);
  return (v == v) ? rounded : bits | 0x400000;  // NaN stays NaN
}
INLINE void store(bf16* p, VF v) {
#if defined(__AVX512BF16__)  // one instruction for eight; it takes subnormal numbers for 0
  VH h = bit_cast<VH>(_mm512_cvtneps_pbh((__m512)v));
#else
  VH h = __builtin_convertvector(round_bf16(v) >> 16, VH);
#endif
  std::memcpy(p, &h, sizeof(h));
}
INLINE void store(f16* p, VF v) {
#if defined(__AVX512F__)
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__AVX2__) && defined(__F16C__)
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
#else
  for (int i = 0; i < W; i++) p[i].bits = float_to_half(v[i]);
#endif
}

// The first n < W elements; the other lanes are 0 and their memory is not touched.
template <class T>
INLINE VF load_first(const T* p, int n) {
  T buffer[W] = {};
  std::memcpy(buffer, p, n * sizeof(T));
  return load(buffer);
}
template <class T>
INLINE void store_first(T* p, VF v, int n) {
  T buffer[W];
  store(buffer, v);
  std::memcpy(p, buffer, n * sizeof(T));
}

// Numbers of 8 bits, widened. GCC 12 widens them one by one for AVX2, and in several steps for AVX-512.
INLINE VI widen(const int8_t* p) {
#if defined(__AVX512F__)
  return (VI)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p));
#elif defined(__AVX2__)
  return (VI)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p));
#else
  typedef int8_t V8 __attribute__((vector_size(W)));
  V8 v;
  std::memcpy(&v, p, sizeof(v));
  return __builtin_convertvector(v, VI);
#endif
}
INLINE VU widen(const uint8_t* p) {
#if defined(__AVX512F__)
  return (VU)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
#elif defined(__AVX2__)
  return (VU)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
#else
  typedef uint8_t V8 __attribute__((vector_size(W)));
  V8 v;
  std::memcpy(&v, p, sizeof(v));
  return __builtin_convertvector(v, VU);
#endif
}

// v, rounded to type T.
template <class T>
INLINE VF round_to(VF v) {
  if constexpr (std::is_same_v<T, float>) {
    return v;
  } else if constexpr (std::is_same_v<T, bf16>) {
#if defined(__AVX512BF16__)
    __m256i h = bit_cast<__m256i>(_mm512_cvtneps_pbh((__m512)v));
    return (VF)_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16);
#else
    return bit_cast<VF>(round_bf16(v) & 0xffff0000);
#endif
  } else {
    T buffer[W];
    store(buffer, v);
    return load(buffer);
  }
}

// Calls f(vector, index) for each vector of p[0:n]. In the last, lanes past the end are 0.
template <class T, class F>
INLINE void each(const T* p, int n, F f) {
  int i = 0;
  for (; i + W <= n; i += W) f(load(p + i), i);
  if (i < n) f(load_first(p + i, n - i), i);
}
// The vector at index i of p[0:n], as `each` has it.
template <class T>
INLINE VF load_until(const T* p, int i, int n) {
  return i + W <= n ? load(p + i) : load_first(p + i, n - i);
}
template <class T>
INLINE void store_until(T* p, int i, int n, VF v) {
  i + W <= n ? store(p + i, v) : store_first(p + i, v, n - i);
}

// --- across lanes -------------------------------------------------------------------------------

// The two halves of a butterfly of stride S:
template <int S>
INLINE VF low_lanes(VF a, VF b) {  // a's lanes without bit S, then b's, moved up
  VI index;
  for (int l = 0; l < W; l++) index[l] = l & S ? W + l - S : l;
  return __builtin_shuffle(a, b, index);
}
template <int S>
INLINE VF high_lanes(VF a, VF b) {  // a's lanes with bit S, moved down, then b's
  VI index;
  for (int l = 0; l < W; l++) index[l] = l & S ? W + l : l + S;
  return __builtin_shuffle(a, b, index);
}

// rows[i][j] becomes rows[j][i] (Eklundh 1972).
template <int S = W / 2>
INLINE void transpose(VF* rows) {
  if constexpr (S > 0) {
    for (int i = 0; i < W; i++) {
      if (i & S) continue;
      VF a = rows[i], b = rows[i + S];
      rows[i] = low_lanes<S>(a, b);
      rows[i + S] = high_lanes<S>(a, b);
    }
    transpose<S / 2>(rows);
  }
}

// Lane i of the result is the sum of rows[i]; the rows are used up.
template <int S = W / 2>
INLINE VF sum_rows(VF* rows) {
  if constexpr (S > 0) {
    for (int i = 0; i < S; i++)
      rows[i] = low_lanes<S>(rows[i], rows[i + S]) + high_lanes<S>(rows[i], rows[i + S]);
    return sum_rows<S / 2>(rows);
  }
  return rows[0];
}

template <int S = W / 2>
INLINE float sum(VF v) {
  if constexpr (S > 0) return sum<S / 2>(v + high_lanes<S>(v, v));
  return v[0];
}
template <int S = W / 2>
INLINE float max(VF v) {
  if constexpr (S > 0) return max<S / 2>(max(v, high_lanes<S>(v, v)));
  return v[0];
}
INLINE bool any(VI mask) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask);
#elif defined(__AVX2__)
  return _mm256_movemask_ps((__m256)mask);
#else
  for (int i = 0; i < W; i++)
    if (mask[i]) return true;
  return false;
#endif
}

// --- functions ----------------------------------------------------------------------------------

// e**x to about 1 ulp; 0 below -87.3 (the smallest normal result), infinity above 88.7.
// Cody-Waite reduction with the Cephes coefficients of expf (Moshier).
INLINE VF exp(VF x) {
  VF clamped = min(splat(88.7f), max(splat(-87.3f), x));  // in this order NaN comes through
  VF shifted = clamped * 1.44269504f + 0x1.8p23f;  // rounds to an integer in the low bits
  VF n = shifted - 0x1.8p23f;
  VF r = clamped - n * 0.693359375f - n * -2.12194440e-4f;
  VF p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  VF scaled = bit_cast<VF>(bit_cast<VI>(p) + (bit_cast<VI>(shifted) << 23));
  return select(x < -87.3f, splat(0), select(x > 88.7f, splat(INFINITY), scaled));
}

INLINE VF silu_of(VF x) { return x / (1.0f + exp(-x)); }
INLINE VF gelu_tanh(VF x) {
  VF inner = 0.7978845608f * (x + 0.044715f * x * x * x);  // sqrt(2 / pi)
  // 0.5 * (1 + tanh(y)) is 1 / (1 + e**(-2y))
  return x / (1.0f + exp(-2.0f * inner));
}

// tanh x to about 2 ulp: near 0 the polynomial of Cephes' tanhf.
INLINE VF tanh(VF x) {
  VF z = x * x, p = splat(-5.70498872745e-3f);
  p = p * z + 2.06390887954e-2f;
  p = p * z - 5.37397155531e-2f;
  p = p * z + 1.33314422036e-1f;
  p = p * z - 3.33332819422e-1f;
  return select(z < 0.390625f, p * z * x + x, 1.0f - 2.0f / (exp(x + x) + 1.0f));
}

// ln x to about 1 ulp, for normal x > 0 (Cephes logf).
INLINE VF log(VF x) {
  VI bits = bit_cast<VI>(x);
  VI exponent = (bits >> 23) - 126;
  VF m = bit_cast<VF>((bits & 0x7fffff) | 0x3f000000);  // in [0.5, 1)
  VI small = m < 0.707106781f;
  exponent += small;  // a true lane is -1
  m = select(small, m + m, m) - 1.0f;
  VF e = __builtin_convertvector(exponent, VF), z = m * m;
  VF p = splat(7.0376836292e-2f);
  p = p * m - 1.1514610310e-1f;
  p = p * m + 1.1676998740e-1f;
  p = p * m - 1.2420140846e-1f;
  p = p * m + 1.4249322787e-1f;
  p = p * m - 1.6668057665e-1f;
  p = p * m + 2.0000714765e-1f;
  p = p * m - 2.4999993993e-1f;
  p = p * m + 3.3333331174e-1f;
  VF y = p * m * z + e * -2.12194440e-4f - 0.5f * z;
  return m + y + e * 0.693359375f;
}
