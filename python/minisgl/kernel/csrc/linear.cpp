// Linear layers of packed weights, with the norm before them and the gated activation behind them.
//
// torch's bfloat16 products reach half of the memory's rate at one row and less at more, and keep a
// primitive for each number of rows. Here each weight is read once, by the layout in panels.h.
//
// A weight is packed in its place: a panel has the bytes of its 16 rows. What is left of the rows,
// fewer than 16, stays as it was.
#include "product.h"

namespace {

template <class T>
INLINE float dot(const T* w, const T* x, int64_t n) {
  VF total = {};
  each(w, int(n), [&](VF v, int i) {
    total += v * (i + W <= n ? load(x + i) : load_first(x + i, int(n) - i));
  });
  return sum(total);
}

// f(a panel's 16 rows, the panel), in threads: one is [16, I], the other [I / 2, 16, 2].
template <class F>
void each_panel(const TensorView& weight, int64_t num_threads, F f) {
  CHECK(weight.ndim() == 2 && is_packed(weight) && weight.dtype().bits == 16 &&
            weight.size(1) % 2 == 0,
        "packing: a matrix of 16-bit numbers and an even number of inputs");
  const int64_t inputs = weight.size(1);
  uint32_t* all = data<uint32_t>(weight);
  each_item(weight.size(0) / PANEL, num_threads,
            [&](int64_t p) { f(all + p * PANEL * inputs / 2, inputs / 2); });
}

}  // namespace

// Packs a bfloat16 weight [O, I] in its place.
void pack(TensorView weight, int64_t num_threads) {
  each_panel(weight, num_threads, [](uint32_t* panel, int64_t steps) {
    const std::vector<uint32_t> rows(panel, panel + PANEL * steps);
    for (int64_t s = 0; s < steps; s++)
      for (int64_t o = 0; o < PANEL; o++) panel[s * PANEL + o] = rows[o * steps + s];
  });
}

// The opposite of pack.
void unpack(TensorView weight, int64_t num_threads) {
  each_panel(weight, num_threads, [](uint32_t* panel, int64_t steps) {
    const std::vector<uint32_t> packed(panel, panel + PANEL * steps);
    for (int64_t o = 0; o < PANEL; o++)
      for (int64_t s = 0; s < steps; s++) panel[o * steps + s] = packed[s * PANEL + o];
  });
}

// Rows `ids`, int32 or int64, of a packed weight [O, I].
void packed_rows(TensorView ids, TensorView weight, TensorView out, int64_t num_threads) {
  const int64_t inputs = weight.size(1), steps = inputs / 2, whole = weight.size(0) / PANEL * PANEL;
  CHECK(is_packed(ids) && is_packed(out) && is_packed(weight) &&
            weight.dtype().bits == 16 && out.dtype() == weight.dtype() &&
            out.numel() == ids.numel() * inputs,
        "embed: ids [T], weight [V, D] and out [T, D], packed");
  const bool is_wide = ids.dtype().bits == 64;
  each_item(ids.numel(), ids.numel() > 8 ? num_threads : 1, [&](int64_t t) {
    const int64_t id = is_wide ? data<int64_t>(ids)[t] : data<int32_t>(ids)[t];
    uint32_t* to = data<uint32_t>(out) + t * steps;
    const uint32_t* all = data<uint32_t>(weight);
    if (id >= whole) {
      std::memcpy(to, all + id * steps, steps * 4);
      return;
    }
    const uint32_t* from = all + id / PANEL * PANEL * steps + id % PANEL;
    for (int64_t s = 0; s < steps; s++) to[s] = from[s * PANEL];
  });
}

// out = x @ weight.T + bias, then the gate (0: none, 1: SiLU, 2: GELU): x [M, I], weight [O, I]
// packed, out [M, O] or [M, O / 2]. All bfloat16; without a gate, out may be float32.
void packed_linear(TensorView x, TensorView weight, optional<TensorView> bias,
                   int64_t gate, TensorView out, int64_t num_threads) {
  CHECK(weight.ndim() == 2 && is_packed(weight) && weight.dtype() == x.dtype() &&
            x.dtype().code == kDLBfloat,
        "linear: the weight must be a matrix, packed, of the dtype of x");
  const Product product(x, weight.size(0), weight.size(1), bias, gate, out);
  const int64_t inputs = product.inputs;
  std::vector<Bf16::X> buffer;
  const bf16* rows = data<bf16>(x);
  const Bf16::X* from = as_inputs<Bf16>(rows, product.rows, inputs, false, buffer);
  product.run<Bf16, false>(
      data<uint8_t>(weight), from, inputs, num_threads,
      [](const int64_t (&)[2]) {
        return [](int, int64_t, int, auto count, const VF(*sums)[NV], VF(*totals)[NV]) {
          std::memcpy(totals, sums, count * sizeof(*sums));
        };
      });
  for (int64_t o = product.outputs / PANEL * PANEL; o < product.outputs; o++)
    for (int64_t m = 0; m < product.rows; m++) {
      float y = dot(data<bf16>(weight) + o * inputs, rows + m * inputs, inputs);
      if (bias) y += load_first(data<bf16>(*bias) + o, 1)[0];
      const int64_t at = m * out.stride(0) + o;
      if (is_float32(out)) data<float>(out)[at] = y;
      else store_first(data<bf16>(out) + at, splat(y), 1);
    }
}

EXPORT(pack)
EXPORT(unpack)
EXPORT(packed_rows)
EXPORT(packed_linear)
