// Finds functions of shared objects at run time. The objects come with the driver or with torch. So
// this compiles without CUDA's headers and links to no library.
#pragma once

#include <dlfcn.h>
#include <tvm/ffi/error.h>

// Handles, pointers and addresses of the device travel to and from Python as integers.
template <class T>
T* pointer(int64_t address) {
  return reinterpret_cast<T*>(address);
}

class SharedObject {
 public:
  explicit SharedObject(const char* name) : name_(name), handle_(dlopen(name, RTLD_NOW)) {
    if (handle_ == nullptr) TVM_FFI_THROW(RuntimeError) << dlerror();
  }

  template <class F>
  void find(const char* symbol, F*& function) const {
    function = reinterpret_cast<F*>(dlsym(handle_, symbol));
    if (function == nullptr) TVM_FFI_THROW(RuntimeError) << name_ << " has no " << symbol;
  }

 private:
  const char* name_;
  void* handle_;  // never closed: torch uses the same objects until the process ends
};
