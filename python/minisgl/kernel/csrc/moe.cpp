// The experts of a mixture: the weights of each chosen expert are read once, for all tokens that
// chose it.
//
// First, items of gate and up have some outputs of one expert. Then items of down have some outputs of
// all experts, so a token's results are added in the order of the experts, whatever the number of
// threads.
#include "dots.h"
#include "pairs.h"
#include "tensor.h"
#include "threads.h"

namespace {

constexpr int BLOCK = 16;  // outputs of an item
constexpr int TOKENS = 4;  // that a weight multiplies while it is in a register

template <int R, class T>
INLINE void tile_dots(const T* const* w, const float* const* x, int num_rows, int n,
                 float (&out)[R][TOKENS]) {
  const auto no_ask = [](int64_t) {};
  switch (num_rows) {
    case 1: return dots<R, 1>(w, x, n, out, no_ask);
    case 2: return dots<R, 2>(w, x, n, out, no_ask);
    case 3: return dots<R, 3>(w, x, n, out, no_ask);
    default: return dots<R, 4>(w, x, n, out, no_ask);
  }
}

template <class T>
INLINE float rounded(float x) {
  return round_to<T>(splat(x))[0];
}

template <class T>
void to_floats(const T* from, int64_t n, float* to) {
  each(from, int(n), [&](VF v, int i) { store_until(to, i, int(n), v); });
}

// The activation of pair j, each step rounded to T. sums: gate and up, whose activation is
// silu(gate) * up; or up alone, whose activation is the square of its ReLU.
template <class T>
INLINE float activate(const float (&sums)[2][TOKENS], int j) {
  const float silu = silu_of(round_to<T>(splat(sums[0][j])))[0];
  return rounded<T>(rounded<T>(silu) * rounded<T>(sums[1][j]));
}
template <class T>
INLINE float activate(const float (&sums)[1][TOKENS], int j) {
  const float relu = std::max(rounded<T>(sums[0][j]), 0.0f);
  return rounded<T>(relu * relu);
}

// GATED: gate_up has a gate and an up half; otherwise it has up alone.
template <bool GATED, class T>
void run(const TensorView& x, const TensorView& gate_up, const TensorView& down,
         const TensorView& weights, const TensorView& ids, const TensorView& out, int64_t first,
         int64_t num_threads) {
  const int64_t num_tokens = x.size(0), num_held = down.size(0);
  const int D = int(down.size(1)), F = int(down.size(2)), K = int(ids.size(1));
  const Pairs pairs(data<int32_t>(ids), num_tokens * K, first, num_held);
  const T *up_base = data<T>(gate_up), *down_base = data<T>(down);
  std::vector<float> tokens(num_tokens * D), act(pairs.order.size() * F);
  for (int64_t t = 0; t < num_tokens; t++) to_floats(data<T>(x) + t * D, D, &tokens[t * D]);

  const std::vector<int>& chosen = pairs.chosen;
  constexpr int HALVES = GATED ? 2 : 1;
  const int up_blocks = (F + BLOCK - 1) / BLOCK;
  each_item(int64_t(chosen.size()) * up_blocks, num_threads, [&](int64_t item) {
    const int e = chosen[item / up_blocks], f0 = int(item % up_blocks) * BLOCK;
    for (int f = f0; f < std::min(f0 + BLOCK, F); f++) {
      const T* rows[HALVES];
      for (int h = 0; h < HALVES; h++) rows[h] = up_base + ((int64_t(e) * HALVES + h) * F + f) * D;
      for (int i = pairs.begin[e]; i < pairs.begin[e + 1]; i += TOKENS) {
        const int m = std::min(TOKENS, pairs.begin[e + 1] - i);
        const float* from[TOKENS];
        float sums[HALVES][TOKENS];
        for (int j = 0; j < m; j++) from[j] = &tokens[int64_t(pairs.order[i + j] / K) * D];
        tile_dots<HALVES>(rows, from, m, D, sums);
        for (int j = 0; j < m; j++) act[int64_t(i + j) * F + f] = activate<T>(sums, j);
      }
    }
  });

  each_item((D + BLOCK - 1) / BLOCK, num_threads, [&](int64_t item) {
    const int d0 = int(item) * BLOCK, width = std::min(BLOCK, D - d0);
    std::vector<float> total(num_tokens * BLOCK);
    for (int e : chosen)
      for (int d = 0; d < width; d += 2) {
        const int count = std::min(2, width - d);
        const T* row = down_base + (int64_t(e) * D + d0 + d) * F;
        const T* const rows[2] = {row, count == 2 ? row + F : row};
        for (int i = pairs.begin[e]; i < pairs.begin[e + 1]; i += TOKENS) {
          const int m = std::min(TOKENS, pairs.begin[e + 1] - i);
          const float* from[TOKENS];
          float y[2][TOKENS];
          for (int j = 0; j < m; j++) from[j] = &act[int64_t(i + j) * F];
          tile_dots<2>(rows, from, m, F, y);
          for (int j = 0; j < m; j++) {
            const int p = pairs.order[i + j];
            for (int r = 0; r < count; r++)
              total[int64_t(p / K) * BLOCK + d + r] +=
                  rounded<T>(y[r][j]) * data<float>(weights)[p];
          }
        }
      }
    for (int64_t t = 0; t < num_tokens; t++)
      each(&total[t * BLOCK], width, [&](VF v, int i) {
        store_until(data<T>(out) + t * D + d0, i, width, v);
      });
  });
}

}  // namespace

// out [T, D] = the weighted sums of the experts from `first` on. x [T, D]; gate_up [L, 2F, D], or
// [L, F, D] for experts without a gate; down [L, D, F]; weights float32 and ids int32, [T, K]. All
// contiguous.
void experts(TensorView x, TensorView gate_up, TensorView down, TensorView weights, TensorView ids,
             TensorView out, int64_t first, int64_t num_threads) {
  for (const TensorView& tensor : {x, gate_up, down, weights, ids, out})
    CHECK(is_packed(tensor), "experts: the tensors must be contiguous");
  CHECK(gate_up.dtype() == x.dtype() && down.dtype() == x.dtype() && out.dtype() == x.dtype(),
        "experts: the tensors must share a dtype");
  const bool is_gated = gate_up.size(1) == 2 * down.size(2);
  CHECK((is_gated || gate_up.size(1) == down.size(2)) && gate_up.size(2) == x.size(1) &&
            down.size(1) == x.size(1) && ids.size(0) == x.size(0) &&
            weights.numel() == ids.numel(),
        "experts: shapes differ");
  with_dtype(x.dtype(), [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    auto run_any = is_gated ? run<true, T> : run<false, T>;
    run_any(x, gate_up, down, weights, ids, out, first, num_threads);
  });
}

EXPORT(experts)
