// A gated short convolution: c times the convolution of b times x, channel by channel.
//
// The inputs b x of all tokens are in the pages of a window group (minisgl_zoo/recurrent/short_conv.py).
// An item has some channels of all tokens: it stores their inputs, then convolves them, so that a token
// finds those of this step and of earlier ones in the same place.
#include "tensor.h"
#include "threads.h"

namespace {

constexpr int CHANNELS = 256;  // of an item

template <class T>
struct Conv {
  const T *projected, *weight, *bias;  // [T, 3 D], [taps, D]; bias: null for none
  T *inputs, *out;                     // [P * page_size + 2, D], [T, D]
  const int32_t *slots, *table, *table_idxs, *firsts, *counts, *ends;
  int64_t stride, page_size;  // entries of a row of `table`
  int num_tokens, num_rows, D, taps;

  // The inputs of the token `back` tokens before that at `position`; null for zeros.
  const T* before(const int32_t* pages, int64_t position, int back) const {
    const int64_t at = position - back;
    if (at < 0) return nullptr;
    return inputs + (pages[at / page_size] * page_size + at % page_size) * D;
  }

  void channels(int first, int n) const {
    for (int t = 0; t < num_tokens; t++) {
      if (slots[t] < 0) continue;
      const T *b = projected + int64_t(t) * 3 * D + first, *x = b + 2 * D;
      T* to = inputs + int64_t(slots[t]) * D + first;
      each(b, n, [&](VF v, int i) { store_until(to, i, n, v * load_until(x, i, n)); });
    }
    std::vector<const T*> from(taps);  // the inputs before a token, the nearest first
    for (int row = 0; row < num_rows; row++)
      for (int k = 0; k < counts[row]; k++) {
        const T* b = projected + int64_t(firsts[row] + k) * 3 * D + first;
        const int64_t position = ends[row] - counts[row] + k;
        T* to = out + int64_t(firsts[row] + k) * D + first;
        for (int back = 1; back < taps; back++)
          from[back] = before(table + table_idxs[row] * stride, position, back);
        each(b, n, [&](VF v, int i) {
          const auto tap = [&](int back) { return load_until(weight + (taps - 1 - back) * D + first, i, n); };
          VF sum = round_to<T>(v * load_until(b + 2 * D, i, n)) * tap(0);
          for (int back = 1; back < taps; back++)
            if (from[back]) sum += load_until(from[back] + first, i, n) * tap(back);
          if (bias) sum += load_until(bias + first, i, n);
          store_until(to, i, n, load_until(b + D, i, n) * round_to<T>(sum));
        });
      }
  }
};

}  // namespace

// projected [T, 3 D]: b, c and x of each token. inputs, page_table, slots, rows: those of a `PoolBatch`
// and its `ConvLayer`. out [T, D].
void short_conv(TensorView projected, TensorView weight, optional<TensorView> bias,
                TensorView inputs, TensorView slots, TensorView page_table, TensorView rows,
                TensorView out, int64_t page_size, int64_t num_threads) {
  for (const TensorView& tensor : {projected, weight, inputs, out})
    CHECK(tensor.ndim() == 2 && tensor.dtype() == out.dtype() && is_packed(tensor),
          "short_conv: the tensors must be packed matrices of one dtype");
  const int64_t T = out.size(0), D = out.size(1), B = rows.size(1);
  CHECK(projected.size(0) == T && projected.size(1) == 3 * D && weight.size(1) == D && inputs.size(1) == D &&
            slots.numel() == T && (!bias || ((*bias).dtype() == out.dtype() && (*bias).numel() == D)),
        "short_conv: shapes differ");
  CHECK(is_int32(rows) && is_packed(rows) && rows.size(0) == 4 && is_int32(slots) && is_int32(page_table),
        "short_conv: rows must be int32 [4, B], slots and pages int32");
  with_dtype(out.dtype(), [&](auto* type) {
    using E = std::remove_pointer_t<decltype(type)>;
    const int32_t* r = data<int32_t>(rows);
    const Conv<E> conv{
        data<E>(projected), data<E>(weight), bias ? data<E>(*bias) : nullptr, data<E>(inputs), data<E>(out),
        data<int32_t>(slots), data<int32_t>(page_table), r, r + B, r + 2 * B, r + 3 * B,
        page_table.stride(0), page_size, int(T), int(B), int(D), int(weight.size(0))};
    each_item((D + CHANNELS - 1) / CHANNELS, T > 8 ? num_threads : 1, [&](int64_t item) {
      const int first = int(item) * CHANNELS;
      conv.channels(first, std::min(CHANNELS, int(D) - first));
    });
  });
}

EXPORT(short_conv)
