// The short convolution in front of a recurrence, and what later steps need of its inputs.
//
// D: inputs of the convolution.
#pragma once

#include "recurrent_step.h"

namespace recurrent {

// The convolution's input of a position up to the row's end; null for zeros.
template <class T>
const T* input_at(const Step<T>& s, const Row& row, int position) {
  if (position >= row.start) return s.x + (row.first + position - row.start) * s.x_stride;
  if (row.before) return input_at(s, *row.before, position);
  if (position >= row.base) return ring_at(s, slot_of(s, row, position));
  if (!row.base) return nullptr;
  return s.tails + (row.state * (s.taps - 1) + position - row.base + s.taps - 1) * s.D;
}

// Convolves the token at `position` into `mixed`. The row's last token also stores the inputs
// before the new state, if there is one.
template <class T>
void convolve(const Step<T>& s, const Row& row, int position) {
  const int64_t token = row.first + position - row.start;
  T* out = s.mixed + token * s.D;
  std::vector<const T*> from(s.taps);
  for (int w = 0; w < s.taps; w++) from[w] = input_at(s, row, position - s.taps + 1 + w);
  each(from[s.taps - 1], s.D, [&](VF newest, int i) {
    auto part = [&](const T* p) { return load_until(p, i, s.D); };
    VF sum = newest * part(s.weight + (s.taps - 1) * s.D);
    for (int w = 0; w + 1 < s.taps; w++)
      if (from[w]) sum += part(from[w]) * part(s.weight + w * s.D);
    if (s.bias) sum += part(s.bias);
    store_until(out, i, s.D, silu_of(round_to<T>(sum)));
  });
  const size_t bytes = s.D * sizeof(T);
  if (row.new_state < 0 || position + 1 != row.end) return;
  for (int i = 0; i + 1 < s.taps; i++) {
    T* to = s.tails + (row.new_state * (s.taps - 1) + i) * s.D;
    if (const T* x = input_at(s, row, row.newest - s.taps + 1 + i))
      std::memcpy(to, x, bytes);
    else
      std::memset(to, 0, bytes);
  }
}

// Stores the inputs of the row's last tokens over those of old tokens, which must not be read after it.
template <class T>
void keep_inputs(const Step<T>& s, const Row& row) {
  const int first = std::max({row.start, row.newest, row.end - s.taps + 1});
  for (int position = first; position < row.end; position++) {
    const int64_t token = row.first + position - row.start;
    if (s.slots[token] >= 0)
      std::memcpy(ring_at(s, s.slots[token]), s.x + token * s.x_stride, s.D * sizeof(T));
  }
}

}  // namespace recurrent
