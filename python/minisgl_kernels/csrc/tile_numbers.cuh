// Packed weights of GGUF files in tiles (minisgl_zoo/gguf/tiles.py): a lane's numbers and scales, in
// registers. Behind hopper.cuh, with BITS, GROUP, BLOCK, STEPS, MIDDLE and TABLE defined.
//
// A tile has 16 outputs and 64 inputs: the registers of the left operand of m16n8k16, four times, which
// a warp loads with whole lines. Lane 4g + t has outputs g and g + 8 (rows r), and of x columns 2t and
// 2t + 1 of each eight rows. Numbers become pairs of bfloat16 in two to five instructions, without
// rounding.

using u8 = unsigned char;
using u32 = unsigned;

constexpr int SPAN = 4;  // steps of a block of 256 inputs
constexpr bool IS_K = BLOCK == 256;
constexpr bool HAS_LOW = BITS >= 4 && BITS <= 6, IS_BYTE = BITS == 8;
constexpr int HIGH_BITS = BITS == 6 || BITS <= 3 ? 2 : 0;  // of the plane of two bits
constexpr bool HAS_TOP = BITS == 5 || BITS == 3;           // the plane of one bit
[[maybe_unused]] constexpr int TILE_BYTES = 128 * BITS;
constexpr int HALVES = (STEPS ? 2 : 1) * (IS_K ? 1 : 2);  // of a row: scales, then steps
constexpr int FACTORS = IS_K ? 64 / GROUP * (STEPS && GROUP == 32 ? 2 : 1) : 0;  // bytes of a row
constexpr int GROUPS = 64 / GROUP;
constexpr int ADDED = IS_BYTE || TABLE ? 0 : 128 + MIDDLE;  // by decoding

__device__ u32 fma_2(u32 a, u32 b, u32 c) {
  u32 d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

// (a & b) | c, in one instruction.
__device__ u32 and_or(u32 a, u32 b, u32 c) {
  u32 d;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

__device__ float from_half(u32 bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"((unsigned short)bits));
  return value;
}

// Byte i of a word, in bits 8 to 15 of the float 2^15, minus `added`.
__device__ float from_byte(u32 word, int i, int added) {
  return __uint_as_float(__byte_perm(word, 0x47000000u, 0x7404 | i << 4)) - float(32768 + added);
}

// Four bytes of llama.cpp's table for the four numbers in the low half of a word.
__device__ u32 look_up(u32 word) {
  const u32 at = word & 0x7777u;
  const u32 low = __byte_perm(0xbfad9881u, 0xf6eaddcfu, at);   // -127 -104 -83 -65 -49 -35 -22 -10
  const u32 high = __byte_perm(0x26190d01u, 0x71594535u, at);  // 1 13 25 38 53 69 89 113
  return __byte_perm(low, high, and_or(word >> 1, 0x4444u, 0x3210u));
}

// Bytes i and i + 2 of a word, with their signs.
__device__ u32 of_bytes(u32 word, int i) {  // 128 + the low seven bits - (128, or 256 if negative)
  const u32 own = word >> 8 * i;
  return fma_2(and_or(own, 0x00800080u, 0x43004300u), 0xbf80bf80u,
               and_or(own, 0x007f007fu, 0x43004300u));
}

// Adds the bits of a plane to a pair: `width` bits that are at `from` in a word, to `at`.
__device__ u32 with_plane(u32 word, u32 pair, int width, int from, int at) {
  const u32 moved = from >= at ? word >> (from - at) : word << (at - from);
  return and_or(moved, ((1u << width) - 1) * 0x10001u << at, pair);
}

__device__ void load_2(u32* to, const void* from, long long i) {
  const uint2 words = __ldcs(static_cast<const uint2*>(from) + i);
  to[0] = words.x, to[1] = words.y;
}

__device__ void load_4(u32* to, const void* from, long long i) {
  const uint4 words = __ldcs(static_cast<const uint4*>(from) + i);
  to[0] = words.x, to[1] = words.y, to[2] = words.z, to[3] = words.w;
}

__device__ void load_1(u32* to, const void* from, long long i) { *to = __ldcs(static_cast<const u32*>(from) + i); }

// The same from shared memory.
__device__ void load_4(u32* to, u32 from, int i) {
  const uint4 words = load_16(from + i * 16);
  to[0] = words.x, to[1] = words.y, to[2] = words.z, to[3] = words.w;
}

__device__ void load_2(u32* to, u32 from, int i) {
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "r"(from + i * 8) : "memory");
}

__device__ void load_1(u32* to, u32 from, int i) {
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(*to) : "r"(from + i * 4) : "memory");
}

// A lane's numbers of a tile. Indices are constants wherever this is inlined.
struct Numbers {
  u32 low[IS_BYTE ? 8 : 4], high[2], top;

  // tile: a pointer to its bytes, or their address in shared memory.
  template <class Tile>
  __device__ void load(Tile tile, int lane) {
    if constexpr (HAS_LOW || IS_BYTE) load_4(low, tile, lane);
    if constexpr (IS_BYTE) load_4(low + 4, tile + 512, lane);
    constexpr int TO_HIGH = HAS_LOW ? 512 : 0, TO_TOP = TO_HIGH + 128 * HIGH_BITS;
    if constexpr (HIGH_BITS != 0) load_2(high, tile + TO_HIGH, lane);
    if constexpr (HAS_TOP) load_1(&top, tile + TO_TOP, lane);
  }

  // The numbers of row r and inputs 16j + 4t + 2h and the next, plus ADDED.
  __device__ u32 decoded(int r, int j, int h) const {
    const int q = 2 * j + h;
    if constexpr (IS_BYTE) return of_bytes(low[2 * j + r], h);
    const u32 word = low[j / 2 * 2 + r];
    if constexpr (TABLE) return of_bytes(look_up(word >> j % 2 * 16), h);
    u32 pair = 0x43004300u;
    if constexpr (HAS_LOW) pair = with_plane(word, pair, 4, q % 4 * 4, 0);
    if constexpr (HIGH_BITS != 0) pair = with_plane(high[r], pair, 2, 2 * q, HAS_LOW ? 4 : 0);
    if constexpr (HAS_TOP) pair = with_plane(top, pair, 1, q + 8 * r, HAS_LOW ? 4 : 2);
    return pair;
  }

  // The same minus MIDDLE; with steps plus 128.
  __device__ u32 pair(int r, int j, int h) const {
    const u32 pair = decoded(r, j, h);
    return STEPS || !ADDED ? pair : fma_2(pair, 0x3f803f80u, (0xc300u + MIDDLE) * 0x10001u);
  }
};

// A lane's scales of a tile: of rows g and g + 8.
struct Scales {
  u32 factors[FACTORS == 4 ? 2 : 1], halves[HALVES];

  // at: of a tile and a step, times eight, plus g. from: a pointer, or an address in shared memory.
  template <class From>
  __device__ void load_factors(From from, long long at) {
    if constexpr (FACTORS == 4) load_2(factors, from, at);
    if constexpr (FACTORS == 2) load_1(factors, from, at);
  }

  // at: of a tile and a step, or a block of 256 inputs, times eight, plus g.
  template <class From>
  __device__ void load_halves(From from, long long at) {
    if constexpr (HALVES == 4) load_4(halves, from, at);
    if constexpr (HALVES == 2) load_2(halves, from, at);
    if constexpr (HALVES == 1) load_1(halves, from, at);
  }

  // block: of 256 inputs, in which the step is.
  __device__ void load(const u8* of_factors, const u8* of_halves, long long tile, int step, int block,
                       int steps, int g) {
    load_factors(of_factors, (tile * steps + step) * 8 + g);
    load_halves(of_halves, (IS_K ? tile * (steps / SPAN) + block : tile * steps + step) * 8 + g);
  }

  // Float16 number i of row r.
  __device__ float half_of(int r, int i) const {
    const int at = r * HALVES + i;
    return from_half(halves[at / 2] >> at % 2 * 16);
  }

  // Byte i of row r, minus `added`; with formats of 2 bits a nibble of it.
  __device__ float byte_of(int r, int i, int added) const {
    if constexpr (BITS == 2) {
      const int at = r * FACTORS + i % GROUPS;
      const u32 nibble = factors[at / 4] >> (at % 4 * 8 + i / GROUPS * 4);
      return __uint_as_float(and_or(nibble, 15, 0x4b000000u)) - 0x1p23f;
    }
    const int at = r * FACTORS + i;
    return from_byte(factors[at / 4], at % 4, added);
  }

  // The scale of a group of a tile, and what is subtracted: step * zero, or 0.
  __device__ void get(int r, int group, float& scale, float& offset) const {
    offset = 0;
    if constexpr (!IS_K) {
      scale = half_of(r, group);
      if constexpr (STEPS) offset = half_of(r, 2 + group);
    } else {
      scale = half_of(r, 0) * byte_of(r, group, 128);
      if constexpr (STEPS) offset = half_of(r, 1) * byte_of(r, GROUPS + group, 0);
    }
  }
};
