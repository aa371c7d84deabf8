// Memory of a thread for one item of work, which the next item uses again.
#pragma once

#include <vector>

#include "tensor.h"

class Scratch {
 public:
  // Makes room for `count` floats, taken in at most 16 parts.
  void begin(size_t count) {
    count += (1 + 16) * ALIGNED;
    if (floats_.size() < count) floats_.resize(count);
    const size_t past = reinterpret_cast<uintptr_t>(floats_.data()) / sizeof(float) % ALIGNED;
    used_ = (ALIGNED - past) % ALIGNED;
  }

  // The next `count` floats, at a multiple of 64 bytes.
  float* take(size_t count) {
    float* p = floats_.data() + used_;
    used_ += (count + ALIGNED - 1) / ALIGNED * ALIGNED;
    if (used_ > floats_.size()) throw Error("RuntimeError") << "scratch memory is too small";
    return p;
  }

 private:
  static constexpr size_t ALIGNED = 16;  // floats
  std::vector<float> floats_;
  size_t used_ = 0;
};
