// A step of a gated delta net or Mamba2 (minisgl_zoo/recurrent/delta_rule.py has the equations): short
// convolution, then the rule over states and the rows of the tokens since each.
//
// An item is a row of the step and a key head, with some of the value heads that read it. Where rows
// of one token continue a request's first row of the step (drafts), the item computes them after it, in
// order: each reads what the one before has written. recurrent_decode.h computes rows of one token,
// unless a new state is written at it; recurrent_extend.h computes the others.
#include "recurrent_conv.h"
#include "recurrent_decode.h"
#include "recurrent_extend.h"
#include "threads.h"

namespace recurrent {
namespace {

template <bool DELTA, class T>
void run(const Step<T>& s, const Row& row, const Heads& heads, Scratch& scratch) {
  if (row.end - row.start == 1 && row.new_state < 0) decode<DELTA>(s, row, heads, scratch);
  else extend<DELTA>(s, row, heads, scratch);
}

// How many of a key head's G value heads an item has: so many that there is an item for each thread.
int heads_of_item(int G, int num_key_heads, int num_threads) {
  const int wanted = (num_threads + num_key_heads - 1) / num_key_heads;
  return std::max(1, G / std::max(wanted, 1));
}

}  // namespace

// x [T, D] with rows apart; mixed [T, D] is scratch; weight [taps, D]; g, beta float32 [T, N]; rows
// int32 [4, B], as `PoolBatch.rows` has them. bias, skip: or null, see `RecurrentInputs`. ring: entries of
// a page in `inputs`. The others: minisgl_zoo/recurrent/pool.py.
void recurrent_step(TensorView x, TensorView mixed, TensorView g, TensorView beta, TensorView weight,
                    optional<TensorView> bias, optional<TensorView> skip,
                    TensorView states, TensorView tails, TensorView inputs, TensorView keys,
                    TensorView updates, TensorView decays, TensorView slots, TensorView row_table,
                    TensorView state_table, TensorView rows, TensorView out, int64_t ring,
                    int64_t interval, int64_t page_size, int64_t num_threads) {
  CHECK(states.ndim() == 4 && keys.ndim() == 3 && x.stride(1) == 1, "recurrent: wrong axes");
  for (const auto& tensor : {g, beta, states, updates, decays})
    CHECK(is_float32(tensor) && is_packed(tensor),
          "recurrent: gates and states must be float32, packed");
  for (const auto& tensor : {mixed, weight, tails, inputs, keys, out})
    CHECK(tensor.dtype() == x.dtype() && is_packed(tensor),
          "recurrent: cache and outputs must have the dtype of x, packed");
  CHECK(!skip || (is_float32(*skip) && is_packed(*skip)), "recurrent: skip must be float32, packed");
  CHECK(!bias || (*bias).dtype() == x.dtype(), "recurrent: bias must have the dtype of x");
  CHECK(mixed.size(1) == x.size(1) && weight.size(1) == x.size(1) && inputs.size(1) == x.size(1),
        "recurrent: the inputs have " << x.size(1) << " channels");
  with_dtype(x.dtype(), [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const int64_t B = rows.size(1);
    CHECK(is_int32(rows) && is_packed(rows) && rows.size(0) == 4, "recurrent: rows must be int32 [4, B]");
    const int32_t *r = data<int32_t>(rows), *counts = r + 2 * B, *ends = r + 3 * B;
    Step<T> s{data<T>(x), data<T>(weight), data<T>(mixed), data<T>(tails), data<T>(inputs),
              data<T>(keys), data<T>(out), data<float>(states), data<float>(updates),
              data<float>(decays), data<float>(g), data<float>(beta), data<int32_t>(slots),
              data<int32_t>(row_table), data<int32_t>(state_table), r, counts, ends,
              x.stride(0), row_table.stride(0), state_table.stride(0), int(B), int(states.size(1)),
              int(keys.size(1)), int(keys.size(2)), int(states.size(3)), int(x.size(1)),
              int(weight.size(0)), int(ring), int(interval), int(page_size),
              bias ? data<T>(*bias) : nullptr, skip ? data<float>(*skip) : nullptr};
    std::vector<Row> all(s.num_rows);
    std::vector<int> owners, firsts;  // the row of each token; the first row of each request
    std::vector<int> newest(row_table.size(0), -1), next(s.num_rows, -1);  // rows, by request, by row
    for (int i = 0; i < s.num_rows; i++) {
      int& last = newest[s.table_idxs[i]];
      all[i] = row_of(s, i, int(owners.size()), last < 0 ? nullptr : &all[last]);
      CHECK(last < 0 || (all[i].start == all[last].end && all[i].end == all[i].start + 1 &&
                         all[i].new_state < 0),
            "recurrent: a draft must be the token behind the row before, and end no interval");
      last < 0 ? firsts.push_back(i) : void(next[last] = i);
      last = i;
      owners.insert(owners.end(), s.counts[i], i);
    }
    const int num_requests = int(firsts.size());
    const int G = s.N / s.K, share = heads_of_item(G, num_requests * s.K, int(num_threads));
    const int shares = (G + share - 1) / share;  // items of a key head
    each_item(int64_t(owners.size()), num_threads, [&](int64_t t) {
      const Row& row = all[owners[t]];
      convolve(s, row, row.start + int(t) - row.first);
    });
    const int64_t items = s.K * shares;  // of a request
    each_item(num_requests * items, num_threads, [&](int64_t item) {
      static thread_local Scratch scratch;
      const int key = int(item % items / shares), part = int(item % shares), end = (key + 1) * G;
      const Heads heads{key, key * G + part * share, std::min(key * G + (part + 1) * share, end),
                        part == 0};
      for (int i = firsts[item / items]; i >= 0; i = next[i]) {
        if (item % items == 0) keep_inputs(s, all[i]);
        s.skip ? run<false>(s, all[i], heads, scratch) : run<true>(s, all[i], heads, scratch);
      }
    });
  });
}

}  // namespace recurrent

EXPORT(recurrent_step, recurrent::)
