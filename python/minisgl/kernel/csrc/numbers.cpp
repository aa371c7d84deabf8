// Linear layers whose weights are integers or floats of 4 or 8 bits with scales.
//
// Integers multiply integers: a row of inputs is rounded to int16 in blocks of at most 128, each
// with a scale that is a power of two, so that the largest of a block has 14 or 15 bits. What
// bfloat16 holds within 2**-7 of the largest stays exact. The sums of a block are exact: 128 times
// 2**15 * 2**7 fits an int32. With AVX2 numbers are multiplied by factors as integers (Folded); then some
// blocks have 32 inputs of 13 or 14 bits. Fp8 multiplies the inputs as they are.
#include <numeric>

#include "product.h"
#include "scaled.h"

namespace {

// Inputs of a block, which have one scale, and of a unit, which have one sum: a block or a group in it.
// bits: of the largest number of a block.
struct Sizes {
  int64_t block, unit;
  int bits;
};

// The largest exponent field of n numbers, a multiple of 8: 255 if one is not finite.
INLINE int largest_field(const bf16* x, int n) {
  typedef int16_t V8 __attribute__((vector_size(16)));
  V8 most = {};
  for (int i = 0; i < n; i += 8) {
    V8 bits;
    std::memcpy(&bits, x + i, sizeof(bits));
    bits &= 0x7fff;
    most = bits > most ? bits : most;
  }
  int largest = 0;
  for (int i = 0; i < 8; i++) largest = std::max<int>(largest, most[i]);
  return largest >> 7;
}

// Rows of inputs as int16, with scales [blocks, rows] and, if has_sums, sums [units, rows], and PADDING rows.
struct IntRows {
  std::vector<int16_t> numbers;
  std::vector<float> scales, sums;
  int64_t stride;  // rows
  IntRows(const bf16* x, int64_t rows, int64_t inputs, const Sizes& sizes, bool has_sums, int64_t num_threads)
      : numbers((rows + PADDING) * inputs),
        scales((rows + PADDING) * ((inputs + sizes.block - 1) / sizes.block)),
        sums(has_sums ? (rows + PADDING) * ((inputs + sizes.unit - 1) / sizes.unit) : 0), stride(rows + PADDING) {
    constexpr int64_t TOGETHER = 16;  // rows whose scales and sums are in one line of the cache
    const int64_t block = sizes.block, blocks = (inputs + block - 1) / block;
    const int64_t unit = has_sums ? sizes.unit : block;
    const float most = std::ldexp(1.0f, sizes.bits) - 1;
    if (rows * inputs <= 32768) num_threads = 1;
    const auto convert = [&](int64_t row, int64_t b) {
      const int64_t at = row * inputs + b * block;
      const int n = int(std::min(block, inputs - b * block)), field = largest_field(x + at, n);
      const int exponent = std::max(field - 126, -100);  // the largest is below 2**exponent
      const auto power = [](int of_two) { return bit_cast<float>((of_two + 127) << 23); };
      const float scale = power(exponent - sizes.bits), inverse = power(sizes.bits - exponent);
      scales[b * stride + row] = field < 255 ? scale : NAN;
      for (int64_t from = 0; from < n; from += unit) {
        VI total = {};
        const int count = int(std::min(n - from, unit));
        each(x + at + from, count, [&](VF v, int j) {
          const VF shifted = min(v * inverse, splat(most)) + 0x1.8p23f;  // rounds
          const VI whole = bit_cast<VI>(shifted) - 0x4b400000;
          total += whole;
          store_until(numbers.data() + at + from, j, count, whole);
        });
        if (has_sums)
          sums[(b * (block / unit) + from / unit) * stride + row] = sum(__builtin_convertvector(total, VF)) * scale;
      }
    };
    each_item((rows + TOGETHER - 1) / TOGETHER * blocks, num_threads, [&](int64_t i) {
      const int64_t first = i / blocks * TOGETHER, end = std::min(first + TOGETHER, rows);
      for (int64_t row = first; row < end; row++) convert(row, i % blocks);
    });
  }
};

// The scales and offsets of a panel's blocks, of which `per` have one group, as floats.
void spread(const Scales& all, int64_t panel, int64_t blocks, int64_t per, float* scales,
            float* offsets) {
  const Scales source = all;  // a copy: what is written cannot change it
  const int64_t groups = int64_t(1) << source.entries.shift;  // of an entry
  VF entry[NV] = {}, step[NV] = {};
  for (int64_t b = 0, group = 0; b < blocks; group++) {
    if (W == 16 || (group & (groups - 1)) == 0)  // AVX-512 loads and converts in one instruction
      for (int v = 0; v < NV; v++) {
        entry[v] = source.entries.load(panel, group, v * W);
        if (offsets && source.steps) step[v] = source.steps->load(panel, group, v * W);
      }
    VF scale[NV], offset[NV] = {};
    for (int v = 0; v < NV; v++) {
      scale[v] = source.scale_of(entry[v], panel, group, v * W);
      if (offsets) offset[v] = source.offset_of(step[v], panel, group, v * W, scale[v]);
    }
    for (int64_t end = std::min(b + per, blocks); b < end; b++)
      for (int v = 0; v < NV; v++) {
        store(scales + b * PANEL + v * W, scale[v]);
        if (offsets) store(offsets + b * PANEL + v * W, offset[v]);
      }
  }
}

// Those of weights that are Folded: scales of blocks, without factors, and offsets of all groups. Scales
// and steps are float16.
void spread_folded(const Scales& source, int64_t panel, int64_t block_groups, float* scales,
                   float* offsets) {
  const int64_t groups = int64_t(1) << source.entries.shift;  // of an entry
  const int8_t* factors = source.factors + panel * source.entries.groups * PANEL;
  const uint8_t* zeros = !offsets ? nullptr : source.zeros + panel * source.entries.groups * PANEL;
  for (int64_t e = 0; e < source.entries.count; e++) {
    const int64_t at = (panel * source.entries.count + e) * PANEL;
    VF scale[NV], step[NV] = {};
    unrolled<NV>([&](auto v) __attribute__((always_inline)) {
      scale[v] = load(source.entries.as<f16>() + at + v * W);
      if (offsets) step[v] = load(source.steps->as<f16>() + at + v * W);
    });
    for (int64_t g = 0; g < groups; g += block_groups, scales += PANEL)
      unrolled<NV>([&](auto v) __attribute__((always_inline)) { store(scales + v * W, scale[v]); });
    if (!offsets) continue;
    unrolled<NV>([&](auto v) __attribute__((always_inline)) { scale[v] *= float(source.middle); });
    for (int64_t g = 0; g < groups; g++, offsets += PANEL, factors += PANEL, zeros += PANEL)
      unrolled<NV>([&](auto v) __attribute__((always_inline)) {
        const VF zero = __builtin_convertvector((VI)widen(zeros + v * W), VF);
        const VF factor = __builtin_convertvector(widen(factors + v * W), VF);
        store(offsets + v * W, zero * step[v] - factor * scale[v]);
      });
  }
}

// What `Product::run` calls for two panels, whose scales are in a table. ints: or null.
template <class K>
struct Finish {
  const float* scales;  // of both panels, `both` apart: of `blocks`, then offsets
  int64_t both, blocks, units;
  const IntRows* ints;
  bool has_offset;

  // Adds sums of a block.
  template <class M, class Sum>
  INLINE void operator()(int p, int64_t b, int m, M, const Sum (*sums)[NV], VF (*totals)[NV]) const {
    const float* const own = scales + p * both + b * PANEL;
    VF scale[NV], offset[NV];
    unrolled<NV>([&](auto v) __attribute__((always_inline)) {
      scale[v] = load(own + v * W);
      if (has_offset && !K::FOLDS) offset[v] = load(own + blocks * PANEL + v * W);
    });
    unrolled<M::value>([&](auto i) __attribute__((always_inline)) {
      unrolled<NV>([&](auto v) __attribute__((always_inline)) {
        if constexpr (std::is_same_v<typename K::X, int16_t>) {
          const int64_t j = b * ints->stride + m + i;
          totals[i][v] += as_float(sums[i][v]) * (scale[v] * ints->scales[j]);
          if (has_offset && !K::FOLDS) totals[i][v] -= offset[v] * ints->sums[j];
        } else {
          totals[i][v] += sums[i][v] * (scale[v] * K::UNIT);
        }
      });
    });
  }

  // Sets totals to what the offsets of all groups add.
  template <int M>
  INLINE void begin(int p, int m, VF (&totals)[M][NV]) const {
    VF own[M][NV] = {};
    if (has_offset) {
      const float *offset = scales + p * both + blocks * PANEL, *sums = ints->sums.data() + m;
      for (int64_t g = 0; g < blocks * units; g++, offset += PANEL, sums += ints->stride) {
        VF of_group[NV];
        unrolled<NV>([&](auto v) __attribute__((always_inline)) {
          of_group[v] = load(offset + v * W);
          keep_in_register(of_group[v]);
        });
        unrolled<M>([&](auto i) __attribute__((always_inline)) {
          const VF sum = splat(sums[i]);
          unrolled<NV>([&](auto v) __attribute__((always_inline)) { own[i][v] -= of_group[v] * sum; });
        });
      }
    }
    unrolled<M * NV>([&](auto i) __attribute__((always_inline)) { totals[i / NV][i % NV] = own[i / NV][i % NV]; });
  }
};

// rows: inputs as K takes them; ints: the scales and sums of their blocks, or null.
template <class K>
void multiply(const Product& product, const Scaled& weight, const typename K::X* rows,
              const IntRows* ints, const Sizes& sizes, int64_t num_threads) {
  const int64_t inputs = product.inputs, block = sizes.block, blocks = (inputs + block - 1) / block;
  const int64_t units = K::FOLDS ? block / sizes.unit : 1;  // of a block
  const int64_t per = std::min((weight.group + block - 1) / block, blocks);
  const bool has_offset = ints && weight.scales.has_offset();
  const auto start = [&](const int64_t (&panels)[2]) {
    static thread_local std::vector<float> buffer;
    const int64_t size = blocks * PANEL, both = size * (1 + units);  // of scales; and of offsets
    if (int64_t(buffer.size()) < 2 * both) buffer.resize(2 * both);
    float* const at = buffer.data();
    for (int p = 0; p < 2; p++) {
      float* const offsets = has_offset ? at + p * both + size : nullptr;
      if (K::FOLDS) spread_folded(weight.scales, panels[p], units, at + p * both, offsets);
      else spread(weight.scales, panels[p], blocks, per, at + p * both, offsets);
    }
    return Finish<K>{at, both, blocks, units, ints, has_offset};
  };
  constexpr bool PADDED = TILE > 4;  // less to compile, where tiles have many rows
  const Groups groups{weight.scales.factors, weight.scales.entries.groups,
                      __builtin_ctzll(weight.group)};
  product.run<K, PADDED>(weight.numbers, rows, block, num_threads, start, groups);
}

#if defined(__AVX2__) && !defined(__AVX512BW__)
// One row of int16 inputs as two digits, x = 256 high + low, both int8: an instruction multiplies twice as many
// bytes, and sums of UNIT inputs fit an int16. Of 16 inputs, 32 bytes: the high digits of K::bytes' vectors,
// then the low ones. Starts, [units, high and low, 2]: -middle times the sums of digits that an int16 gets.
// least: of low digits; 8 times -128 times -32 would not fit.
struct Digits {
  std::vector<int8_t> digits;
  std::vector<int16_t> starts;
  Digits(const int16_t* x, int64_t inputs, int unit, int middle, int least)
      : digits(2 * inputs), starts(4 * (inputs / unit)) {
    const __m128i order = _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);  // see `place`
    const __m256i most = _mm256_set1_epi16(127 * 256 + 127), half = _mm256_set1_epi16(128);
    const auto in_order = [&](__m256i v) {
      return _mm_shuffle_epi8(_mm_packs_epi16(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1)), order);
    };
    for (int64_t i = 0; i < inputs; i += unit) {
      __m256i sums[2] = {};
      for (int64_t j = i; j < i + unit; j += 16) {
        const __m256i number = _mm256_min_epi16(_mm256_loadu_si256((const __m256i*)(x + j)), most);
        const __m256i high = _mm256_srai_epi16(_mm256_add_epi16(number, half), 8);
        const __m256i low = _mm256_max_epi16(_mm256_sub_epi16(number, _mm256_slli_epi16(high, 8)),
                                             _mm256_set1_epi16(int16_t(least)));
        __m128i* const to = (__m128i*)(digits.data() + 2 * j);
        _mm_storeu_si128(to, in_order(high)), _mm_storeu_si128(to + 1, in_order(low));
        sums[0] = _mm256_add_epi16(sums[0], high), sums[1] = _mm256_add_epi16(sums[1], low);
      }
      for (int k = 0; k < 2; k++) {
        __m128i sum = _mm_add_epi16(_mm256_castsi256_si128(sums[k]), _mm256_extracti128_si256(sums[k], 1));
        sum = _mm_add_epi16(sum, _mm_srli_si128(sum, 8));
        sum = _mm_mullo_epi16(_mm_add_epi16(sum, _mm_srli_si128(sum, 4)), _mm_set1_epi16(int16_t(-middle)));
        const int32_t both = _mm_cvtsi128_si32(sum);
        std::memcpy(starts.data() + i / unit * 4 + 2 * k, &both, 4);
      }
    }
  }
};
INLINE __m256i splat_32(const void* p) {
  int32_t bits;
  std::memcpy(&bits, p, 4);
  return _mm256_set1_epi32(bits);
}

// How the scales of one row's weight are. FOLDED: groups have factors, and offsets zeros and steps; scales and
// steps are float16. HALVES: so are they, of blocks of UNIT inputs, without factors and zeros.
enum Form { FOLDED, HALVES, OTHER };

// `multiply` of one row. Scales and offsets become floats where they are used.
template <class K, int UNIT, Form FORM>
void multiply_row(const Product& product, const Scaled& weight, const IntRows& ints,
                  const Sizes& sizes, int64_t num_threads) {
  constexpr bool FOLDS = FORM == FOLDED;
  const int64_t inputs = product.inputs, turn = product.turn<K>();
  const int64_t block = FORM == HALVES ? UNIT : sizes.block;
  const bool has_offset = weight.scales.has_offset();
  // Numbers without a sign have an offset of zeros times steps, or of steps.
  const int middle = K::MIDDLE - (FORM != OTHER && has_offset ? weight.scales.middle : 0);
  const Digits all(ints.numbers.data(), inputs, UNIT, middle, K::MIDDLE > 8 ? -127 : -128);
  product.each_panel(num_threads, [&](int64_t panel, int64_t next, VF(&total)[NV]) {
    const Scales source = weight.scales;  // a copy: what is written cannot change it
    const int64_t groups = source.entries.groups, entry_shift = source.entries.shift, stride = ints.stride;
    const int shift = weight.group < inputs ? __builtin_ctzll(weight.group) : 62;
    const int8_t *digits = all.digits.data(), *factors = source.factors + panel * groups * PANEL;
    const uint8_t *at = product.bytes<K>(weight.numbers, panel, 0),
                  *zeros = source.zeros + panel * groups * PANEL;
    const int16_t* starts = all.starts.data();
    const float *of_rows = ints.scales.data(), *sums_of_rows = ints.sums.data();
    const f16 *scales = nullptr, *steps = nullptr;
    if (FORM != OTHER) scales = source.entries.as<f16>() + source.entries.at(panel, 0);
    if (FORM != OTHER && has_offset) steps = source.steps->as<f16>() + source.entries.at(panel, 0);
    const __m256i of_32 = _mm256_setr_epi8(0, 1, 0, 1, 4, 5, 4, 5, 8, 9, 8, 9, 12, 13, 12, 13,
                                           0, 1, 0, 1, 4, 5, 4, 5, 8, 9, 8, 9, 12, 13, 12, 13);
    VF sum[NV] = {};
    for (int64_t from = 0, b = 0; from < inputs; from += block, b++) {
      const uint8_t* asked =
          from < turn ? at + AHEAD : product.bytes<K>(weight.numbers, next, from - turn);
      const int64_t end = std::min(from + block, inputs);
      VI high[NV] = {}, low[NV] = {};
      VF offset[NV] = {};
      for (int64_t i = from; i < end; i += UNIT, starts += 4) {
        __m256i highs[NV], lows[NV];  // int16, two of each output
        for (int v = 0; v < NV; v++) highs[v] = splat_32(starts), lows[v] = splat_32(starts + 2);
        for (int n = 0; n < UNIT; n += 16, at += K::BYTES_OF_16, asked += K::BYTES_OF_16, digits += 32) {
          for (int line = 0; line < K::BYTES_OF_16; line += 64) __builtin_prefetch(asked + line);
          __m256i bytes[NV][4];
          unrolled<NV>([&](auto v) __attribute__((always_inline)) { K::bytes(at, v, bytes[v]); });
          unrolled<4>([&](auto k) __attribute__((always_inline)) {
            const __m256i x = splat_32(digits + 4 * k), y = splat_32(digits + 16 + 4 * k);
            unrolled<NV>([&](auto v) __attribute__((always_inline)) {
              highs[v] = _mm256_add_epi16(highs[v], _mm256_maddubs_epi16(bytes[v][k], x));
              lows[v] = _mm256_add_epi16(lows[v], _mm256_maddubs_epi16(bytes[v][k], y));
              keep_in_register(highs[v]), keep_in_register(lows[v]);  // GCC would add products up first
            });
          });
        }
        if (FORM == HALVES) {  // one unit
          unrolled<NV>([&](auto v) __attribute__((always_inline)) {
            const __m256i both = _mm256_add_epi32(_mm256_madd_epi16(highs[v], _mm256_set1_epi16(256)),
                                                  _mm256_madd_epi16(lows[v], _mm256_set1_epi16(1)));
            const VF scale = load(scales + b * PANEL + v * W) * of_rows[b * stride];
            sum[v] += (VF)_mm256_cvtepi32_ps(both) * scale;
            if (steps) sum[v] -= load(steps + b * PANEL + v * W) * sums_of_rows[b * stride];
          });
          continue;
        }
        for (int v = 0; v < NV; v++) {
          __m256i factor = _mm256_set1_epi16(1);
          if (FOLDS) {
            const int64_t g = (i >> shift) * PANEL + v * W;
            factor = _mm256_shuffle_epi8((__m256i)widen(factors + g), of_32);
            if (has_offset && (i >> shift) << shift == i)  // once for a group
              offset[v] += __builtin_convertvector((VI)widen(zeros + g), VF) *
                           sums_of_rows[(i >> shift) * stride];
          }
          high[v] += (VI)_mm256_madd_epi16(highs[v], factor);
          low[v] += (VI)_mm256_madd_epi16(lows[v], factor);
        }
      }
      if (FORM == HALVES) continue;
      const float of_row = of_rows[b * stride];
      const int64_t g = from >> shift;
      for (int v = 0; v < NV; v++) {
        const int64_t entry = (g >> entry_shift) * PANEL + v * W;
        const VF scale = FOLDS ? load(scales + entry) : source.entries.load(panel, g, v * W);
        const VF whole = __builtin_convertvector(high[v], VF) * 256.0f + __builtin_convertvector(low[v], VF);
        sum[v] += whole * (scale * of_row);
        if (!has_offset) continue;
        if (FOLDS) sum[v] -= load(steps + entry) * offset[v];
        else sum[v] -= source.offset(panel, g, v * W, scale) * sums_of_rows[b * stride];
      }
    }
    for (int v = 0; v < NV; v++) total[v] = sum[v];
  });
}

// The same for numbers of 8 bits in blocks of 32 inputs with scales (and steps) of float16: they meet the
// inputs as they are.
void multiply_bytes(const Product& product, const Scaled& weight, const IntRows& ints, int64_t num_threads) {
  const int64_t inputs = product.inputs, turn = product.turn<Int8>();
  product.each_panel(num_threads, [&](int64_t panel, int64_t next, VF(&total)[NV]) {
    const int64_t first = weight.scales.entries.at(panel, 0), stride = ints.stride;
    const f16* scales = weight.scales.entries.as<f16>() + first;
    const f16* steps = weight.scales.steps ? weight.scales.steps->as<f16>() + first : nullptr;
    const float middle = float(weight.scales.middle);
    const int16_t* x = ints.numbers.data();
    const uint8_t* at = product.bytes<Int8>(weight.numbers, panel, 0);
    const float *of_rows = ints.scales.data(), *sums_of_rows = ints.sums.data();
    VF sum[NV] = {};
    for (int64_t b = 0; b < inputs / 32; b++, at += 512, x += 32, scales += PANEL) {
      const uint8_t* asked =
          b * 32 < turn ? at + AHEAD : product.bytes<Int8>(weight.numbers, next, b * 32 - turn);
      VI sums[NV] = {};
      unrolled<16>([&](auto s) __attribute__((always_inline)) {
        if (s % 2 == 0) __builtin_prefetch(asked + 32 * s);
        const __m256i pair = splat_32(x + 2 * s);
        unrolled<NV>([&](auto v) __attribute__((always_inline)) {
          const __m128i bytes = _mm_loadu_si128((const __m128i*)(at + 32 * s) + v);
          sums[v] += (VI)_mm256_madd_epi16(_mm256_cvtepi8_epi16(bytes), pair);
        });
      });
      unrolled<NV>([&](auto v) __attribute__((always_inline)) {
        const VF scale = load(scales + v * W);
        sum[v] += (VF)_mm256_cvtepi32_ps((__m256i)sums[v]) * (scale * of_rows[b * stride]);
        if (steps)
          sum[v] -= (load(steps + b * PANEL + v * W) - middle * scale) * sums_of_rows[b * stride];
      });
    }
    for (int v = 0; v < NV; v++) total[v] = sum[v];
  });
}
#endif

// Input `input` of a panel's output `lane`, of integers.
inline int number(const uint8_t* panel, int64_t kind, int64_t lane, int64_t input) {
  if (kind == INT8) return int8_t(panel[input / 2 * 32 + 2 * lane + input % 2]);
  if (kind == INT6) {
    const int at = place(input % 16), shift = at / 4 * 64 + at % 4;
    const uint8_t *bytes = panel + input / 16 * 192 + 4 * lane, *upper = bytes + at % 4;
    if (at < 12) return (bytes[shift] & 63) - 32;
    return (upper[0] >> 6 | upper[64] >> 6 << 2 | upper[128] >> 6 << 4) - 32;
  }
  uint32_t word;
  std::memcpy(&word, panel + input / 8 * 64 + 4 * lane, 4);
  const int bit = int(input % 8 / 2 * 4 + input % 2 * 16);
  return int32_t(word << (28 - bit)) >> 28;
}

}  // namespace

void multiply_scaled(const Product& product, const Scaled& weight, int64_t num_threads) {
  const int64_t kind = weight.kind, group = weight.group, inputs = weight.inputs;
  if (kind == FP8) {
    std::vector<Fp8::X> buffer;
    const Fp8::X* rows =
        as_inputs<Fp8>(data<bf16>(product.x), product.rows, inputs, product.rows > 1, buffer);
    const int64_t block = std::min(group, inputs);
    return multiply<Fp8>(product, weight, rows, nullptr, {block, block, 0}, num_threads);
  }
  auto* multiply_kind = kind == INT8   ? multiply<Int8>
                        : kind == INT4 ? multiply<Int4>
                                       : multiply<Fp4>;
  const int64_t block = std::min({group, MOST, inputs});
  Sizes sizes{block, block, 15};
#if defined(__AVX2__) && !defined(__AVX512BW__)
  if (kind == INT6) multiply_kind = multiply<Int6>;
  const Scales& scales = weight.scales;
  const bool is_half = scales.entries.dtype.code == kDLFloat && scales.entries.dtype.bits == 16;
  const auto folds = [&](int64_t many) {  // whether a block may have so many inputs
    return scales.factors && is_half && bool(scales.zeros) == bool(scales.steps) && inputs % many == 0 &&
           (group << scales.entries.shift) % many == 0 && group < many;
  };
  const bool are_halves = is_half && group == 32 && inputs % 32 == 0 && !scales.factors && !scales.zeros;
  if (product.rows == 1 && kind == INT8 && are_halves) {
    const IntRows ints(data<bf16>(product.x), 1, inputs, sizes, scales.has_offset(), num_threads);
    return multiply_bytes(product, weight, ints, num_threads);
  }
  if (product.rows == 1 && (kind == INT4 || kind == INT6)) {
    const bool folded = folds(MOST), is_even = group >= inputs || (group & (group - 1)) == 0;
    if (folded) sizes = {MOST, group, 15};
    auto* row = kind == INT6 && inputs % 16 == 0
                    ? (folded ? multiply_row<Int6, 16, FOLDED> : multiply_row<Int6, 16, OTHER>)
                : group == 16 ? multiply_row<Int4, 16, FOLDED>
                : kind == INT4 && inputs % 32 == 0 && sizes.block % 32 == 0
                    ? (folded       ? multiply_row<Int4, 32, FOLDED>
                       : are_halves ? multiply_row<Int4, 32, HALVES>
                                    : multiply_row<Int4, 32, OTHER>)
                    : nullptr;
    if (row && is_even && (folded || (!scales.factors && group != 16))) {
      const IntRows ints(data<bf16>(product.x), 1, inputs, sizes, scales.has_offset(), num_threads);
      return row(product, weight, ints, sizes, num_threads);
    }
    sizes = {block, block, 15};
  }
  // Numbers times factors are at most 504 and 4,096: sums of 128 and of 32 inputs fit an int32. Few rows
  // by int8 are slower with factors in the sums.
  const int64_t many = kind == INT4 ? MOST : 32;
  if (folds(many) && (kind == INT4 || product.rows > (kind == INT8 ? Int8::FEW : Int6::FEW))) {
    multiply_kind = kind == INT8   ? multiply<Folded<Int8>>
                    : kind == INT4 ? multiply<Folded<Int4>>
                                   : multiply<Folded<Int6>>;
    sizes = {many, group, kind == INT4 ? 15 : 14};
  }
#else
  CHECK(kind != INT6, "linear: numbers of 6 bits are for AVX2");
#endif
  const IntRows ints(data<bf16>(product.x), product.rows, inputs, sizes, weight.scales.has_offset(), num_threads);
  multiply_kind(product, weight, ints.numbers.data(), &ints, sizes, num_threads);
}

// out = x @ weight.T + bias, then the gate, as packed_linear. numbers: bytes of the panels of kind
// `kind` (numbers.h). factors, zeros: int8 and uint8 [O / 16, groups, 16]. scales, steps: of the same
// shape or with an entry for several groups, float or exponents. The number `middle` is 0.
void numbers_linear(TensorView x, TensorView numbers, int64_t kind, int64_t group,
                    TensorView scales, optional<TensorView> factors, optional<TensorView> zeros,
                    optional<TensorView> steps, int64_t middle, optional<TensorView> bias,
                    int64_t gate, TensorView out, int64_t num_threads) {
  const int64_t inputs = x.size(1), outputs = out.size(1) * (gate ? 2 : 1);
  const Product product(x, outputs, inputs, bias, gate, out);
  const Scaled weight(numbers, kind, group, scales, factors, zeros, steps, middle, outputs, inputs);
  multiply_scaled(product, weight, num_threads);
}

// Rows `ids`, int32 or int64, of a packed matrix of integers [outputs, D], as bfloat16 [T, D].
void numbers_rows(TensorView ids, TensorView numbers, int64_t kind, int64_t group,
                  TensorView scales, optional<TensorView> factors, optional<TensorView> zeros,
                  optional<TensorView> steps, int64_t middle, int64_t outputs, TensorView out,
                  int64_t num_threads) {
  const int64_t inputs = out.size(1);
  CHECK(is_packed(ids) && is_packed(out) && out.size(0) == ids.numel() &&
            out.dtype().code == kDLBfloat && kind != FP4 && kind != FP8,
        "embed: ids [T], integers [V, D] and out [T, D], packed");
  const bool is_wide = ids.dtype().bits == 64;
  const Scaled weight(numbers, kind, group, scales, factors, zeros, steps, middle, outputs, inputs);
  each_item(ids.numel(), ids.numel() > 8 ? num_threads : 1, [&](int64_t t) {
    const int64_t id = is_wide ? data<int64_t>(ids)[t] : data<int32_t>(ids)[t];
    const int64_t panel = id / PANEL, first = id % PANEL / W * W, lane = id % PANEL;
    const uint8_t* from = weight.numbers + panel * panel_bytes(kind, inputs);
    bf16* to = data<bf16>(out) + t * inputs;
    for (int64_t i = 0, n; i < inputs; i += n) {
      n = std::min({int64_t(W), group - i % group, inputs - i});
      const VF scales = weight.scales.scale(panel, i / group, first);
      VF v = {}, offset = {};
      for (int l = 0; l < n; l++) v[l] = float(number(from, kind, lane, i + l));
      if (weight.scales.has_offset())
        offset = weight.scales.offset(panel, i / group, first, scales);
      v = v * scales[lane - first] - offset[lane - first];
      n == W ? store(to + i, v) : store_first(to + i, v, int(n));
    }
  });
}

EXPORT(numbers_linear)
EXPORT(numbers_rows)
