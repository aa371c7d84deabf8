// The small ops between the GEMMs: norms, rotary embedding, gated activations, token ids.
//
// Each rounds where `minisgl.kernel.ops` rounds, so 16-bit results differ only where the last bit of a
// float32 intermediate differs. They save passes over memory and, at few tokens, most of the 5 to 20
// microseconds that a chain of torch ops takes.
#include "rows.h"
#include "tensor.h"
#include "threads.h"

namespace {

// Below this many elements a second thread costs more than it brings.
constexpr int64_t SERIAL = 32768;

// The last axis of a tensor, row by row. Contiguous, or of 2 or 3 axes with any strides.
template <class T>
struct Rows {
  T* base;
  int64_t count, inner, outer_stride, inner_stride;
  int width;
  explicit Rows(const TensorView& x) : base(data<T>(x)) {
    width = x.size(-1);
    count = width ? x.numel() / width : 0;
    inner = x.ndim() == 3 ? x.size(1) : 1;
    inner_stride = x.ndim() == 3 ? x.stride(1) : 0;
    outer_stride = x.ndim() == 2 || x.ndim() == 3 ? x.stride(0) : width;
    CHECK(is_packed(x) || x.ndim() == 2 || x.ndim() == 3, "strides of more than 3 axes");
    CHECK(width == 1 || x.stride(-1) == 1, "the last axis must be contiguous");
  }
  T* operator[](int64_t i) const {
    return base + i / inner * outer_stride + i % inner * inner_stride;
  }
};

void check_same(const TensorView& a, const TensorView& b, const char* name) {
  CHECK(a.dtype() == b.dtype(), name << ": the tensors must share a dtype");
}

template <class F>
void parallel(int64_t count, int64_t width, int64_t num_threads, F f) {
  if (count * width < SERIAL) num_threads = 1;
  each_item(count, num_threads, f);
}

template <class F>
void gate(const TensorView& gate_up, const TensorView& out, int64_t num_threads, F activation) {
  check_same(gate_up, out, "gated activation");
  with_dtype(out.dtype(), [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    Rows<T> from(gate_up), to(out);
    const int n = to.width;
    CHECK(from.count == to.count && from.width == 2 * n, "gated activation: [.., 2F] to [.., F]");
    parallel(to.count, n, num_threads, [&](int64_t row) {
      const T *x = from[row], *up = x + n;
      T* y = to[row];
      each(x, n, [&](VF v, int i) {
        store_until(y, i, n, round_to<T>(activation(v)) * load_until(up, i, n));
      });
    });
  });
}

// Calls f with the weight of a norm, which has the type of x or is float32.
template <class T, class F>
void with_weight(const TensorView& x, const TensorView& weight, F f) {
  if (is_float32(weight)) return f(data<float>(weight));
  check_same(x, weight, "a norm's weight");
  f(data<T>(weight));
}

}  // namespace

void rms_norm(TensorView x, TensorView weight, TensorView out, double eps, int64_t num_threads) {
  with_dtype(x.dtype(), [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    Rows<T> from(x), to(out);
    CHECK(weight.numel() == from.width, "rms_norm: " << weight.numel() << " weights for rows of "
                                                     << from.width);
    with_weight<T>(x, weight, [&](auto* w) {
      parallel(from.count, from.width, num_threads,
               [&](int64_t i) { norm_row(from[i], w, to[i], from.width, eps); });
    });
  });
}

// total = x + residual; out = rms_norm(total)
void add_rms_norm(TensorView x, TensorView residual, TensorView weight, TensorView out,
                  TensorView total, double eps, int64_t num_threads) {
  check_same(x, residual, "add_rms_norm");
  with_dtype(x.dtype(), [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    Rows<T> a(x), b(residual), to(out), sums(total);
    const int n = a.width;
    CHECK(b.count == a.count && b.width == n && weight.numel() == n, "add_rms_norm: shapes differ");
    with_weight<T>(x, weight, [&](auto* w) {
      parallel(a.count, n, num_threads, [&](int64_t row) {
        const T* y = b[row];
        T* t = sums[row];
        each(a[row], n, [&](VF v, int i) {
          store_until(t, i, n, v + load_until(y, i, n));
        });
        norm_row(t, w, to[row], n, eps);
      });
    });
  });
}

// q [T, N, H], k [T, K, H], cos_sin float32 [P, R], positions int32 [T].
void apply_rope(TensorView q, TensorView k, TensorView cos_sin, TensorView positions,
                TensorView q_out, TensorView k_out, int64_t num_threads) {
  check_same(q, k, "apply_rope");
  with_dtype(q.dtype(), [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    Rows<T> from[] = {Rows<T>(q), Rows<T>(k)}, to[] = {Rows<T>(q_out), Rows<T>(k_out)};
    const int H = from[0].width, R = cos_sin.size(1);
    check_rotary(H, R);
    const float* table = data<float>(cos_sin);
    const int32_t* at = data<int32_t>(positions);
    const int64_t heads = from[0].inner + from[1].inner;
    parallel(q.size(0), heads * H, num_threads, [&](int64_t token) {
      Angles<T> angles(table + at[token] * int64_t(R), R);
      for (int i = 0; i < 2; i++)
        for (int64_t head = token * from[i].inner; head < (token + 1) * from[i].inner; head++)
          rotate_row(from[i][head], angles, to[i][head], H);
    });
  });
}

void silu_and_mul(TensorView gate_up, TensorView out, int64_t num_threads) {
  gate(gate_up, out, num_threads, silu_of);
}

void gelu_and_mul(TensorView gate_up, TensorView out, int64_t num_threads) {
  gate(gate_up, out, num_threads, gelu_tanh);
}

// out [T] = token_ids [T], where a negative id among the first D is replaced by the last token of its
// row in `rows` [D]. All int32.
void take_ids(TensorView token_ids, TensorView rows, TensorView last_token, TensorView out) {
  for (const TensorView& x : {token_ids, rows, last_token, out})
    CHECK(is_int32(x) && is_packed(x), "take_ids: int32 tensors, packed");
  CHECK(out.numel() == token_ids.numel() && rows.numel() <= out.numel(), "take_ids: shapes differ");
  for (int64_t i = 0; i < out.numel(); i++) {
    const int32_t id = data<int32_t>(token_ids)[i];
    const bool is_promised = id < 0 && i < rows.numel();
    data<int32_t>(out)[i] = is_promised ? data<int32_t>(last_token)[data<int32_t>(rows)[i]] : id;
  }
}

EXPORT(take_ids)
EXPORT(rms_norm)
EXPORT(add_rms_norm)
EXPORT(apply_rope)
EXPORT(silu_and_mul)
EXPORT(gelu_and_mul)
