// The experts of a mixture whose weights have few bits (scaled.h): the rows of an expert's tokens meet
// gate and up, then down. All results are rounded as those of linear layers, and a token's are added in
// the order of the experts.
#include "pairs.h"
#include "product.h"
#include "scaled.h"

namespace {

// Other activations are a `Gate`. CLAMPED: of gpt-oss. SQUARED: of ReLU, of experts without a gate. Their
// numbers are those of minisgl_zoo/weights/panel_experts.py.
enum Activation { CLAMPED = 3, SQUARED };

// Rows of bfloat16 as the kernels take them. It cannot be copied: `tensor` points to the shape.
struct Rows {
  int64_t shape[2], strides[2];
  DLTensor tensor;
  Rows(const Rows&) = delete;
  Rows(bf16* at, int64_t rows, int64_t columns)
      : shape{rows, columns}, strides{columns, 1},
        tensor{at, {kDLCPU, 0}, 2, {kDLBfloat, 16, 1}, shape, strides, 0} {}
};

// Of one row, gate then up [2 F] -> [F]: (up + 1) * gate * sigmoid(alpha * gate).
INLINE void clamped(const bf16* gate_up, int F, float alpha, float limit, bf16* to) {
  each(gate_up, F, [&](VF gate, int i) {
    gate = min(splat(limit), gate);  // NaN stays
    const VF up = max(splat(-limit), min(splat(limit), load_until(gate_up + F, i, F)));
    const VF sigmoid = round_to<bf16>(1.0f / (1.0f + exp(-round_to<bf16>(gate * alpha))));
    store_until(to, i, F, round_to<bf16>(up + 1.0f) * round_to<bf16>(gate * sigmoid));
  });
}
INLINE void squared(const bf16* up, int F, bf16* to) {
  each(up, F, [&](VF v, int i) {
    const VF relu = max(splat(0), v);
    store_until(to, i, F, relu * relu);
  });
}

// The biases of expert e, of [L, columns], in `row`.
optional<TensorView> of_expert(const optional<TensorView>& biases, int e, optional<Rows>& row) {
  if (!biases) return {};
  const int64_t columns = (*biases).size(1);
  row.emplace(data<bf16>(*biases) + e * columns, 1, columns);
  return TensorView(&row->tensor);
}

}  // namespace

// out [T, D] = the weighted sums of `count` experts from `first` on. x [T, D]; gate_up [L, 2F, D], or
// [L, F, D] for SQUARED; down [L, D, F]; both as numbers_linear has them. weights float32 and ids int32,
// [T, K]. Biases [L, 2F] and [L, D].
void scaled_experts(
    TensorView x, TensorView up_numbers, int64_t up_kind, int64_t up_group, TensorView up_scales,
    optional<TensorView> up_factors, optional<TensorView> up_zeros, optional<TensorView> up_steps,
    int64_t up_middle, TensorView down_numbers, int64_t down_kind, int64_t down_group,
    TensorView down_scales, optional<TensorView> down_factors, optional<TensorView> down_zeros,
    optional<TensorView> down_steps, int64_t down_middle, TensorView weights, TensorView ids,
    optional<TensorView> up_biases, optional<TensorView> down_biases, int64_t activation, double alpha,
    double limit, TensorView out, int64_t F, int64_t first, int64_t count, int64_t num_threads) {
  const int64_t T = x.size(0), D = x.size(1), K = ids.size(1);
  for (const TensorView& tensor : {x, weights, ids, out})
    CHECK(is_packed(tensor), "experts: the tensors must be contiguous");
  CHECK(x.dtype().code == kDLBfloat && out.dtype() == x.dtype() && out.numel() == x.numel() &&
            ids.size(0) == T && weights.numel() == ids.numel() && is_int32(ids) && is_float32(weights),
        "experts: x and out must be bfloat16 [T, D], weights float32 and ids int32 [T, K]");
  const int64_t gate = activation < CLAMPED ? activation : int64_t(NONE);
  const int64_t G = activation == SQUARED ? F : 2 * F, between = gate ? F : G;
  const Scaled up(up_numbers, up_kind, up_group, up_scales, up_factors, up_zeros, up_steps, up_middle, G,
                  D, count);
  const Scaled down(down_numbers, down_kind, down_group, down_scales, down_factors, down_zeros, down_steps,
                    down_middle, D, F, count);
  const Pairs pairs(data<int32_t>(ids), T * K, first, count);
  int64_t most = 0;  // tokens of an expert
  for (int e : pairs.chosen) most = std::max<int64_t>(most, pairs.begin[e + 1] - pairs.begin[e]);
  std::vector<bf16> inputs(T > 1 ? most * D : 0), of_up(most * between), act(gate ? 0 : most * F),
      results(most * D);
  std::vector<float> total(T * D);
  for (int e : pairs.chosen) {
    const int* const chosen = &pairs.order[pairs.begin[e]];
    const int64_t m = pairs.begin[e + 1] - pairs.begin[e], threads = m > 8 ? num_threads : 1;
    bf16* const acts = gate ? of_up.data() : act.data();
    const Rows in(T > 1 ? inputs.data() : data<bf16>(x), m, D), mid(of_up.data(), m, between),
        acted(acts, m, F), made(results.data(), m, D);
    optional<Rows> up_row, down_row;
    if (T > 1)
      each_item(m, threads, [&](int64_t i) {
        std::memcpy(&inputs[i * D], data<bf16>(x) + chosen[i] / K * D, D * sizeof(bf16));
      });
    const TensorView from(&in.tensor), to(&mid.tensor), of_act(&acted.tensor), result(&made.tensor);
    const optional<TensorView> up_bias = of_expert(up_biases, e, up_row);
    multiply_scaled({from, G, D, up_bias, gate, to}, up[e], num_threads);
    if (!gate)
      each_item(m, threads, [&](int64_t i) {
        if (activation == SQUARED) squared(&of_up[i * G], int(F), acts + i * F);
        else clamped(&of_up[i * G], int(F), float(alpha), float(limit), acts + i * F);
      });
    const optional<TensorView> down_bias = of_expert(down_biases, e, down_row);
    multiply_scaled({of_act, D, F, down_bias, NONE, result}, down[e], num_threads);
    each_item(m, threads, [&](int64_t i) {
      float* const sums = &total[chosen[i] / K * D];
      const float weight = data<float>(weights)[chosen[i]];
      each(&results[i * D], int(D), [&](VF v, int d) {
        store_until(sums, d, int(D), load_until(sums + d, 0, int(D) - d) + v * weight);
      });
    });
  }
  for (int64_t at = 0; at < T * D; at += D)
    each(&total[at], int(D), [&](VF v, int d) { store_until(data<bf16>(out) + at, d, int(D), v); });
}

EXPORT(scaled_experts)
