// How many leading ids two runs of token ids have in common: the prefix tree asks at every node.
#include "tensor.h"

int64_t common_prefix_length(TensorView a, TensorView b) {
  for (const TensorView& ids : {a, b}) {
    CHECK(is_int32(ids) && ids.ndim() == 1 && is_packed(ids),
          "common_prefix_length takes contiguous int32 arrays of one dimension");
  }
  const int32_t *x = data<int32_t>(a), *y = data<int32_t>(b);
  int64_t n = std::min(a.size(0), b.size(0)), i = 0;
  for (; i + W <= n; i += W) {
    VI u, v;
    std::memcpy(&u, x + i, sizeof(u));
    std::memcpy(&v, y + i, sizeof(v));
    if (any(u != v)) break;
  }
  while (i < n && x[i] == y[i]) i++;
  return i;
}

EXPORT(common_prefix_length)
