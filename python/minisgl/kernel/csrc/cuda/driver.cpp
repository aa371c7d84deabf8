// Calls of the CUDA driver: memory that other processes can open, tensor maps for the bulk copy engine,
// and launches of kernels that NVRTC compiled. Declarations: cuda.h.
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
    unsigned sizes[3];
    char bytes[64];
  };
};
struct LaunchConfig {
  unsigned grid[3], block[3], shared_bytes;
  Stream* stream;
  LaunchAttribute* attributes;
  unsigned num_attributes;
};

struct alignas(64) TensorMap {
  char bytes[128];
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
  int (*set_attribute)(Function*, int, int);
  int (*launch)(const LaunchConfig*, Function*, void**, void**);
  int (*max_clusters)(int*, Function*, const LaunchConfig*);
  int (*encode_tiled)(TensorMap*, int, unsigned, void*, const uint64_t*, const uint64_t*,
                      const unsigned*, const unsigned*, int, int, int, int);

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
    find("cuFuncSetAttribute", set_attribute);
    find("cuLaunchKernelEx", launch);
    find("cuOccupancyMaxActiveClusters", max_clusters);
    find("cuTensorMapEncodeTiled", encode_tiled);
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

LaunchAttribute cluster_of(int64_t blocks) {
  constexpr int kClusterDimension = 4;
  LaunchAttribute attribute{};
  attribute.id = kClusterDimension;
  attribute.sizes[0] = unsigned(blocks);
  attribute.sizes[1] = attribute.sizes[2] = 1;
  return attribute;
}

}  // namespace

// Allocates device memory, and enqueues a kernel that sets each of its 32-bit words to `word`.
int64_t memory_allocate(int64_t num_bytes, int64_t word) {
  Address address = 0;
  driver().check(driver().allocate(&address, size_t(num_bytes)), "cuMemAlloc");
  driver().check(driver().fill(address, unsigned(word), size_t(num_bytes) / 4), "cuMemsetD32");
  return int64_t(address);
}

void memory_free(int64_t address) {
  driver().check(driver().release(Address(address)), "cuMemFree");
}

// Returns the handle with which another process on this machine opens the memory.
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

// Loads the kernels of a cubin. They stay loaded until the process ends.
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

// Allows a kernel's blocks up to shared_bytes of shared memory, also more than 48 KB.
void kernel_allow(int64_t function, int64_t shared_bytes) {
  constexpr int kMaxDynamicSharedSizeBytes = 8;
  int result = driver().set_attribute(pointer<Function>(function), kMaxDynamicSharedSizeBytes,
                                      int(shared_bytes));
  driver().check(result, "cuFuncSetAttribute");
}

// Lets this kernel use the most shared memory that a multiprocessor can have; the rest is L1.
void kernel_prefer_shared(int64_t function) {
  constexpr int kPreferredSharedMemoryCarveout = 9, kAll = 100;
  int result =
      driver().set_attribute(pointer<Function>(function), kPreferredSharedMemoryCarveout, kAll);
  driver().check(result, "cuFuncSetAttribute");
}

// Returns the tensor map of a contiguous matrix of numbers of 1, 2 or 8 bytes. The bulk copy engine
// copies boxes of `box_rows` rows and `box_columns` columns to shared memory, those of 64 and 128 bytes
// in the swizzle of their width; elements outside of the matrix are 0.
Bytes tensor_map(int64_t address, int64_t rows, int64_t columns, int64_t box_rows, int64_t item_bytes,
                 int64_t box_columns) {
  constexpr int kUint8 = 0, kUint16 = 1, kUint64 = 4, kNoInterleave = 0, kPromoteTo256B = 3, kZeros = 0;
  constexpr int kNoSwizzle = 0, kSwizzle64B = 2, kSwizzle128B = 3;
  const int64_t width = item_bytes * box_columns;
  const uint64_t sizes[] = {uint64_t(columns), uint64_t(rows)};
  const uint64_t strides[] = {uint64_t(item_bytes * columns)};
  const unsigned box[] = {unsigned(box_columns), unsigned(box_rows)}, steps[] = {1, 1};
  TensorMap map;
  const int type = item_bytes == 1 ? kUint8 : item_bytes == 2 ? kUint16 : kUint64;
  const int swizzle = width == 64 ? kSwizzle64B : width == 128 ? kSwizzle128B : kNoSwizzle;
  int result = driver().encode_tiled(&map, type, 2, pointer<void>(address), sizes, strides, box, steps,
                                     kNoInterleave, swizzle, kPromoteTo256B, kZeros);
  driver().check(result, "cuTensorMapEncodeTiled");
  return Bytes(map.bytes, sizeof(map.bytes));
}

// Returns how many clusters of `cluster` blocks the device can run at once.
int64_t kernel_clusters(int64_t function, int64_t threads, int64_t shared_bytes, int64_t cluster) {
  LaunchAttribute attribute = cluster_of(cluster);
  LaunchConfig config{{unsigned(cluster), 1, 1}, {unsigned(threads), 1, 1}, unsigned(shared_bytes),
                      nullptr, &attribute, 1};
  int count = 0;
  int result = driver().max_clusters(&count, pointer<Function>(function), &config);
  driver().check(result, "cuOccupancyMaxActiveClusters");
  return count;
}

// parameters: the host's address of an array with the addresses of the parameters. cluster: the
// number of blocks that access each other's shared memory. dependent: the kernel may begin before the
// kernel before it has ended; it has an instruction that waits for that (programmatic dependent
// launch).
void kernel_launch(int64_t function, int64_t blocks, int64_t threads, int64_t shared_bytes,
                   int64_t cluster, int64_t parameters, bool dependent, int64_t stream) {
  constexpr int kProgrammaticStreamSerialization = 6;
  LaunchAttribute attributes[2]{};
  unsigned count = 0;
  if (dependent) {
    attributes[count].id = kProgrammaticStreamSerialization;
    attributes[count++].value = 1;
  }
  if (cluster > 1) attributes[count++] = cluster_of(cluster);
  LaunchConfig config{{unsigned(blocks), 1, 1}, {unsigned(threads), 1, 1}, unsigned(shared_bytes),
                      pointer<Stream>(stream), attributes, count};
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
TVM_FFI_DLL_EXPORT_TYPED_FUNC(kernel_allow, kernel_allow);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(kernel_prefer_shared, kernel_prefer_shared);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(tensor_map, tensor_map);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(kernel_clusters, kernel_clusters);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(kernel_launch, kernel_launch);
