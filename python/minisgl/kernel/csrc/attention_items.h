// The items of a step of attention, and the order of its work.
//
//   queries  |== tile ==|== tile ==|=|        a tile: up to TILE query vectors (tokens x query heads
//   keys     |=== span ===|=== span ==|       of one key/value head)
//                                             spans: only where there are too few tiles for the cores
#pragma once

#include <functional>

#include "attention_item.h"
#include "threads.h"

namespace attention {

constexpr int TILE = 64 / MR * MR;  // query vectors: so many repay the transposition of a block of keys
constexpr int MIN_SPAN = 256;  // keys: to merge a shorter span takes longer than it saves

// The items of a step in the order of their work, and the merges that follow them.
struct Work {
  std::vector<Item> items;
  std::vector<Merge> merges;
  std::vector<float> memory;      // of partial results
  std::vector<float*> partials;   // where each begins
  int num_threads;
};

// Divides a step, for at most so many threads.
inline Work divide(const Shape& s, int num_threads) {
  const int tile_queries = std::max(1, TILE / s.group), ld = round_up(s.H, 32);
  Work done;
  std::vector<Item> tiles;
  double work = 0;  // query vectors x keys
  int token = 0;
  for (int row = 0; row < s.num_rows; row++)
    for (int begin = s.ends[row] - s.lengths[row]; begin < s.ends[row]; begin += tile_queries) {
      int n = std::min(tile_queries, s.ends[row] - begin);
      int key_begin = first_key(s, begin), end = begin + n;
      for (int i = 0; s.key_ends && i < n; i++) end = std::max(end, s.key_ends[token + i]);
      for (int head = 0; head < s.num_kv_heads; head++)
        tiles.push_back({row, head, token, begin, n, key_begin, end, -1});
      work += double(n * s.group) * (end - key_begin) * s.num_kv_heads;
      token += n;
    }
  // To start the other threads takes a few microseconds, as long as about 100,000 multiplications.
  if (work * s.H < 100e3) num_threads = 1;
  done.num_threads = num_threads;

  std::vector<Item>& items = done.items;
  std::vector<size_t> offsets;
  size_t partial_floats = 0;
  for (const Item& tile : tiles) {
    int M = tile.num_queries * s.group;
    // With four items for each thread, the threads end at about the same time. A tile with more than a
    // quarter of a thread's work is split into equal spans.
    double share = work / (4.0 * num_threads) / M;
    int length = tile.key_end - tile.key_begin;
    int spans = num_threads == 1 ? 1 : int(length / std::max(share, double(MIN_SPAN)) + 0.5);
    if (spans <= 1) {
      items.push_back(tile);
      continue;
    }
    int step = round_up((length + spans - 1) / spans, BLOCK);
    Merge merge{tile, int(offsets.size()), 0};
    for (int begin = tile.key_begin; begin < tile.key_end; begin += step) {
      Item item = tile;
      item.key_begin = begin;
      item.key_end = std::min(begin + step, tile.key_end);
      item.partial = int(offsets.size());
      items.push_back(item);
      offsets.push_back(partial_floats);
      partial_floats += size_t(M) * (ld + 2);
    }
    merge.end = int(offsets.size());
    done.merges.push_back(merge);
  }
  done.memory.resize(partial_floats);
  for (size_t offset : offsets) done.partials.push_back(done.memory.data() + offset);
  // Long items first: a causal prefill's last tiles see the most keys.
  std::stable_sort(items.begin(), items.end(), [](const Item& a, const Item& b) {
    return int64_t(a.num_queries) * (a.key_end - a.key_begin) >
           int64_t(b.num_queries) * (b.key_end - b.key_begin);
  });
  return done;
}

// Computes token t's query, and its keys and values [K, H]. These are null for a token whose key and
// value are in a page of the prefix cache already (slot -1).
template <class T>
using Prepare = std::function<void(int64_t t, T* keys, T* values)>;

// Stores the step's keys and values, then attends.
template <class T, class P>
void run(const Step<T, P>& s, int num_threads, const Prepare<T>& prepare) {
  const Work work = divide(s, num_threads);
  const int64_t width = int64_t(s.num_kv_heads) * s.H;
  each_item(s.num_tokens, work.num_threads, [&](int64_t t) {
    const int64_t slot = s.slots[t], at = slot * width;
    if (slot < 0) {
      prepare(t, nullptr, nullptr);
    } else if constexpr (Step<T, P>::QUANTISED) {
      static thread_local std::vector<T> made;
      made.resize(2 * width);
      T *keys = made.data(), *values = keys + width;
      prepare(t, keys, values);
      float *k_scales = s.k_scales + slot * s.scale_stride,
            *v_scales = s.v_scales + slot * s.scale_stride;
      for (int k = 0, h = 0; k < s.num_kv_heads; k++, h += s.H) {
        quantise_row(keys + h, s.k_pool + at + h, s.H, k_scales + k);
        quantise_row(values + h, s.v_pool + at + h, s.H, v_scales + k);
      }
    } else {
      prepare(t, s.k_pool + at, s.v_pool + at);
    }
  });
  // Everything is stored before anything attends.
  each_item(int64_t(work.items.size()), work.num_threads, [&](int64_t i) {
    static thread_local Scratch scratch;
    const Item& item = work.items[i];
    attend(s, item, scratch, item.partial < 0 ? nullptr : work.partials[item.partial]);
  });
  each_item(int64_t(work.merges.size()), work.num_threads,
            [&](int64_t i) { merge(s, work.merges[i], work.partials); });
}

// run() for inputs of type T and each type of cache. A file for each T compiles it (attention_f16.cpp
// and so on), so that compilers work side by side.
#define RUN(KIND, T)                                                      \
  KIND template void run(const Step<T, T>&, int, const Prepare<T>&);      \
  KIND template void run(const Step<T, i8>&, int, const Prepare<T>&);     \
  KIND template void run(const Step<T, e4m3>&, int, const Prepare<T>&);
RUN(extern, float)
RUN(extern, bf16)
RUN(extern, f16)

}  // namespace attention
