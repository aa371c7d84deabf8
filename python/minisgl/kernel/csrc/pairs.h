// Pairs of a token and one of its experts, ordered by expert. Pair p is entry p of the ids [T, K].
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

struct Pairs {
  std::vector<int> order;   // the pairs of this rank's experts, expert after expert
  std::vector<int> begin;   // where those of each expert begin in `order`, and where the last end
  std::vector<int> chosen;  // the experts that have pairs
  Pairs(const int32_t* ids, int64_t count, int64_t first, int64_t num_held) : begin(num_held + 1) {
    auto held = [&](int64_t p) { return ids[p] >= first && ids[p] < first + num_held; };
    for (int64_t p = 0; p < count; p++)
      if (held(p)) begin[ids[p] - first + 1]++;
    for (int64_t e = 0; e < num_held; e++) begin[e + 1] += begin[e];
    order.resize(begin[num_held]);
    std::vector<int> next(begin.begin(), begin.end() - 1);
    for (int64_t p = 0; p < count; p++)
      if (held(p)) order[next[ids[p] - first]++] = int(p);
    for (int e = 0; e < num_held; e++)
      if (begin[e] < begin[e + 1]) chosen.push_back(e);
  }
};
