// A matrix of few bits in panels (numbers.h), with its scales and offsets; or a stack of them.
//
// value = scale * number - offset. A scale is a tensor's entry, of one group or of several; in
// the second case it is times the group's factor. The offset is the zero point times the scale, or a
// number of the group (or 1) times an entry of `steps`, which has the shape of the scales.
#pragma once

#include <optional>

#include "numbers.h"
#include "tensor.h"

constexpr int64_t MOST = 128;  // inputs of a block
enum Kind { INT8, INT4, FP4, FP8, INT6 };  // as minisgl_zoo/weights/panels.py passes them

inline int64_t panel_bytes(int64_t kind, int64_t inputs) {
  return inputs * PANEL / 8 * (kind == INT4 || kind == FP4 ? 4 : kind == INT6 ? 6 : 8);
}

// Rows of numbers [O / 16, entries, 16] for the groups of all panels.
struct Entries {
  const uint8_t* bytes;
  DLDataType dtype;
  int64_t groups, count;
  int shift;  // an entry is of 2**shift groups
  template <class T>
  INLINE const T* as() const {
    return reinterpret_cast<const T*>(bytes);
  }
  INLINE int64_t at(int64_t panel, int64_t group) const {
    return (panel * count + (group >> shift)) * PANEL;
  }
  // Lanes from `lane` on.
  INLINE VF load(int64_t panel, int64_t group, int64_t lane) const {
    const int64_t i = at(panel, group) + lane;
    if (dtype.bits == 32) return ::load(as<float>() + i);
    if (dtype.code == kDLBfloat) return ::load(as<bf16>() + i);
    if (dtype.bits == 16) return ::load(as<f16>() + i);
    // exponents of MXFP4, whose numbers are twice their values
    return bit_cast<VF>(widen(bytes + i) << 23) * 0.5f;
  }
  Entries from(int64_t panel) const {
    return {bytes + at(panel, 0) * dtype.bits / 8, dtype, groups, count, shift};
  }
};

// Scales and offsets of a panel's groups. factors, zeros: or null.
struct Scales {
  Entries entries;
  const int8_t* factors;
  const uint8_t* zeros;
  optional<Entries> steps;
  int middle;
  bool has_offset() const { return zeros || steps; }
  INLINE VF scale(int64_t panel, int64_t group, int64_t lane) const {
    return scale_of(entries.load(panel, group, lane), panel, group, lane);
  }
  INLINE VF offset(int64_t panel, int64_t group, int64_t lane, VF scale) const {
    return offset_of(steps ? steps->load(panel, group, lane) : VF{}, panel, group, lane, scale);
  }
  // Those of a group with an entry and a step that were loaded before.
  INLINE VF scale_of(VF scale, int64_t panel, int64_t group, int64_t lane) const {
    if (!factors) return scale;
    const int8_t* const p = factors + (panel * entries.groups + group) * PANEL + lane;
    return scale * __builtin_convertvector(widen(p), VF);
  }
  INLINE VF offset_of(VF step, int64_t panel, int64_t group, int64_t lane, VF scale) const {
    VF zero = splat(1);
    if (zeros) {
      const uint8_t* p = zeros + (panel * entries.groups + group) * PANEL + lane;
      zero = __builtin_convertvector((VI)widen(p), VF);
    }
    if (steps) return zero * step - float(middle) * scale;
    return (zero - float(middle)) * scale;
  }
};

struct Scaled {
  int64_t kind, outputs, inputs;  // of one matrix
  const uint8_t* numbers;
  Scales scales;
  int64_t group;  // inputs of a scale

  // count: matrices of a stack. The other arguments are those of numbers_linear.
  Scaled(const TensorView& numbers, int64_t kind, int64_t group, const TensorView& scales,
         const optional<TensorView>& factors, const optional<TensorView>& zeros,
         const optional<TensorView>& steps, int64_t middle, int64_t outputs, int64_t inputs,
         int64_t count = 1)
      : kind(kind), outputs(outputs), inputs(inputs), numbers(data<uint8_t>(numbers)), group(group) {
    const int64_t all = count * outputs;
    CHECK(is_packed(numbers) && is_packed(scales) && outputs % PANEL == 0 &&
              inputs % 8 == 0 && group % 8 == 0 &&
              numbers.numel() == all / PANEL * panel_bytes(kind, inputs) &&
              (kind == FP8 || group <= MOST || group % MOST == 0 || group >= inputs),
          "linear: " << numbers.numel() << " bytes of kind " << kind << " for [" << all << ", "
                     << inputs << "] in groups of " << group);
    const int64_t groups = (inputs + group - 1) / group, entries = scales.numel() / all;
    int shift = 0;
    while (entries > 0 && entries << shift < groups) shift++;
    CHECK(entries << shift == groups && scales.numel() == all * entries &&
              (factors || entries == groups) &&
              (!steps || (*steps).numel() == scales.numel()) &&
              (!factors || (*factors).numel() == all * groups) &&
              (!zeros || (*zeros).numel() == all * groups),
          "linear: " << scales.numel() << " scales for " << all << " outputs");
    const auto entries_of = [&](const TensorView& tensor) {
      return Entries{data<uint8_t>(tensor), tensor.dtype(), groups, entries, shift};
    };
    this->scales = {entries_of(scales), factors ? data<int8_t>(*factors) : nullptr,
                    zeros ? data<uint8_t>(*zeros) : nullptr, std::nullopt, int(middle)};
    if (steps) this->scales.steps = entries_of(*steps);
  }

  // Matrix `index` of a stack.
  Scaled operator[](int64_t index) const {
    const int64_t panel = index * outputs / PANEL, skipped = panel * scales.entries.groups * PANEL;
    Scaled matrix = *this;
    matrix.numbers += panel * panel_bytes(kind, inputs);
    matrix.scales.entries = scales.entries.from(panel);
    if (scales.factors) matrix.scales.factors += skipped;
    if (scales.zeros) matrix.scales.zeros += skipped;
    if (scales.steps) matrix.scales.steps = scales.steps->from(panel);
    return matrix;
  }
};

struct Product;

// Computes the product's output: x @ weight.T + bias, then the gate. Of a stack, its first matrix.
void multiply_scaled(const Product& product, const Scaled& weight, int64_t num_threads);
