// Decodes packed weights (minisgl_zoo/weights/packed.py): numbers of 4 or 8 bits to pairs in
// bfloat16, and scales to float32. Behind hopper.cuh, with KIND and SCALE defined.

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned;
using u64 = unsigned long long;

enum { INT4, FP4, FP8, INT8 };                              // KIND
enum { F32, BF16, F16, E4M3, EXPONENT };        // SCALE

constexpr bool IS_BYTE = KIND >= FP8;
constexpr bool FACTORED = KIND == FP4;  // numbers are multiplied by their scales

// a * b + c of pairs.
__device__ u32 fma_2(u32 a, u32 b, u32 c) {
  u32 d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

// (a & b) | c, in one instruction: with constants the compiler makes two.
__device__ u32 and_or(u32 a, u32 b, u32 c) {
  u32 d;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

// Numbers i and i + 4 of a word, or of bytes i and i + 2.
template <int I>
__device__ u32 decode(u32 word, u32 factor) {
  if constexpr (KIND == INT4) {
    return and_or(word >> 4 * I, 0x000f000fu, 0x43004300u);
  } else if constexpr (KIND == FP8) {
    const u32 value = I == 0 ? word << 4 : word >> 4, sign = I == 0 ? word << 8 : word;
    return and_or(value, 0x07f007f0u, sign & 0x80008000u);
  } else if constexpr (KIND == INT8) {  // 128 + the low seven bits - (128, or 256 if negative)
    const u32 own = word >> 8 * I;
    return fma_2(and_or(own, 0x00800080u, 0x43004300u), 0xbf80bf80u,
                 and_or(own, 0x007f007fu, 0x43004300u));
  } else {
    const u32 value = I == 0 ? word << 6 : I == 1 ? word << 2 : I == 2 ? word >> 2 : word >> 6;
    const u32 sign = I == 0 ? word << 12 : I == 1 ? word << 8 : I == 2 ? word << 4 : word;
    return fma_2(and_or(value, 0x01c001c0u, sign & 0x80008000u), factor, 0x80008000u);
  }
}

// A scale from its bits.
__device__ float scale_of(u32 bits) {
  if constexpr (SCALE == F32) return __uint_as_float(bits);
  if constexpr (SCALE == EXPONENT) return __uint_as_float(bits << 23);
  if constexpr (SCALE == E4M3) {
    return __uint_as_float((bits & 0x7f) << 20 | (bits & 0x80) << 24) * 0x1p120f;
  }
  if constexpr (SCALE == BF16) return __uint_as_float(bits << 16);
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(u16(bits)));
  return value;
}

// scale * 2^60 twice, in bfloat16.
__device__ u32 factor_of(u32 bits) {
  if constexpr (SCALE == EXPONENT) {
    const u32 exponent = bits + 60;
    return (exponent < 254 ? exponent : 254) * 0x00800080u;
  }
  const float factor = scale_of(bits) * 0x1p60f;
  return round(factor, factor);
}
