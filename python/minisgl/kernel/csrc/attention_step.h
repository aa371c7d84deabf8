// A step of attention as its kernels see it: arguments, items of work, addresses of keys and values.
//
// T is the inputs' type. P is the cache's: T, or numbers of 8 bits (quantised.h). The scale of a key
// multiplies its score, the scale of a value its weight.
#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "quantised.h"
#include "scratch.h"

namespace attention {

constexpr int BLOCK = 64;  // keys; scores, keys and values of a block stay in the L1/L2 cache
constexpr float LOWEST = std::numeric_limits<float>::lowest();

// What the division of a step into items depends on.
struct Shape {
  const int32_t *lengths, *ends;
  const int32_t* key_ends;  // of each token, or null: its keys end with itself
  int num_tokens, num_rows, num_heads, num_kv_heads, group, H, page_size, window;  // window 0: none
};

template <class T, class P>
struct Step : Shape {
  static constexpr bool QUANTISED = !std::is_same_v<T, P>;
  const T* q;
  T* out;
  P *k_pool, *v_pool;
  float *k_scales, *v_scales;  // where QUANTISED, of slot s and head k at [s * scale_stride + k]
  int64_t scale_stride;        // 0: all slots share the scales of their head
  int64_t q_stride, table_stride;  // elements between tokens, rows
  const int32_t *slots, *table, *table_idxs;
  const float* sinks;    // a logit per query head, or null
  float scale, softcap;  // softcap 0: none
};

struct Item {
  int row, kv_head;
  int token, position, num_queries;  // of the tile's first query: index in the batch, position
  int key_begin, key_end;
  int partial;  // index of this span's partial result, -1 where the tile has one span only
};

struct Merge {  // partial results [begin, end) make one tile
  Item tile;
  int begin, end;
};

// The first key that a query at `position` sees.
inline int first_key(const Shape& s, int position) {
  return s.window ? std::max(0, position - s.window + 1) : 0;
}

// The end of the keys that token `t` of the step, at `position`, sees.
inline int key_end(const Shape& s, int t, int position) {
  return s.key_ends ? s.key_ends[t] : position + 1;
}

// The keys and values of a block: where they are, and their scales.
template <class P>
struct Block {
  const P *keys[BLOCK], *values[BLOCK];
  float key_scales[BLOCK], value_scales[BLOCK];
};

// Finds the block of positions [begin, end). Behind `end` it repeats the last key and value, because
// memory that was never written may hold NaN.
template <class T, class P>
void locate(const Step<T, P>& s, const Item& item, int begin, int end, Block<P>& block) {
  const int32_t* pages = s.table + s.table_idxs[item.row] * s.table_stride;
  int64_t stride = int64_t(s.num_kv_heads) * s.H, head = int64_t(item.kv_head) * s.H;
  int page = begin / s.page_size, offset = begin % s.page_size;
  int64_t slot = 0;
  for (int j = 0; j < BLOCK; j++) {
    if (begin + j < end) {
      slot = int64_t(pages[page]) * s.page_size + offset;
      if (++offset == s.page_size) offset = 0, page++;
    }
    block.keys[j] = s.k_pool + slot * stride + head;
    block.values[j] = s.v_pool + slot * stride + head;
    if constexpr (Step<T, P>::QUANTISED) {
      block.key_scales[j] = s.k_scales[slot * s.scale_stride + item.kv_head];
      block.value_scales[j] = s.v_scales[slot * s.scale_stride + item.kv_head];
    }
  }
}

}  // namespace attention
