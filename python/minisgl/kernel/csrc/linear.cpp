// Linear layers of packed weights, with the norm before them and the gated activation behind them.
//
// torch's bfloat16 products reach half of the memory's rate at one row and less at more, and keep a
// primitive for each number of rows. Here each weight is read once, by the layout in panels.h.
//
// A weight is packed in its place: a panel has the bytes of its 16 rows. What is left of the rows,
// fewer than 16, stays as it was.
#include "panels.h"

namespace {

enum Gate { NONE, SILU, GELU };  // the numbers that Python passes

// Rows of a block: threads share the work in items of two panels and one block, so that the rows
// of an item stay in the second cache.
constexpr int BLOCK = 96;

template <class T>
INLINE float dot(const T* w, const T* x, int64_t n) {
  VF total = {};
  each(w, int(n), [&](VF v, int i) {
    total += v * (i + W <= n ? load(x + i) : load_first(x + i, int(n) - i));
  });
  return sum(total);
}

template <class T>
struct Product {
  const TensorView &x, &weight, &out;
  const T* bias;
  Gate gate;
  int64_t rows, inputs, outputs;  // outputs: rows of the weight
  Product(const TensorView& x, const TensorView& weight,
          const tvm::ffi::Optional<TensorView>& bias, int64_t gate, const TensorView& out)
      : x(x), weight(weight), out(out), bias(bias ? data<T>(*bias) : nullptr), gate(Gate(gate)),
        rows(out.size(0)), inputs(weight.size(1)), outputs(weight.size(0)) {
    CHECK(x.ndim() == 2 && out.ndim() == 2 && weight.ndim() == 2 && x.IsContiguous() &&
              out.IsContiguous() && weight.IsContiguous(),
          "linear: x, weight and out must be matrices, packed");
    CHECK(x.dtype() == out.dtype() && (!bias || (*bias).dtype() == x.dtype()),
          "linear: x, bias and out must share a dtype");
    CHECK(x.size(0) == rows && x.size(1) == inputs && inputs % 2 == 0 &&
              out.size(1) * (gate ? 2 : 1) == outputs && (!bias || (*bias).numel() == outputs),
          "linear: x [" << x.size(0) << ", " << x.size(1) << "], weight [" << outputs << ", "
                        << inputs << "] and out [" << rows << ", " << out.size(1)
                        << "] do not fit");
    CHECK(gate == NONE || outputs % (2 * PANEL) == 0, "linear: a gate of whole panels");
  }

  // Sums of two panels and M rows, from row m on, to memory. first: output of each panel.
  template <int M>
  INLINE void store_tile(VF (&sums)[2][M][NV], int64_t m, const int64_t (&first)[2]) const {
    for (int p = 0; p < 2; p++)
      for (int v = 0; bias && v < NV; v++)
        for (int i = 0; i < M; i++) sums[p][i][v] += load(bias + first[p] + v * W);
    T* to = data<T>(out) + m * out.size(1) + first[0];
    for (int i = 0; i < M; i++, to += out.size(1))
      for (int v = 0; v < NV; v++) {
        if (gate) {
          const VF a = round_to<T>(sums[0][i][v]), b = round_to<T>(sums[1][i][v]);
          store(to + v * W, round_to<T>(gate == SILU ? silu_of(a) : gelu_tanh(a)) * b);
        } else {
          store(to + v * W, sums[0][i][v]);
          if (first[1] != first[0]) store(to + PANEL + v * W, sums[1][i][v]);
        }
      }
  }

  // tile(first, m, rows): the sums of panels from outputs `first` on, into store_tile.
  template <class F, class G>
  void run(int64_t num_threads, F tile, G tail) const {
    const int64_t panels = outputs / PANEL, pairs = gate ? panels / 2 : (panels + 1) / 2;
    const int64_t blocks = (rows + BLOCK - 1) / BLOCK;
    if (outputs * inputs * rows < 65536) num_threads = 1;
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1) schedule(dynamic)
    for (int64_t item = 0; item < pairs * blocks; item++) {
      const int64_t pair = item / blocks, begin = item % blocks * BLOCK;
      const int64_t one = gate ? pair : 2 * pair;
      const int64_t other = gate ? pair + pairs : std::min(one + 1, panels - 1);
      const int64_t first[2] = {one * PANEL, other * PANEL};
      each_tile(int(begin), int(std::min(begin + BLOCK, rows)),
                [&](auto count, int m) { tile(count, m, first); });
    }
    for (int64_t o = panels * PANEL; o < outputs; o++)
      for (int64_t m = 0; m < rows; m++)
        data<T>(out)[m * out.size(1) + o] = tail(o, m);
  }
};

// Rows as the kind K wants them: as they are, or converted into `buffer`.
template <class K, class T>
const typename K::X* converted(const T* x, int64_t count, std::vector<float>& buffer) {
  if constexpr (std::is_same_v<typename K::X, T>) {
    return x;
  } else {
    buffer.resize(count + W);
    each(x, int(count), [&](VF v, int i) { store_until(buffer.data(), i, int(count), v); });
    return buffer.data();
  }
}

void multiply_bf16(const TensorView& x, const TensorView& weight,
                   const tvm::ffi::Optional<TensorView>& bias, int64_t gate, const TensorView& out,
                   int64_t num_threads) {
  const Product<bf16> product(x, weight, bias, gate, out);
  const int64_t inputs = product.inputs;
  std::vector<float> buffer;
  const bf16* rows = data<bf16>(x);
  const Bf16::X* from = converted<Bf16>(rows, product.rows * inputs, buffer);
  const uint8_t* packed = data<uint8_t>(weight);
  product.run(
      num_threads,
      [&](auto count, int m, const int64_t(&first)[2]) {
        constexpr int M = decltype(count)::value;
        VF sums[2][M][NV] = {};
        const uint8_t* const panels[2] = {packed + first[0] * inputs * 2,
                                          packed + first[1] * inputs * 2};
        add_steps<Bf16, M>(panels, from + m * inputs, inputs, inputs / 2, sums);
        product.store_tile(sums, m, first);
      },
      [&](int64_t o, int64_t m) {
        float y = dot(data<bf16>(weight) + o * inputs, rows + m * inputs, inputs);
        if (product.bias) y += load_first(product.bias + o, 1)[0];
        bf16 rounded;
        store_first(&rounded, splat(y), 1);
        return rounded;
      });
}

// f(a panel's 16 rows, the panel), in threads: one is [16, I], the other [I / 2, 16, 2].
template <class F>
void each_panel(const TensorView& weight, int64_t num_threads, F f) {
  CHECK(weight.ndim() == 2 && weight.IsContiguous() && weight.dtype().bits == 16 &&
            weight.size(1) % 2 == 0,
        "packing: a matrix of 16-bit numbers and an even number of inputs");
  const int64_t inputs = weight.size(1);
  uint32_t* all = data<uint32_t>(weight);
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1)
  for (int64_t p = 0; p < weight.size(0) / PANEL; p++) f(all + p * PANEL * inputs / 2, inputs / 2);
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
  CHECK(ids.IsContiguous() && out.IsContiguous() && weight.IsContiguous() &&
            weight.dtype().bits == 16 && out.dtype() == weight.dtype() &&
            out.numel() == ids.numel() * inputs,
        "embed: ids [T], weight [V, D] and out [T, D], packed");
  const bool is_wide = ids.dtype().bits == 64;
#pragma omp parallel for num_threads(num_threads) if (ids.numel() > 8 && num_threads > 1)
  for (int64_t t = 0; t < ids.numel(); t++) {
    const int64_t id = is_wide ? data<int64_t>(ids)[t] : data<int32_t>(ids)[t];
    uint32_t* to = data<uint32_t>(out) + t * steps;
    const uint32_t* all = data<uint32_t>(weight);
    if (id >= whole) {
      std::memcpy(to, all + id * steps, steps * 4);
      continue;
    }
    const uint32_t* from = all + id / PANEL * PANEL * steps + id % PANEL;
    for (int64_t s = 0; s < steps; s++) to[s] = from[s * PANEL];
  }
}

// out = x @ weight.T + bias, then the gate (0: none, 1: SiLU, 2: GELU): x [M, I], weight [O, I]
// packed, out [M, O] or [M, O / 2]. All bfloat16.
void packed_linear(TensorView x, TensorView weight, tvm::ffi::Optional<TensorView> bias,
                   int64_t gate, TensorView out, int64_t num_threads) {
  multiply_bf16(x, weight, bias, gate, out, num_threads);
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(pack, pack);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(unpack, unpack);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(packed_rows, packed_rows);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(packed_linear, packed_linear);
