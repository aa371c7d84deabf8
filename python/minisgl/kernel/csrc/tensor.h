// Access to the tensors that Python passes: data, dtypes, checks.
#pragma once

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>

#include "vec.h"

using tvm::ffi::TensorView;

#define CHECK(condition, message) \
  do {                            \
    if (!(condition)) TVM_FFI_THROW(ValueError) << message; \
  } while (0)

template <class T>
T* data(const TensorView& x) {
  return static_cast<T*>(x.data_ptr());
}

// Contiguous, or empty: IsContiguous() of tvm-ffi 0.1.11 is false for some empty tensors.
inline bool is_packed(const TensorView& x) {
  return x.numel() == 0 || x.IsContiguous();
}

inline bool is_float32(const TensorView& x) {
  return x.dtype().code == kDLFloat && x.dtype().bits == 32;
}
inline bool is_int32(const TensorView& x) { return x.dtype().code == kDLInt && x.dtype().bits == 32; }

// Calls f with a null pointer of the element type: float, bf16 or f16.
template <class F>
void with_dtype(DLDataType dtype, F f) {
  if (dtype.code == kDLFloat && dtype.bits == 32) return f((float*)nullptr);
  if (dtype.code == kDLBfloat && dtype.bits == 16) return f((bf16*)nullptr);
  if (dtype.code == kDLFloat && dtype.bits == 16) return f((f16*)nullptr);
  TVM_FFI_THROW(ValueError) << "float32, bfloat16 or float16, not code " << int(dtype.code)
                            << " of " << int(dtype.bits) << " bits";
}
