// The experts of a mixture: each chosen expert's weights are read once, whichever tokens chose it.
//
// Pairs of a token and one of its experts are ordered by expert. Threads share the outputs: first
// those of gate and up, in blocks of one expert; then those of down, in blocks of all experts, so
// that a token's results are added in order of the experts, however many threads there are.
#include <algorithm>
#include <vector>

#include "tensor.h"
#include "threads.h"

namespace {

constexpr int BLOCK = 16;   // outputs that a thread takes at a time
constexpr int TOKENS = 4;   // that meet a weight while it is in a register

// Dot products of R rows of weights with M rows of floats.
template <int R, int M, class T>
INLINE void dots(const T* const (&w)[R], const float* const* x, int n, float (&out)[R][TOKENS]) {
  VF sums[R][M] = {};
  for (int i = 0; i < n; i += W) {
    const bool whole = i + W <= n;
    VF v[M];
    for (int m = 0; m < M; m++) v[m] = whole ? load(x[m] + i) : load_first(x[m] + i, n - i);
    for (int r = 0; r < R; r++) {
      VF weight = whole ? load(w[r] + i) : load_first(w[r] + i, n - i);
      for (int m = 0; m < M; m++) sums[r][m] += weight * v[m];
    }
  }
  for (int r = 0; r < R; r++)
    for (int m = 0; m < M; m++) out[r][m] = sum(sums[r][m]);
}

template <int R, class T>
INLINE void dots(const T* const (&w)[R], const float* const* x, int num_rows, int n,
                 float (&out)[R][TOKENS]) {
  switch (num_rows) {
    case 1: return dots<R, 1>(w, x, n, out);
    case 2: return dots<R, 2>(w, x, n, out);
    case 3: return dots<R, 3>(w, x, n, out);
    default: return dots<R, 4>(w, x, n, out);
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

struct Pairs {
  std::vector<int> order, begin;  // pairs by expert; where each expert's begin, and their end
  Pairs(const int32_t* ids, int64_t count, int64_t first, int64_t num_held) : begin(num_held + 1) {
    auto held = [&](int64_t p) { return ids[p] >= first && ids[p] < first + num_held; };
    for (int64_t p = 0; p < count; p++)
      if (held(p)) begin[ids[p] - first + 1]++;
    for (int64_t e = 0; e < num_held; e++) begin[e + 1] += begin[e];
    order.resize(begin[num_held]);
    std::vector<int> next(begin.begin(), begin.end() - 1);
    for (int64_t p = 0; p < count; p++)
      if (held(p)) order[next[ids[p] - first]++] = int(p);
  }
};

// GATED: silu(gate) * up; else the square of the ReLU of up, which is all that gate_up has.
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

  std::vector<int> chosen;
  for (int e = 0; e < num_held; e++)
    if (pairs.begin[e] < pairs.begin[e + 1]) chosen.push_back(e);
  const int up_blocks = (F + BLOCK - 1) / BLOCK;
  each_item(int64_t(chosen.size()) * up_blocks, num_threads, [&](int64_t item) {
    const int e = chosen[item / up_blocks], f0 = int(item % up_blocks) * BLOCK;
    for (int f = f0; f < std::min(f0 + BLOCK, F); f++) {
      const T* gate = up_base + (int64_t(e) * (GATED ? 2 * F : F) + f) * D;
      const T* const rows[2] = {gate, gate + int64_t(F) * D};
      for (int i = pairs.begin[e]; i < pairs.begin[e + 1]; i += TOKENS) {
        const int m = std::min(TOKENS, pairs.begin[e + 1] - i);
        const float* from[TOKENS];
        float y[2][TOKENS];
        for (int j = 0; j < m; j++) from[j] = &tokens[int64_t(pairs.order[i + j] / K) * D];
        if constexpr (!GATED) {
          const T* const row[1] = {gate};
          float up[1][TOKENS];
          dots(row, from, m, D, up);
          for (int j = 0; j < m; j++) {
            const float relu = std::max(rounded<T>(up[0][j]), 0.0f);
            act[int64_t(i + j) * F + f] = rounded<T>(relu * relu);
          }
          continue;
        }
        dots(rows, from, m, D, y);
        for (int j = 0; j < m; j++) {
          const float silu = silu_of(round_to<T>(splat(y[0][j])))[0];
          act[int64_t(i + j) * F + f] = rounded<T>(rounded<T>(silu) * rounded<T>(y[1][j]));
        }
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
          dots(rows, from, m, F, y);
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

// x, out [T, D], gate_up [L, 2F, D] ([L, F, D] for experts without a gate) and down [L, D, F] of experts `first` on; weights float32 and
// ids int32, [T, K]. All contiguous.
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

TVM_FFI_DLL_EXPORT_TYPED_FUNC(experts, experts);
