// Linear layers of float32 weights as torch has them, [O, I], for few rows of inputs.
//
// torch's product of one row reads half as fast as the memory can, and each further row, up to four,
// costs it as much as the first.
#include "dots.h"
#include "panels.h"
#include "threads.h"

namespace {

constexpr int ITEM = 48;  // outputs of an item of work, about

struct Floats {
  const float *x, *weight, *bias;  // bias: or null
  float* out;
  int64_t rows, inputs, outputs;
};

// A tile has OUTPUTS outputs and at most MOST rows, whose sums are in registers.
template <int OUTPUTS, int MOST>
void multiply(const Floats& product, int64_t num_threads) {
  const auto [x, weight, bias, out, rows, inputs, outputs] = product;
  constexpr int64_t GROUPS = ITEM / OUTPUTS;
  const int64_t groups = (outputs + OUTPUTS - 1) / OUTPUTS;
  each_item((groups + GROUPS - 1) / GROUPS, num_threads, [&](int64_t item) {
    for (int64_t g = item * GROUPS; g < std::min(groups, (item + 1) * GROUPS); g++) {
      const int64_t first = g * OUTPUTS;
      const float* w[OUTPUTS];
      for (int r = 0; r < OUTPUTS; r++) w[r] = weight + std::min(first + r, outputs - 1) * inputs;
      // Weights come in the order in which they lie in memory, two groups ahead, into the second
      // cache. Of several tiles each asks for its share.
      const float* const next = w[0] + 2 * OUTPUTS * inputs;
      each_tile<false, MOST>(0, int(rows), [&](auto count, int m, int) {
        constexpr int M = decltype(count)::value;
        const float* tile[M];
        for (int i = 0; i < M; i++) tile[i] = x + (m + i) * inputs;
        const float* const share = next + OUTPUTS * inputs * m / rows;
        const int64_t pace = OUTPUTS * LINE * M / rows;
        float y[OUTPUTS][MOST];
        dots<OUTPUTS, M>(w, tile, inputs, y, [&](int64_t i) __attribute__((always_inline)) {
          for (int r = 0; r < OUTPUTS; r++)
            __builtin_prefetch(share + i / LINE * pace + r * LINE, 0, 2);
        });
        for (int r = 0; r < OUTPUTS && first + r < outputs; r++)
          for (int i = 0; i < M; i++)
            out[(m + i) * outputs + first + r] = y[r][i] + (bias ? bias[first + r] : 0.0f);
      });
    }
  });
}

}  // namespace

// out = x @ weight.T + bias: x [M, I], weight [O, I], out [M, O]. All float32 and packed.
void plain_linear(TensorView x, TensorView weight, optional<TensorView> bias, TensorView out,
                  int64_t num_threads) {
  const int64_t rows = x.size(0), inputs = x.size(1), outputs = weight.size(0);
  for (const TensorView& tensor : {x, weight, out})
    CHECK(tensor.ndim() == 2 && is_packed(tensor) && is_float32(tensor),
          "linear: x, weight and out must be float32 matrices, packed");
  CHECK(weight.size(1) == inputs && out.size(0) == rows && out.size(1) == outputs &&
            (!bias || ((*bias).numel() == outputs && is_float32(*bias))),
        "linear: x [" << rows << ", " << inputs << "], weight [" << outputs << ", " << weight.size(1)
                      << "] and out [" << out.size(0) << ", " << out.size(1) << "] do not fit");
  if (outputs * inputs * rows < 65536) num_threads = 1;
  const Floats product{data<float>(x), data<float>(weight), bias ? data<float>(*bias) : nullptr,
                       data<float>(out), rows, inputs, outputs};
  constexpr bool MANY = REGISTERS > 16;
  if (rows <= 2) return multiply<MANY ? 8 : 6, 2>(product, num_threads);
  if (rows == 3) return multiply<MANY ? 8 : 4, 3>(product, num_threads);
  multiply<MANY ? 4 : 3, MANY ? 6 : 4>(product, num_threads);
}

// Rows `ids`, int32 or int64, of a float32 matrix [V, D].
void plain_rows(TensorView ids, TensorView weight, TensorView out) {
  CHECK(is_packed(ids) && is_packed(weight) && is_packed(out) && is_float32(weight) &&
            is_float32(out) && out.numel() == ids.numel() * weight.size(1),
        "embed: ids [T], weight [V, D] and out [T, D], float32 and packed");
  const int64_t width = weight.size(1);
  const bool is_wide = ids.dtype().bits == 64;
  for (int64_t t = 0; t < ids.numel(); t++) {
    const int64_t id = is_wide ? data<int64_t>(ids)[t] : data<int32_t>(ids)[t];
    std::memcpy(data<float>(out) + t * width, data<float>(weight) + id * width,
                width * sizeof(float));
  }
}

EXPORT(plain_linear)
EXPORT(plain_rows)
