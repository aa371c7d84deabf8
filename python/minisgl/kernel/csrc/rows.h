// The norm and the rotation of one row, for the ops and for the attention that includes them.
#pragma once

#include <cmath>

#include "tensor.h"

constexpr int MAX_HEAD_DIM = 1024;

template <class T, class U>
INLINE void norm_row(const T* x, const U* weight, T* out, int n, float eps) {
  VF squares = {};
  each(x, n, [&](VF v, int) { squares += v * v; });
  float scale = 1.0f / std::sqrt(sum(squares) / n + eps);
  each(x, n, [&](VF v, int i) {
    store_until(out, i, n, v * scale * load_until(weight, i, n));
  });
}

// The angles of one position: R / 2 cosines and sines, rounded to T.
template <class T>
struct Angles {
  float cos[MAX_HEAD_DIM / 2 + W], sin[MAX_HEAD_DIM / 2 + W];
  int half;
  Angles(const float* row, int R) : half(R / 2) {
    each(row, half, [&](VF v, int i) { store(cos + i, round_to<T>(v)); });
    each(row + half, half, [&](VF v, int i) { store(sin + i, round_to<T>(v)); });
  }
};

inline void check_rotary(int H, int R) {
  CHECK(R % 2 == 0 && R <= H && H <= MAX_HEAD_DIM,
        "rope: rotary dim " << R << " of head dim " << H << " (even, and at most "
                            << MAX_HEAD_DIM << ")");
}

// out = x with its first dims rotated; x and out may be the same.
template <class T>
INLINE void rotate_row(const T* x, const Angles<T>& angles, T* out, int H) {
  const int half = angles.half, R = 2 * half;
  each(x, half, [&](VF low, int i) {
    VF high = load_until(x + half, i, half);
    VF c = load(angles.cos + i), s = load(angles.sin + i);
    store_until(out, i, half, round_to<T>(low * c) - round_to<T>(high * s));
    store_until(out + half, i, half, round_to<T>(high * c) + round_to<T>(low * s));
  });
  if (out != x) std::memcpy(out + R, x + R, (H - R) * sizeof(T));
}
