// Copies weights and checks in the same pass whether they are finite. Memory limits the copy, so
// the check costs little in it; a second pass, over bytes that have left the caches, takes twice as
// long.
#include <algorithm>

#include "tensor.h"
#include "threads.h"

namespace {

constexpr int64_t SERIAL = 1 << 16;  // bytes of an item, worth the start of a thread

// Whether all n numbers are finite; copies them to target if COPIES. A number is NaN or infinite if
// all bits of `mask` are set. Only then does adding the lowest of them carry into the sign bit.
template <class U, bool COPIES>
bool finite(const U* source, U* target, int64_t n, U mask, int64_t num_threads) {
  typedef U V __attribute__((vector_size(W * 4)));
  constexpr int64_t LANES = sizeof(V) / sizeof(U);
  constexpr int64_t CHUNK = SERIAL / sizeof(V);  // vectors
  const U lowest = mask & -mask;
  const int64_t vectors = n / LANES;
  std::atomic<U> found{0};
  each_item((vectors + CHUNK - 1) / CHUNK, num_threads, [&](int64_t chunk) {
    V all = {};
    for (int64_t i = chunk * CHUNK; i < std::min((chunk + 1) * CHUNK, vectors); i++) {
      V v;
      std::memcpy(&v, source + i * LANES, sizeof(v));
      if (COPIES) std::memcpy(target + i * LANES, &v, sizeof(v));
      all |= (v & mask) + lowest;
    }
    U some = 0;
    for (int64_t l = 0; l < LANES; l++) some |= all[l];
    found.fetch_or(some, std::memory_order_relaxed);
  });
  U carries = found;
  for (int64_t i = vectors * LANES; i < n; i++) {
    if (COPIES) target[i] = source[i];
    carries |= U((source[i] & mask) + lowest);
  }
  return !(carries >> (8 * sizeof(U) - 1));
}

}  // namespace

// Copies source to target, if there is one, and returns whether all numbers are finite. Both are
// contiguous and of one dtype: float32, bfloat16, float16 or float8 e4m3 without infinity.
bool copy_finite(TensorView source, optional<TensorView> target, int64_t num_threads) {
  const DLDataType dtype = source.dtype();
  const int64_t n = source.numel();
  CHECK(is_packed(source) && (!target || (is_packed(*target) && (*target).dtype() == dtype &&
                                          (*target).numel() == n)),
        "copy_finite: contiguous tensors of one dtype and size");
  const auto check = [&](auto mask) {
    using U = decltype(mask);
    const U* from = data<U>(source);
    return target ? finite<U, true>(from, data<U>(*target), n, mask, num_threads)
                  : finite<U, false>(from, nullptr, n, mask, num_threads);
  };
  if (dtype.code == kDLFloat8_e4m3fn) return check(uint8_t(0x7f));
  if (dtype.code == kDLFloat && dtype.bits == 32) return check(uint32_t(0x7f800000));
  if (dtype.code == kDLFloat && dtype.bits == 16) return check(uint16_t(0x7c00));
  if (dtype.code == kDLBfloat) return check(uint16_t(0x7f80));
  throw Error("ValueError") << "copy_finite: code " << int(dtype.code) << " of "
                            << int(dtype.bits) << " bits";
}

EXPORT(copy_finite)
