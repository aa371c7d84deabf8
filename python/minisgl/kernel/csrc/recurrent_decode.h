// The recurrence of a row of one token that ends no interval, limited by memory: each state is read
// once, for the token's key and query, and the old tokens' updates are added.
//
// Axes: t tokens of an item, j rows (old tokens since the state, then t), H key dim, V value dim, G
// value heads of the item. ld: columns padded to vectors. DELTA: false for Mamba2.
#pragma once

#include "recurrent_product.h"
#include "recurrent_step.h"

namespace recurrent {

constexpr int NS = W == 16 ? 8 : 4;  // vectors of a state's row that are summed side by side

// known = faded * state^T k, which Mamba2 does not need, and out = faded * state^T q, for COLUMNS
// vectors of a state's rows.
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

// Computes the outputs of an item, and stores the token's key, updates and decays.
template <bool DELTA, class T>
void decode(const Step<T>& s, const Row& row, const Heads& heads, Scratch& scratch) {
  const int key_head = heads.key, ldh = round_up(s.H, W), ldv = round_up(s.V, W);
  const int num_old = row.start - row.base;
  scratch.begin(3 * (s.interval + ldh + ldv));
  const T* mixed = s.mixed + int64_t(row.first) * s.D;
  float *q = scratch.take(ldh), *k = scratch.take(ldh), *old = scratch.take(ldh);
  float *with_k = scratch.take(s.interval), *with_q = scratch.take(s.interval);
  float* between = scratch.take(s.interval);
  float *known = scratch.take(ldv), *out = scratch.take(ldv), *v = scratch.take(ldv);
  unit<DELTA>(mixed + key_head * s.H, q, s.H, ldh, 1.0f / std::sqrt(float(s.H)));
  unit<DELTA>(mixed + (s.K + key_head) * s.H, k, s.H, ldh, 1.0f);
  const float own = dot(q, k, ldh);
  std::vector<int64_t> slots(num_old);
  std::vector<const T*> keys(num_old);
  for (int j = 0; j < num_old; j++) {
    slots[j] = slot_of(s, row, row.base + j);
    keys[j] = s.keys + (slots[j] * s.K + key_head) * s.H;
  }
  // Another item stores the keys of this step, perhaps later.
  const Row* before = row.before;
  for (int j = num_old - 1; j >= 0 && before; j--, before = before->before)
    keys[j] = s.mixed + int64_t(before->first) * s.D + (s.K + key_head) * s.H;
  for (int j = 0; j < num_old; j++) {
    unit<DELTA>(keys[j], old, s.H, ldh, 1.0f);
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

}  // namespace recurrent
