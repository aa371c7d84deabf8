// The values of packed weights in bfloat16: of all outputs, or of the outputs `ids`. Behind tiles.cuh.
// A warp has the 64 inputs of a step.

extern "C" __global__ void __launch_bounds__(32 * WARPS)
    tiles_dense(const __grid_constant__ Task task) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, steps = task.inputs / 64;
  const long long unit = (long long)blockIdx.x * WARPS + threadIdx.x / 32;  // a step of a tile or row
#if __CUDA_ARCH__ >= 900
  let_next_begin();
  wait_for_kernel_before();
#endif
  const long long which = unit / steps;
  const int step = unit % steps;
  if (which >= task.rows) return;
  const long long id = task.ids != nullptr ? task.ids[which] : which * 16;
  Numbers numbers;
  numbers.load(task.numbers + (id / 16 * steps + step) * TILE_BYTES, lane);
  Scales scales;
  scales.load(task.factors, task.scales, id / 16, step, step / SPAN, steps, g);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (task.ids != nullptr && id % 16 != r * 8 + g) continue;
    const long long row = task.ids != nullptr ? which : id + r * 8 + g;
    uint2* to = static_cast<uint2*>(task.out) + (row * task.inputs + step * 64) / 4 + t;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float scale, offset;
      scales.get(r, j * 16 / GROUP, scale, offset);
      auto two = [&](u32 pair) {
        const float first = __uint_as_float(pair << 16), second = __uint_as_float(pair & 0xffff0000u);
        constexpr float ADDED = STEPS ? 128 : 0;
        return round(__fsub_rn(__fmul_rn(first - ADDED, scale), offset),
                     __fsub_rn(__fmul_rn(second - ADDED, scale), offset));
      };
      to[j * 4] = {two(numbers.pair(r, j, 0)), two(numbers.pair(r, j, 1))};
    }
  }
}
