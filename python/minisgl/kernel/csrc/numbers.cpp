// Linear layers whose weights are integers or floats of 4 or 8 bits with scales.
//
// Integers multiply integers: a row of inputs is rounded to int16 in blocks of at most 128, each
// with a scale that is a power of two, so that the largest of a block has 14 or 15 bits. What
// bfloat16 holds within 2**-7 of the largest stays exact. The sums of a block are exact: 128 times
// 2**15 * 2**7 fits an int32. Fp8 multiplies the inputs as they are.
//
// value = scale * number - offset. A scale is a tensor's entry, of one group or of several; in
// the second case it is times the group's factor. The offset is the zero point times the scale, or a
// number of the group (or 1) times an entry of `steps`, which has the shape of the scales.
#include "numbers.h"
#include "product.h"

namespace {

constexpr int64_t MOST = 128;  // inputs of a block
enum Kind { INT8, INT4, FP4, FP8 };  // as minisgl_zoo/weights/panels.py passes them

// Rows of numbers [O / 16, entries, 16] for the groups of all panels.
struct Entries {
  const TensorView& tensor;
  int64_t groups, count;
  int shift;  // an entry is of 2**shift groups
  INLINE int64_t at(int64_t panel, int64_t group) const {
    return (panel * count + (group >> shift)) * PANEL;
  }
  // Lanes from `lane` on.
  INLINE VF load(int64_t panel, int64_t group, int64_t lane) const {
    const int64_t i = at(panel, group) + lane;
    const DLDataType dtype = tensor.dtype();
    if (dtype.bits == 32) return ::load(data<float>(tensor) + i);
    if (dtype.code == kDLBfloat) return ::load(data<bf16>(tensor) + i);
    if (dtype.bits == 16) return ::load(data<f16>(tensor) + i);
    // exponents of MXFP4, whose numbers are twice their values
    return bit_cast<VF>(widen(data<uint8_t>(tensor) + i) << 23) * 0.5f;
  }
};

// Scales and offsets of a panel's groups. factors, zeros, steps: or null.
struct Scales {
  Entries entries;
  const int8_t* factors;
  const uint8_t* zeros;
  const Entries* steps;
  int middle;
  bool has_offset() const { return zeros || steps; }
  INLINE VF scale(int64_t panel, int64_t group, int64_t lane) const {
    const VF scale = entries.load(panel, group, lane);
    if (!factors) return scale;
    const int8_t* const p = factors + (panel * entries.groups + group) * PANEL + lane;
    return scale * __builtin_convertvector(widen(p), VF);
  }
  INLINE VF offset(int64_t panel, int64_t group, int64_t lane, VF scale) const {
    VF zero = splat(1);
    if (zeros) {
      const uint8_t* p = zeros + (panel * entries.groups + group) * PANEL + lane;
      zero = __builtin_convertvector((VI)widen(p), VF);
    }
    if (steps) return zero * steps->load(panel, group, lane) - float(middle) * scale;
    return (zero - float(middle)) * scale;
  }
};

// Rows of inputs as int16, with a scale and the sum of each block [blocks, rows], and PADDING rows.
struct IntRows {
  std::vector<int16_t> numbers;
  std::vector<float> scales, sums;
  int64_t stride;  // rows
  IntRows(const bf16* x, int64_t rows, int64_t inputs, int64_t block, int64_t num_threads)
      : numbers((rows + PADDING) * inputs), scales((rows + PADDING) * ((inputs + block - 1) / block)),
        sums(scales.size()), stride(rows + PADDING) {
    const int64_t blocks = (inputs + block - 1) / block;
    if (rows * inputs <= 32768) num_threads = 1;
    each_item(rows * blocks, num_threads, [&](int64_t i) {
      const int64_t at = i / blocks * inputs + i % blocks * block;
      const int n = int(std::min(block, inputs - i % blocks * block));
      VF largest = {}, finite = {};
      each(x + at, n, [&](VF v, int) {
        largest = max(v < 0.0f ? -v : v, largest), finite += v * 0.0f;
      });
      int exponent;
      std::frexp(max(largest), &exponent);  // below 2**exponent
      exponent = std::max(exponent, -100);
      const float scale = std::ldexp(1.0f, exponent - 15), inverse = std::ldexp(1.0f, 15 - exponent);
      VI total = {};
      each(x + at, n, [&](VF v, int j) {
        const VF shifted = min(v * inverse, splat(32767.0f)) + 0x1.8p23f;  // rounds
        const VI whole = bit_cast<VI>(shifted) - 0x4b400000;
        total += whole;
        store_until(numbers.data() + at, j, n, whole);
      });
      const int64_t to = i % blocks * stride + i / blocks;
      scales[to] = scale + sum(finite);  // NaN where an input is infinite or NaN
      sums[to] = sum(__builtin_convertvector(total, VF)) * scale;
    });
  }
};

struct Weight {
  const uint8_t* numbers;
  Scales scales;
  int64_t group;  // inputs of a scale
};

// The scales and offsets of a panel's blocks, of which `per` have one group, as floats.
void spread(const Scales& all, int64_t panel, int64_t blocks, int64_t per, float* scales,
            float* offsets) {
  const Scales source = all;  // a copy: what is written cannot change it
  for (int64_t b = 0, group = 0; b < blocks; group++) {
    VF scale[NV], offset[NV] = {};
    for (int v = 0; v < NV; v++) {
      scale[v] = source.scale(panel, group, v * W);
      if (offsets) offset[v] = source.offset(panel, group, v * W, scale[v]);
    }
    for (int64_t end = std::min(b + per, blocks); b < end; b++)
      for (int v = 0; v < NV; v++) {
        store(scales + b * PANEL + v * W, scale[v]);
        if (offsets) store(offsets + b * PANEL + v * W, offset[v]);
      }
  }
}

// rows: inputs as K takes them; ints: the scales and sums of their blocks, or null.
template <class K>
void multiply(const Product& product, const Weight& weight, const typename K::X* rows,
              const IntRows* ints, int64_t block, int64_t num_threads) {
  constexpr bool IS_INT = std::is_same_v<typename K::X, int16_t>;
  const int64_t blocks = (product.inputs + block - 1) / block;
  const int64_t per = std::min((weight.group + block - 1) / block, blocks);
  const bool has_offset = IS_INT && weight.scales.has_offset();
  const auto start = [&](const int64_t (&panels)[2]) {
    static thread_local std::vector<float> buffer;
    const int64_t size = blocks * PANEL;
    if (int64_t(buffer.size()) < 4 * size) buffer.resize(4 * size);
    float* const at = buffer.data();
    for (int p = 0; p < 2; p++)
      spread(weight.scales, panels[p], blocks, per, at + p * size,
             has_offset ? at + (2 + p) * size : nullptr);
    const float* const of_rows = IS_INT ? ints->scales.data() : nullptr;
    const float* const sums_of_rows = IS_INT ? ints->sums.data() : nullptr;
    const int64_t stride = IS_INT ? ints->stride : 0;
    return [=](int p, int64_t b, int m, int count, const typename K::Sum(*sums)[NV],
               VF(*totals)[NV]) __attribute__((always_inline)) {
      const float* const scales = at + p * size + b * PANEL;
      for (int v = 0; v < NV; v++) {
        const VF scale = load(scales + v * W);
        const VF offset = has_offset ? load(scales + 2 * size + v * W) : VF{};
        for (int i = 0; i < count; i++) {
          if constexpr (IS_INT) {
            const int64_t j = b * stride + m + i;
            totals[i][v] += __builtin_convertvector(sums[i][v], VF) * (scale * of_rows[j]);
            if (has_offset) totals[i][v] -= offset * sums_of_rows[j];
          } else {
            totals[i][v] += sums[i][v] * (scale * K::UNIT);
          }
        }
      }
    };
  };
  constexpr bool PADDED = TILE > 4;  // less to compile, where tiles have many rows
  product.run<K, PADDED>(weight.numbers, rows, block, num_threads, start);
}

// Input `input` of a panel's output `lane`, of integers.
inline int number(const uint8_t* panel, int64_t kind, int64_t lane, int64_t input) {
  if (kind == INT8) return int8_t(panel[input / 2 * 32 + 2 * lane + input % 2]);
  uint32_t word;
  std::memcpy(&word, panel + input / 8 * 64 + 4 * lane, 4);
  const int bit = int(input % 8 / 2 * 4 + input % 2 * 16);
  return int32_t(word << (28 - bit)) >> 28;
}

int64_t panel_bytes(int64_t kind, int64_t inputs) {
  return inputs * PANEL / (kind == INT4 || kind == FP4 ? 2 : 1);
}

using tvm::ffi::Optional;

// Calls f(weight) for the tensors of numbers_linear.
template <class F>
void with_weight(const TensorView& numbers, int64_t kind, int64_t group, const TensorView& scales,
                 const Optional<TensorView>& factors, const Optional<TensorView>& zeros,
                 const Optional<TensorView>& steps, int64_t middle, int64_t outputs,
                 int64_t inputs, F f) {
  CHECK(numbers.IsContiguous() && scales.IsContiguous() && outputs % PANEL == 0 &&
            inputs % 8 == 0 && group % 8 == 0 &&
            numbers.numel() == outputs / PANEL * panel_bytes(kind, inputs) &&
            (kind == FP8 || group <= MOST || group % MOST == 0 || group >= inputs),
        "linear: " << numbers.numel() << " bytes of kind " << kind << " for [" << outputs << ", "
                   << inputs << "] in groups of " << group);
  const int64_t groups = (inputs + group - 1) / group, entries = scales.numel() / outputs;
  int shift = 0;
  while (entries > 0 && entries << shift < groups) shift++;
  CHECK(entries << shift == groups && scales.numel() == outputs * entries &&
            (factors || entries == groups) &&
            (!steps || (*steps).numel() == scales.numel()) &&
            (!factors || (*factors).numel() == outputs * groups) &&
            (!zeros || (*zeros).numel() == outputs * groups),
        "linear: " << scales.numel() << " scales for " << outputs << " outputs");
  const Entries of_steps{steps ? *steps : scales, groups, entries, shift};
  f(Weight{data<uint8_t>(numbers),
           {{scales, groups, entries, shift}, factors ? data<int8_t>(*factors) : nullptr,
            zeros ? data<uint8_t>(*zeros) : nullptr, steps ? &of_steps : nullptr, int(middle)},
           group});
}

}  // namespace

// out = x @ weight.T + bias, then the gate, as packed_linear. numbers: bytes of the panels of kind
// `kind` (numbers.h). factors, zeros: int8 and uint8 [O / 16, groups, 16]. scales, steps: of the same
// shape or with an entry for several groups, float or exponents. The number `middle` is 0.
void numbers_linear(TensorView x, TensorView numbers, int64_t kind, int64_t group,
                    TensorView scales, Optional<TensorView> factors, Optional<TensorView> zeros,
                    Optional<TensorView> steps, int64_t middle, Optional<TensorView> bias,
                    int64_t gate, TensorView out, int64_t num_threads) {
  const int64_t inputs = x.size(1), outputs = out.size(1) * (gate ? 2 : 1);
  const Product product(x, outputs, inputs, bias, gate, out);
  with_weight(numbers, kind, group, scales, factors, zeros, steps, middle, outputs, inputs,
              [&](const Weight& weight) {
    if (kind == FP8) {
      std::vector<Fp8::X> buffer;
      const Fp8::X* rows =
          as_inputs<Fp8>(data<bf16>(x), product.rows, inputs, product.rows > 1, buffer);
      return multiply<Fp8>(product, weight, rows, nullptr, std::min(group, inputs), num_threads);
    }
    const int64_t block = std::min({group, MOST, inputs});
    const IntRows ints(data<bf16>(x), product.rows, inputs, block, num_threads);
    auto* multiply_kind = kind == INT8   ? multiply<Int8>
                          : kind == INT4 ? multiply<Int4>
                                         : multiply<Fp4>;
    multiply_kind(product, weight, ints.numbers.data(), &ints, block, num_threads);
  });
}

// Rows `ids`, int32 or int64, of a packed matrix of integers [outputs, D], as bfloat16 [T, D].
void numbers_rows(TensorView ids, TensorView numbers, int64_t kind, int64_t group,
                  TensorView scales, Optional<TensorView> factors, Optional<TensorView> zeros,
                  Optional<TensorView> steps, int64_t middle, int64_t outputs, TensorView out,
                  int64_t num_threads) {
  const int64_t inputs = out.size(1);
  CHECK(ids.IsContiguous() && is_packed(out) && out.size(0) == ids.numel() &&
            out.dtype().code == kDLBfloat && (kind == INT8 || kind == INT4),
        "embed: ids [T], integers [V, D] and out [T, D], packed");
  const bool is_wide = ids.dtype().bits == 64;
  with_weight(numbers, kind, group, scales, factors, zeros, steps, middle, outputs, inputs,
              [&](const Weight& weight) {
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
  });
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(numbers_linear, numbers_linear);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(numbers_rows, numbers_rows);
