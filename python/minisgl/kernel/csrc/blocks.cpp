// From the blocks of llama.cpp's formats to a weight's tensors, and from rows to panels (panels.h).
//
// A start converts all weights of a GGUF file, so this runs at the memory's rate: each call makes one
// tensor of some rows (minisgl_zoo/gguf/blocks.py says what they mean), or packs one in its place.
// Numbers of 6 bits are bytes as Int6 has them (numbers.h).
// Layouts: llama.cpp's specification.
#include "numbers.h"
#include "tensor.h"
#include "threads.h"

namespace {

constexpr int MOST = 256;  // the most numbers of a block
enum Field { PACKED, SCALE, FACTOR, STEP, ZERO };

// n numbers of 4 bits in n / 2 bytes: the low halves come first.
INLINE void nibbles(const uint8_t* from, int8_t* to, int n) {
  for (int i = 0; i < n / 2; i++) to[i] = from[i] & 15, to[i + n / 2] = int8_t(from[i] >> 4);
}
// The same in runs of 64 numbers.
INLINE void in_fours(const uint8_t* from, int8_t* to) {
  for (int r = 0; r < MOST / 64; r++) nibbles(from + 32 * r, to + 64 * r, 64);
}
// The fifth bit of 32 numbers.
INLINE int8_t fifth(const uint8_t* from, int i) { return int8_t((from[i / 8] >> (i % 8) & 1) << 4); }

struct Q4_0 {
  static constexpr int BLOCK = 32, BYTES = 18, SCALE = 0, STEP = -1, GROUPS = 0;
  static constexpr bool WIDE = false, SIX = false, ADDS = false;
  static INLINE void numbers(const uint8_t* b, int8_t* to) { nibbles(b + 2, to, 32); }
};
struct Q4_1 : Q4_0 {
  static constexpr int BYTES = 20, STEP = 2;
  static constexpr bool ADDS = true;
  static INLINE void numbers(const uint8_t* b, int8_t* to) { nibbles(b + 4, to, 32); }
};
struct Q5_0 : Q4_0 {
  static constexpr int BYTES = 22;
  static constexpr bool WIDE = true, SIX = true;
  static INLINE void numbers(const uint8_t* b, int8_t* to) {
    nibbles(b + 6, to, 32);
    for (int i = 0; i < 32; i++) to[i] = int8_t((to[i] | fifth(b + 2, i)) - 16);
  }
};
struct Q5_1 : Q4_1 {
  static constexpr int BYTES = 24;
  static constexpr bool WIDE = true, SIX = true;
  static INLINE void numbers(const uint8_t* b, int8_t* to) {
    nibbles(b + 8, to, 32);
    for (int i = 0; i < 32; i++) to[i] |= fifth(b + 4, i);
  }
};
struct Q8_0 : Q4_0 {
  static constexpr int BYTES = 34;
  static constexpr bool WIDE = true;
  static INLINE void numbers(const uint8_t* b, int8_t* to) { std::memcpy(to, b + 2, 32); }
};
struct Q2_K {
  static constexpr int BLOCK = 256, BYTES = 84, SCALE = 80, STEP = 82, GROUPS = 16;
  static constexpr bool WIDE = false, SIX = false, ADDS = false;
  static INLINE void numbers(const uint8_t* b, int8_t* to) {
    for (int h = 0; h < 2; h++)
      for (int k = 0; k < 4; k++)
        for (int i = 0; i < 32; i++)
          to[128 * h + 32 * k + i] = b[16 + 32 * h + i] >> (2 * k) & 3;
  }
  static INLINE int factor(const uint8_t* b, int g) { return b[g] & 15; }
  static INLINE int zero(const uint8_t* b, int g) { return b[g] >> 4; }
};
struct Q3_K : Q2_K {
  static constexpr int BYTES = 110, SCALE = 108, STEP = -1;
  static INLINE void numbers(const uint8_t* b, int8_t* to) {
    for (int r = 0; r < 8; r++)
      for (int i = 0; i < 32; i++) {
        const int low = b[32 + r / 4 * 32 + i] >> (r % 4 * 2) & 3, high = b[i] >> r & 1;
        to[32 * r + i] = int8_t((low | high << 2) + 4);  // the file stores 0 as 4, int4 as 8
      }
  }
  static INLINE int factor(const uint8_t* b, int g) {
    const int low = g < 8 ? b[96 + g] & 15 : b[88 + g] >> 4;
    return (low | (b[104 + g % 4] >> (g / 4 * 2) & 3) << 4) - 32;
  }
};
struct Q4_K : Q2_K {
  static constexpr int BYTES = 144, SCALE = 0, STEP = 2, GROUPS = 8;
  static INLINE void numbers(const uint8_t* b, int8_t* to) { in_fours(b + 16, to); }
  static INLINE int factor(const uint8_t* b, int g) {
    return g < 4 ? b[4 + g] & 63 : (b[8 + g] & 15) | b[g] >> 6 << 4;
  }
  static INLINE int zero(const uint8_t* b, int g) {
    return g < 4 ? b[8 + g] & 63 : b[8 + g] >> 4 | b[4 + g] >> 6 << 4;
  }
};
struct Q5_K : Q4_K {
  static constexpr int BYTES = 176;
  static constexpr bool WIDE = true, SIX = true;
  static INLINE void numbers(const uint8_t* b, int8_t* to) {
    in_fours(b + 48, to);
    for (int r = 0; r < 8; r++)
      for (int i = 0; i < 32; i++) to[32 * r + i] |= int8_t((b[16 + i] >> r & 1) << 4);
  }
};
struct Q6_K : Q2_K {
  static constexpr int BYTES = 210, SCALE = 208, STEP = -1;
  static constexpr bool WIDE = true, SIX = true;
  static INLINE void numbers(const uint8_t* b, int8_t* to) {
    for (int h = 0; h < 2; h++) {
      nibbles(b + 64 * h, to + 128 * h, 128);
      for (int k = 0; k < 4; k++)
        for (int i = 0; i < 32; i++) {
          int8_t& n = to[128 * h + 32 * k + i];
          n = int8_t((n | (b[128 + 32 * h + i] >> (2 * k) & 3) << 4) - 32);
        }
    }
  }
  static INLINE int factor(const uint8_t* b, int g) { return int8_t(b[192 + g]); }
};
constexpr int8_t IQ4[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                            1,    13,   25,  38,  53,  69,  89,  113};
struct IQ4_NL : Q4_0 {
  static constexpr bool WIDE = true;
  static INLINE void numbers(const uint8_t* b, int8_t* to) {
    nibbles(b + 2, to, 32);
    for (int i = 0; i < 32; i++) to[i] = IQ4[to[i]];
  }
};
struct IQ4_XS : Q2_K {
  static constexpr int BYTES = 136, SCALE = 0, STEP = -1, GROUPS = 8;
  static constexpr bool WIDE = true;
  static INLINE void numbers(const uint8_t* b, int8_t* to) {
    for (int r = 0; r < 8; r++) nibbles(b + 8 + 16 * r, to + 32 * r, 32);
    for (int i = 0; i < 256; i++) to[i] = IQ4[to[i]];
  }
  static INLINE int factor(const uint8_t* b, int g) {
    const int low = b[4 + g / 2] >> (g % 2 * 4) & 15;
    return (low | (b[2 + g / 4] >> (g % 4 * 2) & 3) << 4) - 32;
  }
};

// Calls f with a value of the format's type; the numbers are those of `FORMS` there.
template <class F>
void with_format(int64_t format, F f) {
  switch (format) {
    case 0: return f(Q4_0{});
    case 1: return f(Q4_1{});
    case 2: return f(Q5_0{});
    case 3: return f(Q5_1{});
    case 4: return f(Q8_0{});
    case 5: return f(Q2_K{});
    case 6: return f(Q3_K{});
    case 7: return f(Q4_K{});
    case 8: return f(Q5_K{});
    case 9: return f(Q6_K{});
    case 10: return f(IQ4_NL{});
    case 11: return f(IQ4_XS{});
    default: CHECK(false, "no format " << format);
  }
}

// The bytes that a block has of a field. is_six: of numbers in 6 bits.
template <class L>
int64_t width(int64_t field, bool is_six) {
  if (field == PACKED) return is_six ? L::BLOCK / 4 * 3 : L::WIDE ? L::BLOCK : L::BLOCK / 2;
  return field == SCALE || field == STEP ? 2 : L::GROUPS;
}

template <class L>
INLINE void read_block(const uint8_t* b, int64_t field, bool is_six, uint8_t* to) {
  if (field == PACKED) {
    int8_t n[L::BLOCK];
    L::numbers(b, n);
    if (is_six) {
      for (int i = 0; i < L::BLOCK; i += 16, to += 12) {
        uint8_t placed[16];
        for (int k = 0; k < 16; k++) placed[place(k)] = uint8_t(n[i + k] + 32);
        for (int k = 0; k < 12; k++)
          to[k] = uint8_t(placed[k] | (placed[12 + k % 4] >> (k / 4 * 2) & 3) << 6);
      }
    } else if (L::WIDE) std::memcpy(to, n, L::BLOCK);
    else
      for (int i = 0; i < L::BLOCK / 2; i++) to[i] = uint8_t(n[2 * i] | n[2 * i + 1] << 4);
  } else if (field == SCALE) {
    std::memcpy(to, b + L::SCALE, 2);
  } else if (field == STEP) {
    to[0] = b[L::STEP], to[1] = b[L::STEP + 1] ^ (L::ADDS ? 0x80 : 0);  // the sign of a float16
  } else if constexpr (L::GROUPS > 0) {
    for (int g = 0; g < L::GROUPS; g++) to[g] = uint8_t(field == FACTOR ? L::factor(b, g) : L::zero(b, g));
  }
}

// Moves entries of each panel's 16 rows next to one another: [16, n] -> [n, 16].
template <class T>
void transpose(T* panel, int64_t n, std::vector<T>& rows) {
  rows.assign(panel, panel + PANEL * n);
  for (int64_t i = 0; i < n; i++)
    for (int64_t o = 0; o < PANEL; o++) panel[i * PANEL + o] = rows[o * n + i];
}

}  // namespace

// Reads a field of blocks: rows uint8 [O, bytes], whose rows may have gaps, to out [O, width].
void read_blocks(TensorView rows, int64_t format, int64_t field, TensorView out) {
  CHECK(rows.ndim() == 2 && rows.stride(1) == 1 && rows.dtype().bits == 8, "blocks: uint8 [O, B]");
  CHECK(out.ndim() == 2 && is_packed(out) && out.size(0) == rows.size(0), "blocks: out [O, width]");
  with_format(format, [&](auto layout) {
    using L = decltype(layout);
    const int64_t blocks = rows.size(1) / L::BYTES;
    const bool is_six = field == PACKED && L::SIX && out.size(1) < blocks * L::BLOCK;
    const int64_t each = width<L>(field, is_six);
    CHECK(blocks * L::BYTES == rows.size(1) && each > 0 &&
              out.size(1) * (out.dtype().bits / 8) == blocks * each &&
              (field != STEP || L::STEP >= 0),
          "blocks: out has another size than the field");
    for (int64_t o = 0; o < rows.size(0); o++) {
      const uint8_t* from = data<uint8_t>(rows) + o * rows.stride(0);
      uint8_t* to = data<uint8_t>(out) + o * blocks * each;
      for (int64_t i = 0; i < blocks; i++) read_block<L>(from + i * L::BYTES, field, is_six, to + i * each);
    }
  });
}

// Packs rows [..., O, I] of entries of 1, 2 or 4 bytes in their place: [..., O / 16, I, 16].
void pack_entries(TensorView entries, int64_t num_threads) {
  const int64_t n = entries.size(entries.ndim() - 1), bits = entries.dtype().bits;
  CHECK(is_packed(entries) && (n == 0 || entries.numel() / n % PANEL == 0), "packing: whole panels");
  each_item(n ? entries.numel() / n / PANEL : 0, num_threads, [&](int64_t p) {
    const auto pack = [&](auto* all) {
      std::vector<std::remove_pointer_t<decltype(all)>> rows;
      transpose(all + p * PANEL * n, n, rows);
    };
    if (bits == 8) pack(data<uint8_t>(entries));
    else if (bits == 16) pack(data<uint16_t>(entries));
    else pack(data<uint32_t>(entries));
  });
}

// Packs int4 numbers, uint8 [..., O, I / 2] with the number of the even column in the low bits, as
// numbers.h has them. flips: is XORed with each number.
void pack_nibbles(TensorView bytes, int64_t flips, int64_t num_threads) {
  const int64_t words = bytes.size(bytes.ndim() - 1) / 4;
  CHECK(is_packed(bytes) && bytes.dtype().bits == 8 && bytes.size(bytes.ndim() - 1) % 4 == 0 &&
            (words == 0 || bytes.numel() / 4 / words % PANEL == 0),
        "packing: whole panels of 8 inputs");
  const uint32_t flip = uint32_t(flips) * 0x11111111u;
  each_item(words ? bytes.numel() / 4 / words / PANEL : 0, num_threads, [&](int64_t p) {
    std::vector<uint32_t> rows;
    uint32_t* panel = data<uint32_t>(bytes) + p * PANEL * words;
    for (int64_t i = 0; i < PANEL * words; i++) {
      const uint32_t w = panel[i] ^ flip;
      // Even numbers are the low halves of bytes: squeeze them to 16 bits, then the odd ones.
      uint32_t even = w & 0x0f0f0f0f, odd = w >> 4 & 0x0f0f0f0f;
      even = (even | even >> 4) & 0x00ff00ff, odd = (odd | odd >> 4) & 0x00ff00ff;
      even = (even | even >> 8) & 0xffff, odd = (odd | odd >> 8) & 0xffff;
      panel[i] = even | odd << 16;
    }
    transpose(panel, words, rows);
  });
}

EXPORT(read_blocks)
EXPORT(pack_entries)
EXPORT(pack_nibbles)
