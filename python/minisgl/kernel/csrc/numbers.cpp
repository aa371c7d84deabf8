// Linear layers whose weights are integers or floats of 4 or 8 bits with scales.
//
// Integers multiply integers: a row of inputs is rounded to int16 in blocks of at most 128, each
// with a scale that is a power of two, so that the largest of a block has 14 or 15 bits. Inputs of at
// least 2**-7 of the largest stay exact, as bfloat16 has 8 bits. The sums of a block are exact: 128
// times 2**15 * 2**7 fits an int32. Fp8 weights multiply the bfloat16 inputs.
#include "numbers.h"
#include "product.h"

namespace {

constexpr int64_t MOST = 128;  // inputs of a block
enum Kind { INT8, INT4, FP4, FP8 };  // as minisgl/kernel/panels.py passes them

// The scales of a weight, [panels, groups, 16].
struct Scales {
  const TensorView& tensor;
  int64_t groups;
  INLINE void load(int64_t panel, int64_t group, VF (&scales)[NV]) const {
    const int64_t at = (panel * groups + group) * PANEL;
    const DLDataType dtype = tensor.dtype();
    for (int v = 0; v < NV; v++) {
      const int64_t i = at + v * W;
      if (dtype.bits == 32) scales[v] = ::load(data<float>(tensor) + i);
      else if (dtype.code == kDLBfloat) scales[v] = ::load(data<bf16>(tensor) + i);
      else if (dtype.bits == 16) scales[v] = ::load(data<f16>(tensor) + i);
      else  // exponents of MXFP4, whose numbers are twice their values
        scales[v] = bit_cast<VF>(bytes(data<uint8_t>(tensor) + i) << 23) * 0.5f;
    }
  }
  static INLINE VU bytes(const uint8_t* p) {
    typedef uint8_t VB __attribute__((vector_size(W)));
    VB v;
    std::memcpy(&v, p, sizeof(v));
    return __builtin_convertvector(v, VU);
  }
};

// Rows of inputs as int16, with the scale and the sum of each block; PADDING more rows are zeros.
struct IntRows {
  std::vector<int16_t> numbers;
  std::vector<float> scales, sums;
  IntRows(const bf16* x, int64_t rows, int64_t inputs, int64_t block, int64_t num_threads)
      : numbers((rows + PADDING) * inputs), scales((rows + PADDING) * ((inputs + block - 1) / block)),
        sums(scales.size()) {
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
      scales[i] = scale + sum(finite);  // NaN where an input is infinite or NaN
      sums[i] = sum(__builtin_convertvector(total, VF)) * scale;
    });
  }
};

struct Weight {
  const uint8_t* numbers;
  Scales scales;
  const uint8_t* zeros;  // or null
  int64_t group;         // inputs of a scale
  int middle;
};

// Multiplies and stores. rows: inputs of type K::X. ints: the scales and sums of their blocks if
// they are integers, else null. block: inputs of a block.
template <class K>
void multiply(const Product& product, const Weight& weight, const typename K::X* rows,
              const IntRows* ints, int64_t block, int64_t num_threads) {
  constexpr bool IS_INT = std::is_same_v<typename K::X, int16_t>;
  const int64_t blocks = (product.inputs + block - 1) / block;
  const auto finish = [&](int64_t panel, int64_t b, int m, int count,
                          const typename K::Sum(*sums)[NV], VF(*totals)[NV]) {
    const int64_t group = b * block / weight.group;
    VF scales[NV];
    weight.scales.load(panel, group, scales);
    for (int i = 0; i < count; i++)
      for (int v = 0; v < NV; v++) {
        if constexpr (IS_INT) {
          const VF sum = __builtin_convertvector(sums[i][v], VF);
          totals[i][v] += sum * (scales[v] * ints->scales[(m + i) * blocks + b]);
        } else {
          totals[i][v] += sums[i][v] * scales[v];
        }
      }
    if (IS_INT && weight.zeros)
      for (int v = 0; v < NV; v++) {
        const int64_t at = (panel * weight.scales.groups + group) * PANEL + v * W;
        const VI zero = (VI)Scales::bytes(weight.zeros + at) - weight.middle;
        const VF offset = __builtin_convertvector(zero, VF) * scales[v];
        for (int i = 0; i < count; i++) totals[i][v] -= offset * ints->sums[(m + i) * blocks + b];
      }
  };
  product.run<K, true>(weight.numbers, rows, block, num_threads, finish);
}

}  // namespace

// out = x @ weight.T + bias, then the gate, as packed_linear. numbers: panels of kind `kind`
// (numbers.h). scales [O / 16, groups, 16]: floats, or exponents + 127 as uint8. zeros, of the same
// shape: uint8, whose offset is zero - middle.
void numbers_linear(TensorView x, TensorView numbers, int64_t kind, int64_t group,
                    TensorView scales, tvm::ffi::Optional<TensorView> zeros, int64_t middle,
                    tvm::ffi::Optional<TensorView> bias, int64_t gate, TensorView out,
                    int64_t num_threads) {
  const int64_t inputs = x.size(1), outputs = out.size(1) * (gate ? 2 : 1);
  const int64_t bits = kind == INT4 || kind == FP4 ? 4 : 8;
  CHECK(numbers.IsContiguous() && scales.IsContiguous() && outputs % PANEL == 0 &&
            inputs % 8 == 0 && numbers.numel() * 8 == outputs * inputs * bits && group % 8 == 0 &&
            (kind == FP8 || group <= MOST || group % MOST == 0 || group >= inputs),
        "linear: " << numbers.numel() << " bytes of " << bits << " bits for [" << outputs << ", "
                   << inputs << "] in groups of " << group);
  const Scales all{scales, (inputs + group - 1) / group};
  CHECK(scales.numel() == outputs * all.groups && (!zeros || (*zeros).numel() == scales.numel()),
        "linear: " << scales.numel() << " scales for " << outputs << " outputs");
  const Weight weight{data<uint8_t>(numbers), all, zeros ? data<uint8_t>(*zeros) : nullptr, group,
                      int(middle)};
  const Product product(x, outputs, inputs, bias, gate, out);
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
}

// Rows `ids`, int32 or int64, of a packed int8 matrix with a scale [O] for each row, as bfloat16.
void numbers_rows(TensorView ids, TensorView numbers, TensorView scales, TensorView out,
                  int64_t num_threads) {
  const int64_t inputs = out.size(1), steps = inputs / 2;
  CHECK(ids.IsContiguous() && numbers.IsContiguous() && scales.IsContiguous() && is_packed(out) &&
            out.size(0) == ids.numel() && out.dtype().code == kDLBfloat &&
            scales.dtype().bits == 32 && inputs % 2 == 0 && scales.numel() % PANEL == 0 &&
            numbers.numel() == scales.numel() * inputs,
        "embed: ids [T], int8 numbers [V, D], scales [V] and out [T, D], packed");
  const bool is_wide = ids.dtype().bits == 64;
  each_item(ids.numel(), ids.numel() > 8 ? num_threads : 1, [&](int64_t t) {
    const int64_t id = is_wide ? data<int64_t>(ids)[t] : data<int32_t>(ids)[t];
    const int8_t* from = data<int8_t>(numbers) + (id / PANEL * steps * PANEL + id % PANEL) * 2;
    bf16* to = data<bf16>(out) + t * inputs;
    for (int64_t i = 0; i < inputs; i += W) {
      VF v = {};
      for (int l = 0; l < W && i + l < inputs; l++) {
        const int64_t at = i + l;
        v[l] = from[at / 2 * 2 * PANEL + at % 2];
      }
      store_until(to, int(i), int(inputs), v * data<float>(scales)[id]);
    }
  });
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(numbers_linear, numbers_linear);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(numbers_rows, numbers_rows);
