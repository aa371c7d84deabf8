// A linear layer's product in bfloat16: who computes which tile, and what becomes of its sums.
#pragma once

#include "panels.h"

enum Gate { NONE, SILU, GELU };  // the numbers that Python passes

// Rows of a block: threads share the work in items of two panels and one block, so that the rows
// of an item stay in the second cache.
constexpr int BLOCK = 96;

// The sums of two panels: [2, M, NV], with `rows` rows from `row` on and outputs from first[p] on.
struct Tile {
  const VF* sums;
  int M, rows;
  int64_t row;
  int64_t first[2];
};

// out = sums + bias, or of two panels activation(sums + bias) * (sums + bias).
inline void store_tile(const Tile& tile, const bf16* bias, Gate gate, bf16* out, int64_t stride) {
  for (int i = 0; i < tile.rows; i++)
    for (int v = 0; v < NV; v++) {
      VF y[2];
      for (int p = 0; p < 2; p++) {
        y[p] = tile.sums[(p * tile.M + i) * NV + v];
        if (bias) y[p] += load(bias + tile.first[p] + v * W);
      }
      bf16* to = out + (tile.row + i) * stride + tile.first[0] + v * W;
      if (gate) {
        const VF a = round_to<bf16>(y[0]), b = round_to<bf16>(y[1]);
        store(to, round_to<bf16>(gate == SILU ? silu_of(a) : gelu_tanh(a)) * b);
      } else {
        store(to, y[0]);
        if (tile.first[1] != tile.first[0]) store(to + PANEL, y[1]);
      }
    }
}

// outputs: rows of the weight, of which a gate makes half as many columns.
struct Product {
  const TensorView &x, &out;
  const tvm::ffi::Optional<TensorView>& bias;
  Gate gate;
  int64_t rows, inputs, outputs;
  Product(const TensorView& x, int64_t outputs, int64_t inputs,
          const tvm::ffi::Optional<TensorView>& bias, int64_t gate, const TensorView& out)
      : x(x), out(out), bias(bias), gate(Gate(gate)), rows(out.size(0)), inputs(inputs),
        outputs(outputs) {
    CHECK(x.ndim() == 2 && out.ndim() == 2 && is_packed(x) && is_packed(out),
          "linear: x and out must be matrices, packed");
    CHECK(x.dtype().code == kDLBfloat && x.dtype() == out.dtype() &&
              (!bias || (*bias).dtype() == x.dtype()),
          "linear: x, bias and out must be bfloat16");
    CHECK(x.size(0) == rows && x.size(1) == inputs && inputs % 2 == 0 &&
              out.size(1) * (gate ? 2 : 1) == outputs && (!bias || (*bias).numel() == outputs),
          "linear: x [" << x.size(0) << ", " << x.size(1) << "], weight [" << outputs << ", "
                        << inputs << "] and out [" << rows << ", " << out.size(1)
                        << "] do not fit");
    CHECK(gate == NONE || outputs % (2 * PANEL) == 0, "linear: a gate of whole panels");
  }

  // tile(M, m, first, sums): the sums [2, M, NV] of rows from m on, of outputs `first` on. PADDED:
  // see each_tile; then `tile` may read PADDING rows more than there are.
  template <bool PADDED, class F>
  void run(int64_t num_threads, F tile) const {
    const int64_t panels = outputs / PANEL, pairs = gate ? panels / 2 : (panels + 1) / 2;
    const int64_t blocks = (rows + BLOCK - 1) / BLOCK;
    if (outputs * inputs * rows < 65536) num_threads = 1;
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1) schedule(dynamic)
    for (int64_t item = 0; item < pairs * blocks; item++) {
      const int64_t pair = item / blocks, begin = item % blocks * BLOCK;
      const int64_t one = gate ? pair : 2 * pair;
      const int64_t other = gate ? pair + pairs : std::min(one + 1, panels - 1);
      const int64_t first[2] = {one * PANEL, other * PANEL};
      each_tile<PADDED>(int(begin), int(std::min(begin + BLOCK, rows)),
                      [&](auto count, int m, int rows) {
                        constexpr int M = decltype(count)::value;
                        VF sums[2][M][NV] = {};
                        tile(count, m, first, sums);
                        store({&sums[0][0][0], M, rows, m, {first[0], first[1]}});
                      });
    }
  }

 private:
  void store(const Tile& tile) const {
    store_tile(tile, bias ? data<bf16>(*bias) : nullptr, gate, data<bf16>(out), out.size(1));
  }
};

constexpr int PADDING = 3;

// bfloat16 rows as the kind K takes them, in `buffer` unless they are that; with PADDING rows more
// where `room` is needed.
template <class K>
const typename K::X* as_inputs(const bf16* x, int64_t rows, int64_t inputs, bool room,
                               std::vector<typename K::X>& buffer) {
  const int64_t count = rows * inputs;
  if (std::is_same_v<typename K::X, bf16> && !room) return (const typename K::X*)x;
  buffer.resize(count + (room ? PADDING * inputs : 0));
  each(x, int(count), [&](VF v, int i) { store_until(buffer.data(), i, int(count), v); });
  return buffer.data();
}
