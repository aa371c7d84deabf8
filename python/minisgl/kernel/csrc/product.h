// The GEMM of a linear layer with bfloat16 inputs: which thread computes which tile, and how the sums
// of a tile are stored, in bfloat16 or (logits) in float32.
#pragma once

#include "panels.h"
#include "threads.h"

enum Gate { NONE, SILU, GELU };  // as minisgl/kernel/cpu.py passes them

// Rows of a block: threads share the work in items of two panels and one block, so that the rows
// of an item stay in the second cache.
constexpr int BLOCK = 96;
constexpr int PADDING = 3;  // rows that may be read behind the last, see each_tile

// The sums of two panels: [2, M, NV], with `rows` rows from `row` on and outputs from first[p] on.
struct Tile {
  const VF* sums;
  int M, rows;
  int64_t row;
  int64_t first[2];
};

// out = sums + bias, or of two panels activation(sums + bias) * (sums + bias).
template <class T>
void store_tile(const Tile& tile, const bf16* bias, Gate gate, T* out, int64_t stride) {
  for (int i = 0; i < tile.rows; i++)
    for (int v = 0; v < NV; v++) {
      VF y[2];
      for (int p = 0; p < 2; p++) {
        y[p] = tile.sums[(p * tile.M + i) * NV + v];
        if (bias) y[p] += load(bias + tile.first[p] + v * W);
      }
      T* to = out + (tile.row + i) * stride + tile.first[0] + v * W;
      if (gate) {
        const VF a = round_to<bf16>(y[0]), b = round_to<bf16>(y[1]);
        store(to, round_to<bf16>(gate == SILU ? silu_of(a) : gelu_tanh(a)) * b);
      } else {
        store(to, y[0]);
        if (tile.first[1] != tile.first[0]) store(to + PANEL, y[1]);
      }
    }
}

// outputs: rows of the weight; with a gate, `out` has half as many columns.
struct Product {
  const TensorView &x, &out;
  const optional<TensorView>& bias;
  Gate gate;
  int64_t rows, inputs, outputs;
  Product(const TensorView& x, int64_t outputs, int64_t inputs,
          const optional<TensorView>& bias, int64_t gate, const TensorView& out)
      : x(x), out(out), bias(bias), gate(Gate(gate)), rows(out.size(0)), inputs(inputs),
        outputs(outputs) {
    CHECK(x.ndim() == 2 && out.ndim() == 2 && is_packed(x) && (out.stride(1) == 1 || out.size(1) == 1),
          "linear: x must be a matrix, packed, and out one of packed rows");
    CHECK(x.dtype().code == kDLBfloat && (x.dtype() == out.dtype() || (is_float32(out) && !gate)) &&
              (!bias || (*bias).dtype() == x.dtype()),
          "linear: x and bias must be bfloat16; out, too, or without a gate float32");
    CHECK(x.size(0) == rows && x.size(1) == inputs && inputs % 2 == 0 &&
              out.size(1) * (gate ? 2 : 1) == outputs && (!bias || (*bias).numel() == outputs),
          "linear: x [" << x.size(0) << ", " << x.size(1) << "], weight [" << outputs << ", "
                        << inputs << "] and out [" << rows << ", " << out.size(1)
                        << "] do not fit");
    CHECK(gate == NONE || outputs % (2 * PANEL) == 0, "linear: a gate of whole panels");
  }

  // weight: panels of kind K. x: rows of inputs of type K::X. block: how many inputs have one scale.
  // start(panels) returns, for two panels, finish(p, block, m, count, sums, totals), which adds
  // `count` (a constant) rows of sums [NV] of panel p over a block, from row m on, to totals [NV]. PADDED: see
  // each_tile; then PADDING rows more than there are may be read and finished. A kind that folds has whole
  // groups in a block, and finish.begin(p, m, totals) sets its totals before any sums are added.
  template <class K, bool PADDED, class F>
  void run(const uint8_t* weight, const typename K::X* x, int64_t block, int64_t num_threads,
           F start, const Groups& groups = {}) const {
    const int64_t panels = outputs / PANEL, pairs = gate ? panels / 2 : (panels + 1) / 2;
    const int64_t blocks = (rows + BLOCK - 1) / BLOCK;
    if (outputs * inputs * rows < 65536) num_threads = 1;
    each_item(pairs * blocks, num_threads, [&](int64_t item) {
      const int64_t pair = item / blocks, one = gate ? pair : 2 * pair;
      const int64_t panel[2] = {one, gate ? pair + pairs : std::min(one + 1, panels - 1)};
      const int begin = int(item % blocks * BLOCK), end = int(std::min(begin + int64_t(BLOCK), rows));
      const auto finish = start(panel);
      if constexpr (WIDENS_FIRST)
        if (end - begin > K::FEW)
          return widened<K>(weight, panel, x, begin, end, block, groups, finish);
      in_registers<K, PADDED>(weight, panel, x, begin, end, block, groups, finish);
    });
  }

  // Of one row: f(panel, next, total) writes a panel's sums [NV]. next: the panel that is read after it.
  template <class F>
  void each_panel(int64_t num_threads, F f) const {
    const int64_t panels = outputs / PANEL, pairs = gate ? panels / 2 : (panels + 1) / 2;
    each_item(pairs, outputs * inputs < 65536 ? 1 : num_threads, [&](int64_t pair) {
      const int64_t one = gate ? pair : 2 * pair;
      const int64_t panel[2] = {one, gate ? pair + pairs : std::min(one + 1, panels - 1)};
      VF totals[2][NV];
      for (int p = 0; p < 2; p++) f(panel[p], p ? panel[0] + (gate ? 1 : 2) : panel[1], totals[p]);
      store({&totals[0][0], 1, 1, 0, {panel[0] * PANEL, panel[1] * PANEL}});
    });
  }

  // The input from which on AHEAD lies behind the panel.
  template <class K>
  int64_t turn() const {
    return std::max<int64_t>(inputs - AHEAD / K::FETCH_BYTES * 2 * K::STEPS, 0);
  }

  // The address of the steps from input `from` on.
  template <class K>
  const uint8_t* bytes(const uint8_t* weight, int64_t panel, int64_t from) const {
    return weight + (panel * inputs + from) / 2 / K::STEPS * K::FETCH_BYTES;
  }

 private:
  // Each tile of rows fetches and widens the weights, of two panels at once or, where its sums would
  // not fit the registers, of one after the other.
  template <class K, bool PADDED, class F>
  INLINE void in_registers(const uint8_t* weight, const int64_t (&panel)[2],
                           const typename K::X* x, int begin, int end, int64_t block,
                           const Groups& groups, const F& finish) const {
    each_tile<PADDED, K::ROWS>(begin, end, [&](auto count, int m, int num_rows) {
      constexpr int M = decltype(count)::value, P = M <= TILE ? 2 : 1;
      VF totals[2][M][NV] = {};
      const int share[2] = {m - begin, num_rows};
      if constexpr (K::FOLDS)
        for (int p = 0; p < 2; p++) finish.begin(p, m, totals[p]);
      for (int first = 0; first < 2; first += P)
        for (int64_t b = 0, from = 0; from < inputs; b++, from += block) {
          typename K::Sum sums[P][M][NV] = {};
          typename K::template Whole<P, M> whole{};
          const int64_t last = std::min(from + block, inputs);
          for (int64_t now = from, until; now < last; now = until) {
            until = now < turn<K>() ? std::min(last, turn<K>()) : last;
            if constexpr (K::FOLDS) until = std::min(until, now + (int64_t(1) << groups.shift));
            const uint8_t* at[P];
            Ahead asked[P];
#pragma GCC unroll 2
            for (int p = 0; p < P; p++) {
              at[p] = bytes<K>(weight, panel[first + p], now);
              asked[p] = ahead<K>(weight, panel[first + p], now, share, end - begin);
            }
            add_steps<K>(at, asked, x + m * inputs + now, inputs, (until - now) / 2, sums);
            if constexpr (K::FOLDS)
              for (int p = 0; p < P; p++)
                K::fold(sums[p], groups.at(panel[first + p], now), whole.sums[p]);
          }
#pragma GCC unroll 2
          for (int p = 0; p < P; p++)
            if constexpr (K::FOLDS) finish(first + p, b, m, count, whole.sums[p], totals[first + p]);
            else finish(first + p, b, m, count, sums[p], totals[first + p]);
        }
      store({&totals[0][0][0], M, num_rows, m, {panel[0] * PANEL, panel[1] * PANEL}});
    });
  }

  // All tiles read weights that are widened once, of all blocks that fit WIDE_STEPS or of a part of one.
  template <class K, class F>
  void widened(const uint8_t* weight, const int64_t (&panel)[2], const typename K::X* x, int begin,
               int end, int64_t block, const Groups& groups, const F& finish) const {
    VF totals[2][BLOCK][NV] = {};
    typename K::Weights wide[WIDE_STEPS];
    typename K::Sum sums[BLOCK][NV];  // of a block that is not yet whole
    const int64_t most = 2 * WIDE_STEPS, many = block < most ? most / block * block : most;
    for (int p = 0; p < 2; p++) {
      if constexpr (K::FOLDS)
        each_tile<false, WIDE_TILE>(begin, end, [&](auto count, int m, int) {
          finish.begin(p, m, *(VF(*)[count][NV])(totals[p] + m - begin));
        });
      for (int64_t from = 0; from < inputs; from += many) {
        const int64_t last = std::min(from + many, inputs), steps = (last - from) / 2;
        const uint8_t* packed = bytes<K>(weight, panel[p], from);
        for (int64_t s = 0; s < steps; s += K::STEPS, packed += K::FETCH_BYTES) {
          const typename K::Fetched fetched = K::fetch(packed);
          for (int k = 0; k < K::STEPS; k++) wide[s + k] = K::widen(fetched, k);
          if constexpr (K::FOLDS) {
            const Factors factors = K::factors(groups.at(panel[p], from + 2 * s));
            for (int k = 0; k < K::STEPS; k++) K::fold(wide[s + k], factors);
          }
        }
        each_tile<false, WIDE_TILE>(begin, end, [&](auto count, int m, int) {
          constexpr int M = decltype(count)::value;
          for (int64_t now = from, b = from / block, until; now < last; now = until, b++) {
            until = std::min(last, (b + 1) * block);
            typename K::Sum tile[M][NV];  // in registers
            for (int i = 0; i < M; i++)
              for (int v = 0; v < NV; v++)
                tile[i][v] = now > b * block ? sums[m - begin + i][v] : typename K::Sum{};
            add_widened<K>(wide + (now - from) / 2, x + m * inputs + now, inputs, (until - now) / 2, tile);
            if (until == inputs || until == (b + 1) * block) {
              finish(p, b, m, count, tile, totals[p] + m - begin);
              continue;
            }
            for (int i = 0; i < M; i++)
              for (int v = 0; v < NV; v++) sums[m - begin + i][v] = tile[i][v];
          }
        });
      }
    }
    store({&totals[0][0][0], BLOCK, end - begin, begin, {panel[0] * PANEL, panel[1] * PANEL}});
  }

  // The memory to prefetch for a tile of share[1] of `all` rows, which begins share[0] rows after
  // the first. One tile prefetches the weights that come next: the panel behind its own is read at
  // the same time, unless there is a gate. Of several tiles, which find these in a cache, each
  // prefetches its share of the next item's weights.
  template <class K>
  Ahead ahead(const uint8_t* weight, int64_t panel, int64_t from, const int (&share)[2],
              int all) const {
    const int64_t next = panel + (gate ? 1 : 2);
    const bool is_far = all <= FAR_ROWS;
    if (share[1] == all) {
      if (from < turn<K>()) return {bytes<K>(weight, panel, from) + AHEAD, K::FETCH_BYTES, is_far};
      return {bytes<K>(weight, next, from - turn<K>()), K::FETCH_BYTES, is_far};
    }
    const int64_t first = (share[0] * inputs + share[1] * from) / all;
    return {bytes<K>(weight, next, first), K::FETCH_BYTES * share[1] / all, is_far};
  }

  void store(const Tile& tile) const {
    const bf16* const to_add = bias ? data<bf16>(*bias) : nullptr;
    if (is_float32(out)) store_tile(tile, to_add, NONE, data<float>(out), out.stride(0));
    else store_tile(tile, to_add, gate, data<bf16>(out), out.stride(0));
  }
};

// Returns bfloat16 rows as K::X: x itself, or converted in `buffer`. room: PADDING more rows are
// needed behind them.
template <class K>
const typename K::X* as_inputs(const bf16* x, int64_t rows, int64_t inputs, bool room,
                               std::vector<typename K::X>& buffer) {
  if (std::is_same_v<typename K::X, bf16> && !room) return (const typename K::X*)x;
  buffer.resize((rows + (room ? PADDING : 0)) * inputs);
  const int n = int(inputs);
  for (int64_t at = 0; at < rows * inputs; at += inputs)  // all together may be more than an int counts
    each(x + at, n, [&](VF v, int i) { store_until(buffer.data() + at, i, n, v); });
  return buffer.data();
}
