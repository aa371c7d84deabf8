// A step of a recurrent layer as its kernels see it: tensors, rows, heads of an item.
#pragma once

#include <algorithm>
#include <vector>

#include "scratch.h"

namespace recurrent {

template <class T>
struct Step {
  const T *x, *weight;  // weight [taps, D]
  T *mixed, *tails, *inputs, *keys, *out;
  float *states, *updates, *decays;
  const float *g, *beta;
  const int32_t *slots, *row_table, *state_table, *table_idxs, *counts, *ends;
  int64_t x_stride, row_stride, state_stride;
  int num_rows, N, K, H, V, D, taps, ring, interval, page_size;
  const T* bias;      // of the convolution; null for none
  const float* skip;  // of Mamba2; null for the delta rule
};

struct Row {
  int first;                // of its tokens in the step
  int start, end;           // positions of its tokens
  int base, newest;         // the last multiple of the interval up to start, and up to end
  const int32_t* pages;     // of the rows group
  int64_t state, new_state;  // pages of the states at base and newest; -1 for none
  const Row* before;        // the row of this step that ends at start; null for none
};

struct Heads {
  int key, from, to;  // value heads [from, to)
  bool keep_key;      // whether this item stores the keys of its key head
};

// Row r of the step, whose first token is `first`. before: of the same request, or null.
template <class T>
Row row_of(const Step<T>& s, int r, int first, const Row* before) {
  const int32_t* pages = s.row_table + s.table_idxs[r] * s.row_stride;
  Row row{first, s.ends[r] - s.counts[r], s.ends[r], 0, 0, pages, -1, -1, before};
  row.base = row.start / s.interval * s.interval, row.newest = row.end / s.interval * s.interval;
  const int32_t* states = s.state_table + s.table_idxs[r] * s.state_stride;
  if (row.base) row.state = states[row.base / s.page_size - 1];
  if (row.newest > row.base) row.new_state = states[row.newest / s.page_size - 1];
  return row;
}

// The stored input of the convolution of the token at a slot (minisgl_zoo/recurrent/pool.py).
template <class T>
INLINE T* ring_at(const Step<T>& s, int64_t slot) {
  return s.inputs + (slot / s.page_size * s.ring + slot % s.page_size % s.ring) * s.D;
}

// The slot of an old token in the rows group.
template <class T>
INLINE int64_t slot_of(const Step<T>& s, const Row& row, int position) {
  return int64_t(row.pages[position / s.page_size]) * s.page_size + position % s.page_size;
}

}  // namespace recurrent
