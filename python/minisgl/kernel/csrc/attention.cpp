// Causal attention of one step over the paged KV cache. The cache is read where it lies; at most one
// block of keys and values at a time is converted in scratch memory.
//
// attention_items.h divides the work into items (row, tile of its queries, key/value head, span of
// keys). An item walks its keys in blocks (attention_item.h): few query vectors read keys and
// values where they lie (attention_direct.h), more meet converted blocks (attention_tiled.h).
#include "attention_items.h"
#include "rows.h"

namespace attention {
namespace {

using Scales = optional<TensorView>;

// The scales of keys or values, checked: one for each head, or for each slot and head.
float* scales_of(const Scales& scales, int64_t num_slots, int64_t K, bool of_slots) {
  CHECK(scales && is_float32(*scales) && is_packed(*scales) &&
            (*scales).numel() == (of_slots ? num_slots * K : K),
        "attention: a pool of 8 bits needs float32 scales, of each head (e4m3) or of each token and "
        "head (int8)");
  return data<float>(*scales);
}

// Checks the arguments that both functions below have. rows [4, B]: table indices, first tokens in the
// batch, lengths, ends.
template <class T, class P>
Step<T, P> make_step(int64_t num_tokens, int64_t N, int64_t H, const TensorView& k_pool,
                     const TensorView& v_pool, const Scales& k_scales, const Scales& v_scales,
                     const TensorView& slots, const TensorView& page_table, const TensorView& rows,
                     const optional<TensorView>& key_ends, const TensorView& out,
                     const optional<TensorView>& sinks, double scale, double softcap,
                     int64_t window) {
  const int64_t K = k_pool.size(2);
  CHECK(rows.ndim() == 2 && rows.size(0) == 4, "attention: rows must be [4, rows]");
  CHECK(k_pool.ndim() == 4 && is_packed(k_pool) && is_packed(v_pool),
        "attention: the pools must be contiguous [pages, page size, heads, head dim]");
  CHECK(k_pool.size(3) == H && N % K == 0, "attention: " << N << " query heads of " << H
                                                         << " do not fit a pool of " << K
                                                         << " heads of " << k_pool.size(3));
  CHECK(v_pool.dtype() == k_pool.dtype(), "attention: keys and values must share a dtype");
  CHECK(is_int32(slots) && is_packed(slots) && slots.size(0) == num_tokens &&
            is_int32(page_table) && page_table.stride(1) == 1 && is_int32(rows) &&
            is_packed(rows) && is_packed(out),
        "attention: slots, page table and rows must be int32, packed");
  CHECK(!sinks || ((*sinks).numel() == N && is_float32(*sinks) && is_packed(*sinks)),
        "attention: sinks must be float32, one per query head");
  CHECK(!key_ends || ((*key_ends).numel() == num_tokens && is_int32(*key_ends) &&
                      is_packed(*key_ends)),
        "attention: the ends of keys must be int32, one per token");
  Step<T, P> s;
  s.q = s.out = data<T>(out), s.q_stride = N * H;
  s.k_pool = data<P>(k_pool), s.v_pool = data<P>(v_pool);
  s.k_scales = s.v_scales = nullptr, s.scale_stride = 0;
  if constexpr (Step<T, P>::QUANTISED) {
    const bool of_slots = std::is_same_v<P, i8>;
    const int64_t num_slots = k_pool.size(0) * k_pool.size(1);
    s.k_scales = scales_of(k_scales, num_slots, K, of_slots);
    s.v_scales = scales_of(v_scales, num_slots, K, of_slots);
    s.scale_stride = of_slots ? K : 0;
  }
  s.slots = data<int32_t>(slots), s.table = data<int32_t>(page_table);
  s.table_stride = page_table.stride(0);
  s.num_rows = rows.size(1), s.table_idxs = data<int32_t>(rows);
  s.lengths = s.table_idxs + 2 * s.num_rows, s.ends = s.lengths + s.num_rows;
  s.key_ends = key_ends ? data<int32_t>(*key_ends) : nullptr;
  s.num_tokens = num_tokens, s.num_heads = N, s.num_kv_heads = K, s.group = N / K, s.H = H;
  s.page_size = k_pool.size(1), s.scale = scale, s.softcap = softcap;
  s.sinks = sinks ? data<float>(*sinks) : nullptr;
  s.window = int(std::min<int64_t>(window, std::numeric_limits<int>::max() / 2));  // minus a position
  int64_t tokens = 0;
  for (int row = 0; row < s.num_rows; row++) tokens += s.lengths[row];
  CHECK(tokens == num_tokens,
        "attention: the rows have " << tokens << " tokens, the inputs " << num_tokens);
  return s;
}

}  // namespace

// q [T, N, H] and k, v [T, K, H]: tokens may be apart, heads are packed. out [T, N, H], pools
// [pages, page size, K, H], all of one dtype; or pools of int8 with scales float32 [pages, page size,
// K], or of e4m3 with scales [K]. slots [T], page_table [R, P], rows [4, B]: int32. key_ends int32 [T]:
// where the keys of each token end, at most with its row; None: with itself. sinks float32 [N] or
// None. softcap 0, window 0: none.
void paged_attention(TensorView q, TensorView k, TensorView v, TensorView k_pool, TensorView v_pool,
                     Scales k_scales, Scales v_scales, TensorView slots, TensorView page_table,
                     TensorView rows, optional<TensorView> key_ends, TensorView out,
                     optional<TensorView> sinks, double scale, double softcap,
                     int64_t window, int64_t num_threads) {
  for (const TensorView& x : {q, k, v})
    CHECK(x.ndim() == 3 && x.size(0) == q.size(0) && x.size(2) == q.size(2) &&
              x.dtype() == out.dtype() && x.stride(2) == 1 &&
              (x.stride(1) == x.size(2) || x.size(1) == 1),
          "attention: q, k and v must be [tokens, heads, head dim], heads packed, of one dtype");
  CHECK(k.size(1) == k_pool.size(2) && v.size(1) == k_pool.size(2),
        "attention: " << k.size(1) << " key heads do not fit a pool of " << k_pool.size(2));
  with_dtype(q.dtype(), [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const size_t bytes = k.size(1) * k.size(2) * sizeof(T);
    const Prepare<T> prepare = [&](int64_t t, T* keys, T* values) {
      if (!keys) return;
      std::memcpy(keys, data<T>(k) + t * k.stride(0), bytes);
      std::memcpy(values, data<T>(v) + t * v.stride(0), bytes);
    };
    with_pool<T>(k_pool.dtype(), out.dtype(), [&](auto* pool_type) {
      using P = std::remove_pointer_t<decltype(pool_type)>;
      auto s = make_step<T, P>(q.size(0), q.size(1), q.size(2), k_pool, v_pool, k_scales, v_scales,
                               slots, page_table, rows, key_ends, out, sinks, scale, softcap, window);
      s.q = data<T>(q), s.q_stride = q.stride(0);
      run(s, num_threads, prepare);
    });
  });
}

// As paged_attention, from the projection's output: qkv [T, (N + 2K) * H]. Queries and keys are
// normed with q_weight and k_weight [H] (None: not), then rotated by cos_sin float32 [P, R] at
// positions int32 [T]. Queries wait in `out` until their tile is written over them.
void qkv_attention(TensorView qkv, optional<TensorView> q_weight,
                   optional<TensorView> k_weight, double eps, TensorView cos_sin,
                   TensorView positions, TensorView k_pool, TensorView v_pool, Scales k_scales,
                   Scales v_scales, TensorView slots, TensorView page_table, TensorView rows,
                   optional<TensorView> key_ends, TensorView out,
                   optional<TensorView> sinks, double scale, double softcap,
                   int64_t window, int64_t num_threads) {
  CHECK(k_pool.ndim() == 4 && qkv.ndim() == 2 && out.ndim() == 2, "attention: wrong axes");
  const int64_t K = k_pool.size(2), H = k_pool.size(3), N = out.size(1) / H, R = cos_sin.size(1);
  CHECK(qkv.size(1) == (N + 2 * K) * H && qkv.stride(1) == 1 && qkv.dtype() == out.dtype() &&
            qkv.size(0) == out.size(0) && out.size(1) % H == 0,
        "attention: qkv must be [tokens, (" << N << " + 2 * " << K << ") * " << H << "]");
  CHECK(is_int32(positions) && is_packed(positions) && is_float32(cos_sin) &&
            is_packed(cos_sin),
        "attention: positions must be int32, cosines and sines float32, packed");
  for (const auto& weight : {q_weight, k_weight})
    CHECK(!weight || ((*weight).numel() == H && is_packed(*weight) &&
                      ((*weight).dtype() == qkv.dtype() || is_float32(*weight))),
          "attention: norm weights must be one per head dim, of the dtype of qkv or float32");
  check_rotary(H, R);
  with_dtype(qkv.dtype(), [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    float weights[2][MAX_HEAD_DIM];  // of queries and keys
    for (int i = 0; i < 2; ++i) {
      const auto& weight = i ? k_weight : q_weight;
      const auto copy = [&](VF v, int h) { store_until(weights[i], h, int(H), v); };
      if (weight && is_float32(*weight)) each(data<float>(*weight), H, copy);
      else if (weight) each(data<T>(*weight), H, copy);
    }
    const Prepare<T> prepare = [&](int64_t t, T* keys, T* values) {
      const T* row = data<T>(qkv) + t * qkv.stride(0);
      Angles<T> angles(data<float>(cos_sin) + data<int32_t>(positions)[t] * R, R);
      for (int64_t head = 0; head < (keys ? N + K : N); head++) {
        const T* from = row + head * H;
        T* to = head < N ? data<T>(out) + (t * N + head) * H : keys + (head - N) * H;
        if (head < N ? bool(q_weight) : bool(k_weight)) {
          norm_row(from, weights[head >= N], to, H, eps);
          from = to;
        }
        rotate_row(from, angles, to, H);
      }
      if (values) std::memcpy(values, row + (N + K) * H, K * H * sizeof(T));
    };
    with_pool<T>(k_pool.dtype(), out.dtype(), [&](auto* pool_type) {
      using P = std::remove_pointer_t<decltype(pool_type)>;
      const auto s = make_step<T, P>(qkv.size(0), N, H, k_pool, v_pool, k_scales, v_scales, slots,
                                     page_table, rows, key_ends, out, sinks, scale, softcap, window);
      run(s, num_threads, prepare);
    });
  });
}

}  // namespace attention

EXPORT(paged_attention, attention::)
EXPORT(qkv_attention, attention::)
