// The calls of NCCL that tensor parallelism makes, on a stream that is an argument.
//
// torch has libnccl.so.2 loaded; the loader finds it again by its name. Declarations: nccl.h,
// whose ABI has been stable since NCCL 2.0 (2.7 for send and receive).
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>

#include <cstring>

#include "shared_object.h"

using tvm::ffi::Bytes;

namespace {

struct UniqueId {
  char bytes[128];
};
using Comm = void;
using Stream = void;
constexpr int kSum = 0;

struct Nccl : SharedObject {
  const char* (*error_string)(int);
  int (*get_unique_id)(UniqueId*);
  int (*init_rank)(Comm**, int, UniqueId, int);
  int (*abort)(Comm*);
  int (*reduce)(const void*, void*, size_t, int, int, Comm*, Stream*);
  int (*gather)(const void*, void*, size_t, int, Comm*, Stream*);
  int (*broadcast)(const void*, void*, size_t, int, int, Comm*, Stream*);
  int (*send)(const void*, size_t, int, int, Comm*, Stream*);
  int (*receive)(void*, size_t, int, int, Comm*, Stream*);
  int (*group_start)();
  int (*group_end)();

  Nccl() : SharedObject("libnccl.so.2") {
    find("ncclGetErrorString", error_string);
    find("ncclGetUniqueId", get_unique_id);
    find("ncclCommInitRank", init_rank);
    find("ncclCommAbort", abort);
    find("ncclAllReduce", reduce);
    find("ncclAllGather", gather);
    find("ncclBroadcast", broadcast);
    find("ncclSend", send);
    find("ncclRecv", receive);
    find("ncclGroupStart", group_start);
    find("ncclGroupEnd", group_end);
  }

  void check(int result, const char* call) const {
    if (result != 0) TVM_FFI_THROW(RuntimeError) << call << ": " << error_string(result);
  }
};

const Nccl& nccl() {
  static const Nccl instance;  // a failed dlopen is tried again, and throws again
  return instance;
}

}  // namespace

Bytes nccl_unique_id() {
  UniqueId id;
  nccl().check(nccl().get_unique_id(&id), "ncclGetUniqueId");
  return Bytes(id.bytes, sizeof(id.bytes));
}

// Connects on the calling thread's device. Waits for the other ranks.
int64_t nccl_init(Bytes unique_id, int64_t rank, int64_t size) {
  UniqueId id;
  if (unique_id.size() != sizeof(id.bytes)) TVM_FFI_THROW(ValueError) << "a unique id is 128 bytes";
  std::memcpy(id.bytes, unique_id.data(), sizeof(id.bytes));
  Comm* comm = nullptr;
  nccl().check(nccl().init_rank(&comm, int(size), id, int(rank)), "ncclCommInitRank");
  return reinterpret_cast<int64_t>(comm);
}

// Does not wait for other ranks, but waits until all graphs that captured a call are freed.
void nccl_abort(int64_t comm) { nccl().check(nccl().abort(pointer<Comm>(comm)), "ncclCommAbort"); }

// In place. dtype: ncclDataType_t.
void nccl_all_reduce(int64_t comm, int64_t x, int64_t count, int64_t dtype, int64_t stream) {
  int result = nccl().reduce(pointer<void>(x), pointer<void>(x), size_t(count), int(dtype), kSum,
                             pointer<Comm>(comm), pointer<Stream>(stream));
  nccl().check(result, "ncclAllReduce");
}

// Gathers bytes. out holds num_bytes of each rank.
void nccl_all_gather(int64_t comm, int64_t x, int64_t out, int64_t num_bytes, int64_t stream) {
  int result = nccl().gather(pointer<void>(x), pointer<void>(out), size_t(num_bytes), 0,
                             pointer<Comm>(comm), pointer<Stream>(stream));
  nccl().check(result, "ncclAllGather");
}

// In place.
void nccl_broadcast(int64_t comm, int64_t x, int64_t num_bytes, int64_t source, int64_t stream) {
  int result = nccl().broadcast(pointer<void>(x), pointer<void>(x), size_t(num_bytes), 0,
                                int(source), pointer<Comm>(comm), pointer<Stream>(stream));
  nccl().check(result, "ncclBroadcast");
}

// Sends num_bytes of x to each of `size` ranks; out holds num_bytes from each.
void nccl_exchange(int64_t comm, int64_t x, int64_t out, int64_t num_bytes, int64_t size,
                   int64_t stream) {
  nccl().check(nccl().group_start(), "ncclGroupStart");
  int failed = 0;
  for (int64_t rank = 0; rank < size && !failed; ++rank) {
    const int64_t at = rank * num_bytes;
    failed = nccl().send(pointer<void>(x + at), size_t(num_bytes), 0, int(rank),
                         pointer<Comm>(comm), pointer<Stream>(stream));
    if (!failed) {
      failed = nccl().receive(pointer<void>(out + at), size_t(num_bytes), 0, int(rank),
                              pointer<Comm>(comm), pointer<Stream>(stream));
    }
  }
  const int ended = nccl().group_end();  // also after a failure: it closes what was begun
  nccl().check(failed ? failed : ended, "ncclSend and ncclRecv");
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(nccl_unique_id, nccl_unique_id);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(nccl_init, nccl_init);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(nccl_abort, nccl_abort);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(nccl_all_reduce, nccl_all_reduce);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(nccl_all_gather, nccl_all_gather);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(nccl_broadcast, nccl_broadcast);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(nccl_exchange, nccl_exchange);
