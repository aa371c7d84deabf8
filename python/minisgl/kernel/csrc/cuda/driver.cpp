// What the peer-memory all-reduce asks of the CUDA driver: memory that other processes can open,
// and the launch of a kernel that NVRTC compiled. Declarations: cuda.h.
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>

#include <cstring>

#include "shared_object.h"

using tvm::ffi::Bytes;

namespace {

using Address = unsigned long long;
using Module = void;
using Function = void;
using Stream = void;
struct IpcHandle {
  char bytes[64];
};
struct LaunchAttribute {
  int id;
  char pad[4];
  union {
    int value;
    char bytes[64];
  };
};
struct LaunchConfig {
  unsigned grid[3], block[3], shared_bytes;
  Stream* stream;
  LaunchAttribute* attributes;
  unsigned num_attributes;
};

struct Driver : SharedObject {
  int (*error_string)(int, const char**);
  int (*allocate)(Address*, size_t);
  int (*release)(Address);
  int (*fill)(Address, unsigned, size_t);
  int (*get_handle)(IpcHandle*, Address);
  int (*open_handle)(Address*, IpcHandle, unsigned);
  int (*close_handle)(Address);
  int (*load)(Module**, const void*);
  int (*get_function)(Function**, Module*, const char*);
  int (*launch)(const LaunchConfig*, Function*, void**, void**);

  Driver() : SharedObject("libcuda.so.1") {
    find("cuGetErrorString", error_string);
    find("cuMemAlloc_v2", allocate);
    find("cuMemFree_v2", release);
    find("cuMemsetD32_v2", fill);
    find("cuIpcGetMemHandle", get_handle);
    find("cuIpcOpenMemHandle_v2", open_handle);
    find("cuIpcCloseMemHandle", close_handle);
    find("cuModuleLoadData", load);
    find("cuModuleGetFunction", get_function);
    find("cuLaunchKernelEx", launch);
  }

  void check(int result, const char* call) const {
    if (result == 0) return;
    const char* why = "unknown error";
    error_string(result, &why);
    TVM_FFI_THROW(RuntimeError) << call << ": " << why;
  }
};

const Driver& driver() {
  static const Driver instance;
  return instance;
}

}  // namespace

// Device memory whose every 32-bit word is `word`, once the device has come to it.
int64_t memory_allocate(int64_t num_bytes, int64_t word) {
  Address address = 0;
  driver().check(driver().allocate(&address, size_t(num_bytes)), "cuMemAlloc");
  driver().check(driver().fill(address, unsigned(word), size_t(num_bytes) / 4), "cuMemsetD32");
  return int64_t(address);
}

void memory_free(int64_t address) {
  driver().check(driver().release(Address(address)), "cuMemFree");
}

// What another process on this machine opens the memory with.
Bytes memory_handle(int64_t address) {
  IpcHandle handle;
  driver().check(driver().get_handle(&handle, Address(address)), "cuIpcGetMemHandle");
  return Bytes(handle.bytes, sizeof(handle.bytes));
}

int64_t memory_open(Bytes bytes) {
  IpcHandle handle;
  if (bytes.size() != sizeof(handle.bytes)) TVM_FFI_THROW(ValueError) << "a handle is 64 bytes";
  std::memcpy(handle.bytes, bytes.data(), sizeof(handle.bytes));
  constexpr unsigned kLazyEnablePeerAccess = 1;
  Address address = 0;
  driver().check(driver().open_handle(&address, handle, kLazyEnablePeerAccess),
                 "cuIpcOpenMemHandle");
  return int64_t(address);
}

void memory_close(int64_t address) {
  driver().check(driver().close_handle(Address(address)), "cuIpcCloseMemHandle");
}

// The kernels of a cubin; they stay loaded until the process ends.
int64_t cubin_load(Bytes cubin) {
  Module* module = nullptr;
  driver().check(driver().load(&module, cubin.data()), "cuModuleLoadData");
  return reinterpret_cast<int64_t>(module);
}

int64_t cubin_kernel(int64_t module, tvm::ffi::String name) {
  Function* function = nullptr;
  int result = driver().get_function(&function, pointer<Module>(module), name.c_str());
  driver().check(result, "cuModuleGetFunction");
  return reinterpret_cast<int64_t>(function);
}

// parameters: the host's address of an array with the address of each. dependent: the kernel may
// begin while the one before ends, and waits by itself (programmatic dependent launch).
void kernel_launch(int64_t function, int64_t blocks, int64_t threads, int64_t parameters,
                   bool dependent, int64_t stream) {
  constexpr int kProgrammaticStreamSerialization = 6;
  LaunchAttribute attribute{};
  attribute.id = kProgrammaticStreamSerialization;
  attribute.value = 1;
  LaunchConfig config{{unsigned(blocks), 1, 1}, {unsigned(threads), 1, 1}, 0,
                      pointer<Stream>(stream), &attribute, dependent ? 1u : 0u};
  int result = driver().launch(&config, pointer<Function>(function), pointer<void*>(parameters),
                               nullptr);
  driver().check(result, "cuLaunchKernelEx");
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(memory_allocate, memory_allocate);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(memory_free, memory_free);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(memory_handle, memory_handle);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(memory_open, memory_open);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(memory_close, memory_close);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cubin_load, cubin_load);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cubin_kernel, cubin_kernel);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(kernel_launch, kernel_launch);
