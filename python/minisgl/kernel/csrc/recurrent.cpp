// A step of a gated delta net or Mamba2 (minisgl/kernel/delta_rule.py has the equations): short
// convolution, then the rule over states written once and the rows of the tokens since.
//
// An item is a row of the step and a key head, with some of the value heads that read it. A decode
// row reads each state once, for the products with its key and its query, and adds what its rows
// say; it is limited by memory. Other rows, and a token at which a new state is written, go interval
// by interval as small matrix products.
//
// Axes: t tokens of an item, j rows (old tokens since the state, then t), H key dim, V value dim,
// G value heads of the item, D inputs of the convolution. ld: columns padded to vectors. DELTA:
// false for Mamba2.
#include <omp.h>

#include <algorithm>
#include <vector>

#include "tensor.h"

namespace {

constexpr float EPS = 1e-6f;  // of the norm of queries and keys
constexpr int MR = 4, NR = 4;  // rows and vectors of a product that stay in registers
constexpr int NS = W == 16 ? 8 : 4;  // vectors of a state's row that decode sums up side by side

int round_up(int n, int to) { return (n + to - 1) / to * to; }

template <class T>
struct Step {
  const T *x, *weight;  // weight [taps, D]
  T *mixed, *tails, *inputs, *keys, *out;
  float *states, *updates, *decays;
  const float *g, *beta;
  const int32_t *slots, *row_table, *state_table, *table_idxs, *starts, *ends;
  int64_t x_stride, row_stride, state_stride;
  int num_rows, N, K, H, V, D, taps, interval, page_size;
  const T* bias;      // of the convolution; null for none
  const float* skip;  // of Mamba2; null for the delta rule
};

struct Row {
  int first, start, end, base, newest;  // first: of its tokens in the step
  const int32_t *pages;                 // of the rows group
  int64_t state, new_state;             // pages; -1 for none
};

struct Heads {
  int key, from, to;  // value heads [from, to)
  bool keep_key;      // one item of a key head keeps it
};

template <class T>
Row row_of(const Step<T>& s, int r, int first) {
  Row row{first, s.starts[r], s.ends[r], 0, 0, s.row_table + s.table_idxs[r] * s.row_stride, -1, -1};
  row.base = row.start / s.interval * s.interval, row.newest = row.end / s.interval * s.interval;
  const int32_t* states = s.state_table + s.table_idxs[r] * s.state_stride;
  if (row.base) row.state = states[row.base / s.page_size - 1];
  if (row.newest > row.base) row.new_state = states[row.newest / s.page_size - 1];
  return row;
}

// Where the convolution's input of the token at a slot is (minisgl/kvcache/recurrent.py).
template <class T>
INLINE T* ring_at(const Step<T>& s, int64_t slot) {
  const int ring = std::min(s.page_size, s.taps);
  return s.inputs + (slot / s.page_size * ring + slot % s.page_size % ring) * s.D;
}

// Where the rows group has an old token.
template <class T>
INLINE int64_t slot_of(const Step<T>& s, const Row& row, int position) {
  return int64_t(row.pages[position / s.page_size]) * s.page_size + position % s.page_size;
}

// --- convolution --------------------------------------------------------------------------------

// The convolution's input of a position up to the row's end; null for zeros.
template <class T>
const T* input_at(const Step<T>& s, const Row& row, int position) {
  if (position >= row.start) return s.x + (row.first + position - row.start) * s.x_stride;
  if (position >= row.base) return ring_at(s, slot_of(s, row, position));
  if (!row.base) return nullptr;
  return s.tails + (row.state * (s.taps - 1) + position - row.base + s.taps - 1) * s.D;
}

template <class T>
void convolve(const Step<T>& s, const Row& row, int position) {
  const int64_t token = row.first + position - row.start;
  T* out = s.mixed + token * s.D;
  std::vector<const T*> from(s.taps);
  for (int w = 0; w < s.taps; w++) from[w] = input_at(s, row, position - s.taps + 1 + w);
  each(from[s.taps - 1], s.D, [&](VF newest, int i) {
    auto part = [&](const T* p) { return i + W <= s.D ? load(p + i) : load_first(p + i, s.D - i); };
    VF sum = newest * part(s.weight + (s.taps - 1) * s.D);
    for (int w = 0; w + 1 < s.taps; w++)
      if (from[w]) sum += part(from[w]) * part(s.weight + w * s.D);
    if (s.bias) sum += part(s.bias);
    store_until(out, i, s.D, silu_of(round_to<T>(sum)));
  });
  const size_t bytes = s.D * sizeof(T);
  if (row.new_state < 0 || position + 1 != row.end) return;
  for (int i = 0; i + 1 < s.taps; i++) {  // the inputs before the new state
    T* to = s.tails + (row.new_state * (s.taps - 1) + i) * s.D;
    if (const T* x = input_at(s, row, row.newest - s.taps + 1 + i))
      std::memcpy(to, x, bytes);
    else
      std::memset(to, 0, bytes);
  }
}

// Keeps the inputs of the row's last tokens, when no token reads older ones any more.
template <class T>
void keep_inputs(const Step<T>& s, const Row& row) {
  for (int position = std::max({row.start, row.newest, row.end - s.taps + 1}); position < row.end; position++) {
    const int64_t token = row.first + position - row.start;
    if (s.slots[token] >= 0)
      std::memcpy(ring_at(s, s.slots[token]), s.x + token * s.x_stride, s.D * sizeof(T));
  }
}

// --- small products -----------------------------------------------------------------------------

// c[m][n] (+)= a[m][k] * b[k][n]; n is a multiple of W.
template <int ROWS, int COLUMNS>
INLINE void tile(const float* a, int lda, const float* b, int ldb, float* c, int ldc, int k, bool add) {
  VF acc[ROWS][COLUMNS] = {};
  if (add)
    for (int i = 0; i < ROWS; i++)
      for (int j = 0; j < COLUMNS; j++) acc[i][j] = load(c + i * ldc + j * W);
  for (int p = 0; p < k; p++)
    for (int j = 0; j < COLUMNS; j++) {
      VF column = load(b + p * ldb + j * W);
      for (int i = 0; i < ROWS; i++) acc[i][j] += splat(a[i * lda + p]) * column;
    }
  for (int i = 0; i < ROWS; i++)
    for (int j = 0; j < COLUMNS; j++) store(c + i * ldc + j * W, acc[i][j]);
}

void product(const float* a, int lda, const float* b, int ldb, float* c, int ldc, int m, int n,
             int k, bool add) {
  for (int j = 0; j < n;) {
    const bool wide = j + NR * W <= n;
    for (int i = 0; i < m;) {
      const bool four = i + MR <= m;
      const float *a_i = a + i * lda, *b_j = b + j;
      float* c_ij = c + i * ldc + j;
      if (wide && four) tile<MR, NR>(a_i, lda, b_j, ldb, c_ij, ldc, k, add);
      else if (wide) tile<1, NR>(a_i, lda, b_j, ldb, c_ij, ldc, k, add);
      else if (four) tile<MR, 1>(a_i, lda, b_j, ldb, c_ij, ldc, k, add);
      else tile<1, 1>(a_i, lda, b_j, ldb, c_ij, ldc, k, add);
      i += four ? MR : 1;
    }
    j += wide ? NR * W : W;
  }
}

// out = x, normed to length `length` for the delta rule; zeros up to ld.
template <bool DELTA, class T>
INLINE void unit(const T* x, float* out, int n, int ld, float length) {
  float scale = 1.0f;
  if constexpr (DELTA) {
    VF squares = {};
    each(x, n, [&](VF v, int) { squares += v * v; });
    scale = length / std::sqrt(sum(squares) + EPS);
  }
  std::fill(out + n, out + ld, 0.0f);
  each(x, n, [&](VF v, int i) { store_until(out, i, n, v * scale); });
}

INLINE float dot(const float* a, const float* b, int ld) {
  VF acc = {};
  for (int i = 0; i < ld; i += W) acc += load(a + i) * load(b + i);
  return sum(acc);
}

INLINE float exp_of(float x) { return exp(splat(x))[0]; }

struct Scratch {
  std::vector<float> floats;
  size_t used = 0;
  float* take(size_t count) {
    float* p = floats.data() + used;
    used += round_up(count, W);
    if (used > floats.size()) TVM_FFI_THROW(RuntimeError) << "recurrent: scratch is too small";
    return p;
  }
};

// --- the delta rule, and Mamba2 -----------------------------------------------------------------

// known = faded * state^T k and out = faded * state^T q, for COLUMNS vectors of a state's rows.
// Mamba2 has no use for the first.
template <bool DELTA, int COLUMNS>
INLINE void read_state(const float* state, int V, int H, const float* k, const float* q, float faded,
                       float* known, float* out) {
  VF a[COLUMNS] = {}, b[COLUMNS] = {};
  for (int h = 0; h < H; h++)
    for (int c = 0; c < COLUMNS; c++) {
      VF x = load(state + h * V + c * W);
      if constexpr (DELTA) a[c] += splat(k[h]) * x;
      b[c] += splat(q[h]) * x;
    }
  for (int c = 0; c < COLUMNS; c++) {
    if constexpr (DELTA) store(known + c * W, a[c] * faded);
    store(out + c * W, b[c] * faded);
  }
}

// One token that ends no interval.
template <bool DELTA, class T>
void decode(const Step<T>& s, const Row& row, const Heads& heads, Scratch& scratch) {
  scratch.used = 0;
  const int key_head = heads.key, ldh = round_up(s.H, W), ldv = round_up(s.V, W);
  const int num_old = row.start - row.base;
  const T* mixed = s.mixed + int64_t(row.first) * s.D;
  float *q = scratch.take(ldh), *k = scratch.take(ldh), *old = scratch.take(ldh);
  float *with_k = scratch.take(s.interval), *with_q = scratch.take(s.interval);
  float* between = scratch.take(s.interval);
  float *known = scratch.take(ldv), *out = scratch.take(ldv), *v = scratch.take(ldv);
  unit<DELTA>(mixed + key_head * s.H, q, s.H, ldh, 1.0f / std::sqrt(float(s.H)));
  unit<DELTA>(mixed + (s.K + key_head) * s.H, k, s.H, ldh, 1.0f);
  const float own = dot(q, k, ldh);
  std::vector<int64_t> slots(num_old);
  for (int j = 0; j < num_old; j++) {
    slots[j] = slot_of(s, row, row.base + j);
    unit<DELTA>(s.keys + (slots[j] * s.K + key_head) * s.H, old, s.H, ldh, 1.0f);
    if constexpr (DELTA) with_k[j] = dot(old, k, ldh);
    with_q[j] = dot(old, q, ldh);
  }
  const int64_t slot = s.slots[row.first];
  if (slot >= 0 && heads.keep_key)
    std::memcpy(s.keys + (slot * s.K + key_head) * s.H, mixed + (s.K + key_head) * s.H,
                s.H * sizeof(T));
  for (int n = heads.from; n < heads.to; n++) {
    const int64_t at = int64_t(row.first) * s.N + n;
    const float decay = s.g[at] + (num_old ? s.decays[slots[num_old - 1] * s.N + n] : 0.0f);
    const float faded = exp_of(decay);
    std::fill(known, known + ldv, 0.0f), std::fill(out, out + ldv, 0.0f);
    if (row.state >= 0) {
      const float* state = s.states + (row.state * s.N + n) * s.H * s.V;
      int i = 0;
      for (; i + NS * W <= s.V; i += NS * W)
        read_state<DELTA, NS>(state + i, s.V, s.H, k, q, faded, known + i, out + i);
      for (; i + NR * W <= s.V; i += NR * W)
        read_state<DELTA, NR>(state + i, s.V, s.H, k, q, faded, known + i, out + i);
      for (; i + W <= s.V; i += W)
        read_state<DELTA, 1>(state + i, s.V, s.H, k, q, faded, known + i, out + i);
      for (; i < s.V; i++)
        for (int h = 0; h < s.H; h++) {
          const float x = faded * state[h * s.V + i];
          known[i] += k[h] * x, out[i] += q[h] * x;
        }
    }
    for (int j = 0; j < num_old; j++) between[j] = s.decays[slots[j] * s.N + n];
    for (int j = 0; j < num_old; j += W) store(between + j, exp(decay - load(between + j)));
    for (int j = 0; j < num_old; j++) {
      const VF a = splat(between[j] * with_k[j]), b = splat(between[j] * with_q[j]);
      each(s.updates + (slots[j] * s.N + n) * s.V, s.V, [&](VF u, int i) {
        if constexpr (DELTA) store(known + i, load(known + i) + a * u);
        store(out + i, load(out + i) + b * u);
      });
    }
    const float beta = s.beta[at];
    T* to = s.out + at * s.V;
    each(mixed + 2 * s.K * s.H + n * s.V, s.V, [&](VF value, int i) {
      VF u = beta * (DELTA ? value - load(known + i) : value);
      store(v + i, u);
      VF y = load(out + i) + own * u;
      store_until(to, i, s.V, DELTA ? y : y + s.skip[n] * value);
    });
    if (slot < 0) continue;
    std::memcpy(s.updates + (slot * s.N + n) * s.V, v, s.V * sizeof(float));
    s.decays[slot * s.N + n] = decay;
  }
}

// Any number of tokens.
template <bool DELTA, class T>
void extend(const Step<T>& s, const Row& row, const Heads& heads, Scratch& scratch) {
  scratch.used = 0;
  const int key_head = heads.key, G = heads.to - heads.from, C = s.interval, H = s.H, V = s.V;
  const int ldh = round_up(H, W), ldv = round_up(V, W), ldj = round_up(C, W);
  float* states = scratch.take(size_t(G) * H * ldv);
  float *keys = scratch.take(C * ldh), *turned = scratch.take(ldh * ldj), *queries = scratch.take(C * ldh);
  float *with_k = scratch.take(C * ldj), *with_q = scratch.take(C * ldj), *scores = scratch.take(std::max(H, C) * ldj);
  float *updates = scratch.take(C * ldv), *outs = scratch.take(C * ldv);
  float *decays = scratch.take(ldj), *between = scratch.take(ldj);
  std::fill(states, states + size_t(G) * H * ldv, 0.0f);
  if (row.state >= 0)
    for (int h = 0; h < G * H; h++)
      std::memcpy(states + h * ldv, s.states + ((row.state * s.N + heads.from) * H + h) * V, V * 4);

  for (int at = row.start; at < row.end;) {
    const int base = at / C * C, until = std::min(base + C, row.end);
    const int num_old = at - base, count = until - at, J = num_old + count;
    auto token = [&](int j) { return int64_t(row.first) + base + j - row.start; };
    auto is_old = [&](int j) { return base + j < row.start; };
    for (int j = 0; j < J; j++) {
      const T* from = is_old(j) ? s.keys + (slot_of(s, row, base + j) * s.K + key_head) * H
                                : s.mixed + token(j) * s.D + (s.K + key_head) * H;
      unit<DELTA>(from, keys + j * ldh, H, ldh, 1.0f);
      if (is_old(j)) continue;
      unit<DELTA>(s.mixed + token(j) * s.D + key_head * H, queries + (j - num_old) * ldh, H, ldh,
                  1.0f / std::sqrt(float(H)));
      const int64_t slot = s.slots[token(j)];
      if (base + j >= row.newest && slot >= 0 && heads.keep_key)
        std::memcpy(s.keys + (slot * s.K + key_head) * H, from, H * sizeof(T));
    }
    for (int h = 0; h < H; h++) {
      for (int j = 0; j < J; j++) turned[h * ldj + j] = keys[j * ldh + h];
      std::fill(turned + h * ldj + J, turned + (h + 1) * ldj, 0.0f);
    }
    if (DELTA) product(keys + num_old * ldh, ldh, turned, ldj, with_k, ldj, count, ldj, H, false);
    product(queries, ldh, turned, ldj, with_q, ldj, count, ldj, H, false);

    for (int head = 0; head < G; head++) {
      const int n = heads.from + head;
      float* state = states + size_t(head) * H * ldv;
      float* faded = scores;  // [H][ldj], when the scores [count][ldj] are used
      std::fill(decays, decays + ldj, 0.0f);
      for (int j = 0; j < J; j++) {
        const int64_t slot = is_old(j) ? slot_of(s, row, base + j) : -1;
        decays[j] = slot >= 0 ? s.decays[slot * s.N + n]
                              : s.g[token(j) * s.N + n] + (j ? decays[j - 1] : 0.0f);
        if (slot < 0) continue;
        std::fill(updates + j * ldv, updates + (j + 1) * ldv, 0.0f);
        std::memcpy(updates + j * ldv, s.updates + (slot * s.N + n) * V, V * 4);
      }
      if (DELTA)
        product(keys + num_old * ldh, ldh, state, ldv, updates + num_old * ldv, ldv, count, ldv, H, false);
      product(queries, ldh, state, ldv, outs, ldv, count, ldv, H, false);
      for (int t = 0; t < count; t++) {
        const int j = num_old + t;
        const float decay = decays[j], beta = s.beta[token(j) * s.N + n], fade = exp_of(decay);
        for (int i = 0; i < ldj; i += W) {
          VI later = lanes() + i > j;
          VF part = select(later, splat(0), exp(splat(decay) - load(decays + i)));
          if (DELTA) store(between + i, part * load(with_k + t * ldj + i));
          store(scores + t * ldj + i, part * load(with_q + t * ldj + i));
        }
        const T* value = s.mixed + token(j) * s.D + 2 * s.K * H + n * V;
        for (int i = 0; i < ldv; i += NR * W) {
          VF sum[NR];
          const int columns = std::min(NR, (ldv - i) / W);
          for (int c = 0; DELTA && c < columns; c++) sum[c] = load(updates + j * ldv + i + c * W) * fade;
          for (int before = 0; DELTA && before < j; before++)
            for (int c = 0; c < columns; c++)
              sum[c] += splat(between[before]) * load(updates + before * ldv + i + c * W);
          for (int c = 0; c < columns; c++) {
            const int from = i + c * W, left = V - from;
            VF v = left >= W ? load(value + from) : left > 0 ? load_first(value + from, left) : VF{};
            store(updates + j * ldv + from, beta * (DELTA ? v - sum[c] : v));
            VF y = load(outs + t * ldv + from) * fade;
            store(outs + t * ldv + from, DELTA ? y : y + s.skip[n] * v);
          }
        }
      }
      product(scores, ldj, updates, ldv, outs, ldv, count, ldv, J, true);
      for (int t = 0; t < count; t++) {
        const int64_t place = token(num_old + t) * s.N + n;
        each(outs + t * ldv, V, [&](VF out, int i) { store_until(s.out + place * V, i, V, out); });
        const int64_t slot = s.slots[token(num_old + t)];
        if (at + t < row.newest || slot < 0) continue;
        std::memcpy(s.updates + (slot * s.N + n) * V, updates + (num_old + t) * ldv, V * 4);
        s.decays[slot * s.N + n] = decays[num_old + t];
      }
      if (until % C) continue;
      const float last = decays[J - 1], fade = exp_of(last);
      for (int j = 0; j < ldj; j += W) {
        VF rest = select(lanes() + j < J, exp(splat(last) - load(decays + j)), splat(0));
        for (int h = 0; h < H; h++) store(faded + h * ldj + j, rest * load(turned + h * ldj + j));
      }
      for (int i = 0; i < H * ldv; i += W) store(state + i, load(state + i) * fade);
      product(faded, ldj, updates, ldv, state, ldv, H, ldv, J, true);
      if (until != row.newest || row.new_state < 0) continue;
      for (int h = 0; h < H; h++)
        std::memcpy(s.states + ((row.new_state * s.N + n) * H + h) * V, state + h * ldv, V * 4);
    }
    at = until;
  }
}

template <bool DELTA, class T>
void run(const Step<T>& s, const Row& row, const Heads& heads, Scratch& scratch) {
  if (row.end - row.start == 1 && row.new_state < 0) decode<DELTA>(s, row, heads, scratch);
  else extend<DELTA>(s, row, heads, scratch);
}

// How many of a key head's G value heads an item has, so that there is one for each thread.
int shared_by(int G, int num_key_heads, int num_threads) {
  const int wanted = (num_threads + num_key_heads - 1) / num_key_heads;
  return std::max(1, G / std::max(wanted, 1));
}

bool is_float32(const TensorView& x) {
  return x.dtype().code == kDLFloat && x.dtype().bits == 32 && is_packed(x);
}

}  // namespace

// x [T, D] with rows apart; mixed [T, D] is scratch; weight [taps, D]; g, beta float32 [T, N]; rows
// int32 [3, B]: table_idxs, starts, ends. bias, skip: of Mamba2, see `StateSpace`. The others:
// minisgl/kvcache/recurrent.py.
void recurrent_step(TensorView x, TensorView mixed, TensorView g, TensorView beta, TensorView weight,
                    tvm::ffi::Optional<TensorView> bias, tvm::ffi::Optional<TensorView> skip,
                    TensorView states, TensorView tails, TensorView inputs, TensorView keys,
                    TensorView updates, TensorView decays, TensorView slots, TensorView row_table,
                    TensorView state_table, TensorView rows, TensorView out, int64_t interval,
                    int64_t page_size, int64_t num_threads) {
  CHECK(states.ndim() == 4 && keys.ndim() == 3 && x.stride(1) == 1, "recurrent: wrong axes");
  for (const auto& tensor : {g, beta, states, updates, decays})
    CHECK(is_float32(tensor), "recurrent: gates and states must be float32, packed");
  for (const auto& tensor : {mixed, weight, tails, inputs, keys, out})
    CHECK(tensor.dtype() == x.dtype() && is_packed(tensor), "recurrent: another dtype than x");
  CHECK(!skip.has_value() || is_float32(*skip), "recurrent: skip must be float32");
  CHECK(!bias.has_value() || (*bias).dtype() == x.dtype(), "recurrent: another dtype than x");
  CHECK(mixed.size(1) == x.size(1) && weight.size(1) == x.size(1) && inputs.size(1) == x.size(1),
        "recurrent: the inputs have " << x.size(1) << " channels");
  with_dtype(x.dtype(), [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const int64_t B = rows.size(1);
    const int32_t* r = data<int32_t>(rows);
    Step<T> s{data<T>(x), data<T>(weight), data<T>(mixed), data<T>(tails), data<T>(inputs),
              data<T>(keys), data<T>(out), data<float>(states), data<float>(updates),
              data<float>(decays), data<float>(g), data<float>(beta), data<int32_t>(slots),
              data<int32_t>(row_table), data<int32_t>(state_table), r, r + B, r + 2 * B,
              x.stride(0), row_table.stride(0), state_table.stride(0), int(B), int(states.size(1)),
              int(keys.size(1)), int(keys.size(2)), int(states.size(3)), int(x.size(1)),
              int(weight.size(0)), int(interval), int(page_size),
              bias.has_value() ? data<T>(*bias) : nullptr,
              skip.has_value() ? data<float>(*skip) : nullptr};
    std::vector<Row> all;
    std::vector<int> owners;
    for (int i = 0; i < s.num_rows; i++) {
      all.push_back(row_of(s, i, int(owners.size())));
      owners.insert(owners.end(), s.ends[i] - s.starts[i], i);
    }
    const int ldh = round_up(s.H, W), ldv = round_up(s.V, W), ldj = round_up(s.interval, W);
    const int G = s.N / s.K, share = shared_by(G, s.num_rows * s.K, int(num_threads));
    const int shares = (G + share - 1) / share;  // items of a key head
    const size_t need = size_t(share) * s.H * ldv + 2 * ldj * ldh + ldh * ldj + 2 * ldj * ldj +
                        std::max(s.H, ldj) * ldj + 2 * ldj * ldv + 8 * ldj + 4 * (ldh + ldv);
#pragma omp parallel num_threads(num_threads)
    {
#pragma omp for schedule(static)
      for (size_t t = 0; t < owners.size(); t++) {
        const Row& row = all[owners[t]];
        convolve(s, row, row.start + int(t) - row.first);
      }
#pragma omp for schedule(static) nowait
      for (int i = 0; i < s.num_rows; i++) keep_inputs(s, all[i]);
      Scratch scratch{std::vector<float>(need)};
#pragma omp for schedule(dynamic) collapse(2)
      for (int i = 0; i < s.num_rows; i++)
        for (int item = 0; item < s.K * shares; item++) {
          const int key = item / shares, part = item % shares, end = (key + 1) * G;
          const Heads heads{key, key * G + part * share, std::min(key * G + (part + 1) * share, end),
                            part == 0};
          s.skip ? run<false>(s, all[i], heads, scratch) : run<true>(s, all[i], heads, scratch);
        }
    }
  });
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(recurrent_step, recurrent_step);
