// Rows of x in the order of lanes, and the sums of groups, for tiles_many.cu. Behind tiles.cuh.
//
// x: [D / 32, columns, 32 lanes, 8 numbers]. Of each 32 inputs and eight rows, lane 4g + t has four
// inputs from 4t on and four from 16 + 4t on, of row g. sums: float32 [D / GROUP, columns, 8 rows].
// Rows behind the last are zeros. A warp has 32 inputs of a column.

extern "C" __global__ void __launch_bounds__(32 * WARPS) tiles_lanes(const __grid_constant__ Task task) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, columns = task.outputs;
  const int unit = blockIdx.x * WARPS + threadIdx.x / 32, column = unit % columns, c = unit / columns;
#if __CUDA_ARCH__ >= 900
  let_next_begin();
  wait_for_kernel_before();
#endif
  if (c >= task.inputs / 32) return;
  const int row = column * 8 + g;
  uint2 parts[2] = {};
  if (row < task.rows) {
    const unsigned short* from = task.x + (long long)row * task.inputs + c * 32 + t * 4;
    parts[0] = *reinterpret_cast<const uint2*>(from);
    parts[1] = *reinterpret_cast<const uint2*>(from + 16);
  }
  static_cast<uint4*>(task.out)[unit * 32 + lane] = {parts[0].x, parts[0].y, parts[1].x, parts[1].y};
  if constexpr (STEPS) {
    float sums[2];
    for (int half = 0; half < 2; ++half) {
      sums[half] = low(parts[half].x) + high(parts[half].x) + low(parts[half].y) + high(parts[half].y);
      sums[half] += __shfl_xor_sync(~0u, sums[half], 1);
      sums[half] += __shfl_xor_sync(~0u, sums[half], 2);
    }
    if (t > 0) return;
    if constexpr (GROUP == 32) {
      task.partial[(c * columns + column) * 8 + g] = sums[0] + sums[1];
    } else {
      for (int half = 0; half < 2; ++half) {
        task.partial[((c * 2 + half) * columns + column) * 8 + g] = sums[half];
      }
    }
  }
}
