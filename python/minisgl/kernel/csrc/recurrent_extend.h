// The recurrence of any number of tokens, interval by interval, as small GEMMs.
//
// Axes: t tokens of an item, j rows (old tokens since the state, then t), H key dim, V value dim, G
// value heads of the item. ld: columns padded to vectors. DELTA: false for Mamba2.
#pragma once

#include "recurrent_product.h"
#include "recurrent_step.h"

namespace recurrent {

// Computes the outputs of an item, the new state, and the rows of the tokens after it.
template <bool DELTA, class T>
void extend(const Step<T>& s, const Row& row, const Heads& heads, Scratch& scratch) {
  const int key_head = heads.key, G = heads.to - heads.from, C = s.interval, H = s.H, V = s.V;
  const int ldh = round_up(H, W), ldv = round_up(V, W), ldj = round_up(C, W);
  scratch.begin(size_t(G) * H * ldv + 2 * C * (ldh + ldj + ldv) + ldh * ldj + std::max(H, C) * ldj +
                2 * ldj);
  float* states = scratch.take(size_t(G) * H * ldv);
  float *keys = scratch.take(C * ldh), *queries = scratch.take(C * ldh);
  float* turned = scratch.take(ldh * ldj);  // keys, transposed
  float *with_k = scratch.take(C * ldj), *with_q = scratch.take(C * ldj);
  float* scores = scratch.take(std::max(H, C) * ldj);
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
    if (DELTA) gemm(keys + num_old * ldh, ldh, turned, ldj, with_k, ldj, count, ldj, H, false);
    gemm(queries, ldh, turned, ldj, with_q, ldj, count, ldj, H, false);

    for (int head = 0; head < G; head++) {
      const int n = heads.from + head;
      float* state = states + size_t(head) * H * ldv;
      float* faded = scores;  // [H][ldj], written when the scores [count][ldj] have been read
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
        gemm(keys + num_old * ldh, ldh, state, ldv, updates + num_old * ldv, ldv, count, ldv, H, false);
      gemm(queries, ldh, state, ldv, outs, ldv, count, ldv, H, false);
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
          for (int c = 0; DELTA && c < columns; c++)
            sum[c] = load(updates + j * ldv + i + c * W) * fade;
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
      gemm(scores, ldj, updates, ldv, outs, ldv, count, ldv, J, true);
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
      gemm(faded, ldj, updates, ldv, state, ldv, H, ldv, J, true);
      if (until != row.newest || row.new_state < 0) continue;
      for (int h = 0; h < H; h++)
        std::memcpy(s.states + ((row.new_state * s.N + n) * H + h) * V, state + h * ldv, V * 4);
    }
    at = until;
  }
}

}  // namespace recurrent
