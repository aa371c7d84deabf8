// The activation of gate and up for kernels of packed weights. Behind hopper.cuh, with GATE defined.

enum { NONE, SILU, GELU, CLAMPED };  // GATE

__device__ float rounded(float x) { return __uint_as_float(round(0, x) & 0xffff0000u); }

__device__ float sigmoid(float x) {
  float power, result;
  asm("ex2.approx.f32 %0, %1;" : "=f"(power) : "f"(x * -1.4426950408889634f));
  asm("rcp.approx.f32 %0, %1;" : "=f"(result) : "f"(1 + power));
  return result;
}

// activation(gate) * up; each step is rounded, as if it were a tensor. alpha, limit: of a clamped gate.
__device__ float gated(float gate, float up, float alpha, float limit) {
  gate = rounded(gate), up = rounded(up);
  if constexpr (GATE == CLAMPED) {
    gate = fminf(gate, limit);
    up = rounded(fminf(fmaxf(up, -limit), limit) + 1);
    return rounded(gate * rounded(sigmoid(rounded(gate * alpha)))) * up;
  }
  float active = gate * sigmoid(gate);
  if constexpr (GATE == GELU) {
    active = gate * sigmoid(2 * 0.7978845608028654f * (gate + 0.044715f * gate * gate * gate));
  }
  return rounded(active) * up;
}
