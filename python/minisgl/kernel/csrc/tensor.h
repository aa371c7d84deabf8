// What passes between Python and the kernels: tensors, numbers and errors.
//
// tvm-ffi loads the library and calls its functions by a C interface (tvm/ffi/c_api.h), which this
// wraps. tvm-ffi's own C++ headers do the same, and took a third of the kernels' compilation
// (docs/decisions/0068-c-interface-of-tvm-ffi.md).
#pragma once

#include <tvm/ffi/c_api.h>

#include <exception>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>

#include "vec.h"

using std::optional;

// Becomes an exception of Python: `kind` is the name of its type.
struct Error : std::exception {
  explicit Error(const char* kind) : kind(kind) {}
  Error& operator<<(const char* text) { return message += text, *this; }
  Error& operator<<(int64_t number) { return *this << std::to_string(number).c_str(); }
  const char* what() const noexcept override { return message.c_str(); }
  const char* kind;
  std::string message;
};

// Raises ValueError with a message, whose parts << joins, if the condition does not hold.
#define CHECK(condition, message) \
  do {                            \
    if (!(condition)) throw Error("ValueError") << message; \
  } while (0)

inline bool operator==(DLDataType a, DLDataType b) {
  return a.code == b.code && a.bits == b.bits && a.lanes == b.lanes;
}
inline bool operator!=(DLDataType a, DLDataType b) { return !(a == b); }

// A tensor that Python owns during the call.
class TensorView {
 public:
  explicit TensorView(const DLTensor* tensor) : tensor_(*tensor) {}
  void* data_ptr() const { return tensor_.data; }
  DLDataType dtype() const { return tensor_.dtype; }
  int ndim() const { return tensor_.ndim; }
  // A negative dimension counts from the last one.
  int64_t size(int64_t dim) const { return tensor_.shape[index(dim)]; }
  int64_t stride(int64_t dim) const { return tensor_.strides[index(dim)]; }
  bool has_strides() const { return tensor_.strides != nullptr; }
  int64_t numel() const {
    int64_t all = 1;
    for (int i = 0; i < tensor_.ndim; i++) all *= tensor_.shape[i];
    return all;
  }

 private:
  int64_t index(int64_t dim) const {
    const int64_t found = dim >= 0 ? dim : tensor_.ndim + dim;
    CHECK(found >= 0 && found < tensor_.ndim, "dimension " << dim << " of " << tensor_.ndim);
    return found;
  }
  DLTensor tensor_;
};

template <class T>
T* data(const TensorView& x) {
  return static_cast<T*>(x.data_ptr());
}

// Whether the elements lie in order without gaps. Those of an empty tensor do.
inline bool is_packed(const TensorView& x) {
  int64_t stride = 1;
  for (int i = x.ndim() - 1; i >= 0 && x.has_strides(); i--) {
    if (x.size(i) != 1 && x.stride(i) != stride) return x.numel() == 0;
    stride *= x.size(i);
  }
  return true;
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
  throw Error("ValueError") << "float32, bfloat16 or float16, not code " << dtype.code << " of "
                            << dtype.bits << " bits";
}

// --- calls: the arguments and the result of a function that EXPORT names ------------------------

// Returns the argument, or nothing if it has another type.
template <class T>
optional<T> as(const TVMFFIAny& any) {
  const int type = any.type_index;
  if constexpr (std::is_same_v<T, TensorView>) {
    if (type == kTVMFFIDLTensorPtr) return TensorView(static_cast<DLTensor*>(any.v_ptr));
    if (type == kTVMFFITensor) return TensorView(TVMFFITensorGetDLTensorPtr(any.v_obj));
  } else if constexpr (std::is_same_v<T, optional<TensorView>>) {
    if (type == kTVMFFINone) return T();
    if (const auto tensor = as<TensorView>(any)) return T(*tensor);
  } else {
    static_assert(std::is_arithmetic_v<T>);
    if (type == kTVMFFIInt || type == kTVMFFIBool) return T(any.v_int64);
    if (std::is_same_v<T, double> && type == kTVMFFIFloat) return T(any.v_float64);
  }
  return std::nullopt;
}

template <class T>
T argument(const char* name, const TVMFFIAny* all, int index) {
  const auto found = as<T>(all[index]);
  if (!found) throw Error("TypeError") << name << ": argument " << index << " has a wrong type";
  return *found;
}

template <class Result, class... Args, size_t... I>
void call(const char* name, Result (*f)(Args...), const TVMFFIAny* all, TVMFFIAny* result,
          std::index_sequence<I...>) {
  if constexpr (std::is_void_v<Result>) {
    f(argument<std::decay_t<Args>>(name, all, I)...);
  } else {
    static_assert(std::is_integral_v<Result>);
    result->type_index = std::is_same_v<Result, bool> ? kTVMFFIBool : kTVMFFIInt;
    result->v_int64 = f(argument<std::decay_t<Args>>(name, all, I)...);
  }
}

// Returns 0, or -1 if Python is to raise the exception that tvm-ffi keeps.
template <class Result, class... Args>
int call(const char* name, Result (*f)(Args...), const TVMFFIAny* all, int count, TVMFFIAny* result) {
  try {
    if (count != sizeof...(Args)) throw Error("TypeError") << name << ": " << count << " arguments";
    call(name, f, all, result, std::index_sequence_for<Args...>());
    return 0;
  } catch (const Error& error) {
    TVMFFIErrorSetRaisedFromCStr(error.kind, error.what());
  } catch (const std::exception& error) {
    TVMFFIErrorSetRaisedFromCStr("RuntimeError", error.what());
  }
  return -1;
}

// Makes `function` an attribute of the library in Python. Its namespace, with ::, may follow.
#define EXPORT(function, ...)                                                          \
  extern "C" __attribute__((visibility("default"))) int __tvm_ffi_##function(          \
      void*, const TVMFFIAny* all, int32_t count, TVMFFIAny* result) {                 \
    return call(#function, __VA_ARGS__ function, all, count, result);                  \
  }
