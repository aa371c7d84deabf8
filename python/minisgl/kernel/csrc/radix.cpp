// How many leading ids two runs of token ids have in common: the prefix tree asks at every node.
#include "tensor.h"

int64_t common_prefix_length(TensorView a, TensorView b) {
  for (const TensorView& ids : {a, b}) {
    // By IsContiguous() of tvm-ffi 0.1.11, an empty NumPy array, of stride 0, is not.
    CHECK(is_int32(ids) && ids.ndim() == 1 && (ids.size(0) < 2 || ids.stride(0) == 1),
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

TVM_FFI_DLL_EXPORT_TYPED_FUNC(common_prefix_length, common_prefix_length);
