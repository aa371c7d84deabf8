// Calls kernels of another kind of processor for `emulated.py`: requests on stdin, answers on stdout.
//
// Integers are 64 bits in the order of memory. A request: a name, the number of memories, of each
// its bytes; the number of arguments, of each a kind and a value (a tensor: memory, byte in it,
// dtype's code and bits, axes, sizes, strides). An answer: 0, the result and the memories as they
// are now, or 1 and the error's kind and message. Text and bytes begin with their length.
#include <dlfcn.h>
#include <tvm/ffi/c_api.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

namespace {

enum Kind { NONE, INT, FLOAT, TENSOR };
std::string raised_kind, raised_message;

void read(void* to, size_t size) {
  if (std::fread(to, 1, size, stdin) != size) std::exit(0);  // the caller has left
}
int64_t number() {
  int64_t value;
  read(&value, sizeof(value));
  return value;
}
std::vector<char> bytes() {
  std::vector<char> value(number());
  read(value.data(), value.size());
  return value;
}
void write(const void* from, size_t size) { std::fwrite(from, 1, size, stdout); }
void write_number(int64_t value) { write(&value, sizeof(value)); }
void write_bytes(const void* from, size_t size) {
  write_number(int64_t(size));
  write(from, size);
}

struct Tensor {
  DLTensor dl = {};
  std::vector<int64_t> sizes, strides;
};

void read_tensor(std::vector<std::vector<char>>& memories, Tensor& tensor) {
  char* memory = memories[number()].data();
  tensor.dl.data = memory + number();
  tensor.dl.dtype.code = uint8_t(number());
  tensor.dl.dtype.bits = uint8_t(number());
  tensor.dl.dtype.lanes = 1;
  tensor.dl.device = {kDLCPU, 0};
  tensor.dl.ndim = int32_t(number());
  for (int i = 0; i < tensor.dl.ndim; i++) tensor.sizes.push_back(number());
  for (int i = 0; i < tensor.dl.ndim; i++) tensor.strides.push_back(number());
  tensor.dl.shape = tensor.sizes.data(), tensor.dl.strides = tensor.strides.data();
}

void answer() {
  const std::vector<char> text = bytes();
  const std::string name = "__tvm_ffi_" + std::string(text.begin(), text.end());
  std::vector<std::vector<char>> memories(number());
  for (auto& memory : memories) memory = bytes();
  std::vector<TVMFFIAny> args(number());
  std::vector<Tensor> tensors(args.size());
  for (size_t i = 0; i < args.size(); i++) {
    args[i] = {};
    switch (number()) {
      case NONE: args[i].type_index = kTVMFFINone; break;
      case INT: args[i].type_index = kTVMFFIInt, args[i].v_int64 = number(); break;
      case FLOAT:
        args[i].type_index = kTVMFFIFloat;
        read(&args[i].v_float64, sizeof(double));
        break;
      default:
        read_tensor(memories, tensors[i]);
        args[i].type_index = kTVMFFIDLTensorPtr, args[i].v_ptr = &tensors[i].dl;
    }
  }
  const auto function = TVMFFISafeCallType(dlsym(RTLD_DEFAULT, name.c_str()));
  TVMFFIAny result = {};
  raised_kind = "AttributeError", raised_message = name;
  if (!function || function(nullptr, args.data(), int32_t(args.size()), &result)) {
    write_number(1);
    write_bytes(raised_kind.data(), raised_kind.size());
    write_bytes(raised_message.data(), raised_message.size());
  } else {
    write_number(0);
    write_number(result.v_int64);
    for (const auto& memory : memories) write_bytes(memory.data(), memory.size());
  }
  std::fflush(stdout);
}

}  // namespace

// What kernels need of tvm-ffi's library, which is another processor's.
extern "C" {
void TVMFFIErrorSetRaised(TVMFFIObjectHandle error) {
  const TVMFFIErrorCell* cell = TVMFFIErrorGetCellPtr(error);
  raised_kind.assign(cell->kind.data, cell->kind.size);
  raised_message.assign(cell->message.data, cell->message.size);
}
const TVMFFIByteArray* TVMFFIBacktrace(const char*, int, const char*, int) {
  static const TVMFFIByteArray none = {"", 0};
  return &none;
}
const TVMFFITypeInfo* TVMFFIGetTypeInfo(int32_t) { return nullptr; }
}

int main() {
  for (;;) answer();
}
