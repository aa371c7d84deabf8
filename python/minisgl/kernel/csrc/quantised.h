// Keys and values in 8 bits: int8 and e4m3, as vectors of float or pairs of bfloat16.
//
// A number times a scale is the value. Scales of int8 belong to a token and head and are written with
// the row; scales of e4m3 belong to a head and are given.
#pragma once

#include "tensor.h"

struct i8 {
  int8_t number;
};
struct e4m3 {  // sign, 4 bits of exponent with bias 7, 3 of mantissa; 0x7f is NaN, none is infinite
  uint8_t bits;
};

constexpr float MOST_I8 = 127, MOST_E4M3 = 448;
constexpr float ROUND = 0x1.8p23f;  // adding it rounds to an integer in the low bits, ties to even

typedef uint8_t VU8 __attribute__((vector_size(W)));

INLINE VU8 narrow(VU v) {
#if defined(__AVX512F__)
  return (VU8)_mm512_cvtepi32_epi8((__m512i)v);
#else
  return __builtin_convertvector(v, VU8);
#endif
}

INLINE VF load(const i8* p) {
  return __builtin_convertvector(widen(&p->number), VF);
}
INLINE VF load(const e4m3* p) {
  VU x = widen(&p->bits), magnitude = x & 0x7f;
  VF normal = bit_cast<VF>((magnitude << 20) + (120u << 23));
  VF subnormal = __builtin_convertvector(bit_cast<VI>(magnitude), VF) * 0x1p-9f;
  VF value = magnitude < 8 ? subnormal : normal;
  value = magnitude == 0x7f ? splat(NAN) : value;
  return bit_cast<VF>(bit_cast<VU>(value) | (x & 0x80) << 24);
}

// The nearest number, ties to even; v is in [-127, 127].
INLINE void store(i8* p, VF v) {
  VU8 bytes = narrow(bit_cast<VU>(v + ROUND));
  std::memcpy(p, &bytes, sizeof(bytes));
}
// The nearest number, ties to even, at most 448; NaN stays NaN.
INLINE void store(e4m3* p, VF v) {
  VU sign = bit_cast<VU>(v) >> 24 & 0x80;
  VF size = min(bit_cast<VF>(bit_cast<VU>(v) & 0x7fffffff), splat(MOST_E4M3));
  VU bits = bit_cast<VU>(size);
  VU normal = ((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - (120 << 3);
  VU subnormal = bit_cast<VU>(size + 0x1p14f) & 0xf;  // an ulp of 2**14 is 2**-9
  VU rounded = size < 0x1p-6f ? subnormal : normal;
  VU8 bytes = narrow((v == v ? rounded : VU{} + 0x7f) | sign);
  std::memcpy(p, &bytes, sizeof(bytes));
}

#if defined(__AVX512BF16__)
// 32 numbers, of which the first n are read, as bfloat16; all are exact.
INLINE __m256i load_bytes(const void* p, int n) {
  return _mm256_maskz_loadu_epi8(n >= 32 ? ~0u : (1u << n) - 1, p);
}
INLINE __m512bh load_pairs(const i8* p, int n) {
  __m256i bytes = load_bytes(p, n);
  __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(bytes)));
  __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(bytes, 1)));
  return _mm512_cvtne2ps_pbh(high, low);
}
INLINE __m512bh load_pairs(const e4m3* p, int n) {
  // 0 to 7 times 2**-9 in bfloat16
  const __m512i small = _mm512_castsi128_si512(
      _mm_setr_epi16(0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60));
  __m512i x = _mm512_cvtepu8_epi16(load_bytes(p, n));
  __m512i magnitude = _mm512_and_si512(x, _mm512_set1_epi16(0x7f));
  __m512i value =
      _mm512_add_epi16(_mm512_slli_epi16(magnitude, 4), _mm512_set1_epi16(120 << 7));
  value = _mm512_mask_permutexvar_epi16(
      value, _mm512_cmplt_epu16_mask(magnitude, _mm512_set1_epi16(8)), magnitude, small);
  value = _mm512_mask_mov_epi16(
      value, _mm512_cmpeq_epi16_mask(magnitude, _mm512_set1_epi16(0x7f)),
      _mm512_set1_epi16(0x7fc0));
  __m512i sign = _mm512_slli_epi16(_mm512_srli_epi16(x, 7), 15);
  return (__m512bh)_mm512_or_si512(value, sign);
}
#endif

// One head's row of n numbers, with a scale of its own, which is written.
template <class T>
INLINE void quantise_row(const T* x, i8* to, int n, float* scale) {
  VF most = {}, poison = {};  // `max` does not see NaN
  each(x, n, [&](VF v, int) {
    most = max(bit_cast<VF>(bit_cast<VU>(v) & 0x7fffffff), most);
    poison += v * 0.0f;
  });
  const float largest = max(most) + sum(poison);
  *scale = largest == 0 ? 1.0f : largest / MOST_I8;
  each(x, n, [&](VF v, int i) { store_until(to, i, n, v / *scale); });
}
// As above, with the scale that is given.
template <class T>
INLINE void quantise_row(const T* x, e4m3* to, int n, const float* scale) {
  each(x, n, [&](VF v, int i) { store_until(to, i, n, v / *scale); });
}

// Calls f with a null pointer of the pool's type: that of the inputs, i8 or e4m3.
template <class T, class F>
void with_pool(DLDataType pool, DLDataType inputs, F f) {
  if (pool == inputs) return f((T*)nullptr);
  if (pool.code == kDLInt && pool.bits == 8) return f((i8*)nullptr);
  if (pool.code == kDLFloat8_e4m3fn) return f((e4m3*)nullptr);
  throw Error("ValueError") << "attention: the pool must have the inputs' dtype, int8 or e4m3";
}
