// Products by tiles of GGUF files (tile_numbers.cuh) that a warp loads into registers, without shared
// memory between. For compute capability 8.0 and later. The host side (tiles.py) puts it behind
// hopper.cuh and tile_numbers.cuh and before a kernel's file, with what the kernel asks for defined.
//
// The float32 sum of a group is multiplied by the group's scale. Where the format has steps, numbers are
// decoded with 128 added: this and the zeros are taken from the sums of x.

struct Task {
  const u8 *numbers, *factors, *scales;
  const unsigned short* x;     // of many rows in the order of lanes
  const float* sums;           // of x, of many rows
  const unsigned short* bias;  // or null
  void* out;
  const int* ids;              // the outputs whose values are asked for, or null for all; EXPERTS: pairs' experts
  float* partial;              // sums of the blocks that share inputs
  int* done;                   // such blocks that have ended, of each part of out
  // EXPERTS, see tiles_few.cu.
  const int *counts, *pairs;
  const float* weights;
  int rows, outputs, inputs;
  int stride;                  // of a row of out
  int is_float;                // whether out is float32
  int experts, first, most, share;
};

__device__ void multiply(float (&sums)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two numbers in shared memory.
__device__ void load_sums(float (&to)[2], u32 from) {
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(to[0]), "=f"(to[1]) : "r"(from) : "memory");
}

// The left operands of a group of a tile, its scales, and what is subtracted for each input.
struct Group {
  u32 a[GROUP / 16][4];
  float scale[2], offset[2];

  Group() = default;
  __device__ Group(const Numbers& numbers, const Scales& scales, int group) {
#pragma unroll
    for (int e = 0; e < GROUP / 16; ++e) {
#pragma unroll
      for (int n = 0; n < 4; ++n) a[e][n] = numbers.pair(n % 2, group * (GROUP / 16) + e, n / 2);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      scales.get(r, group, scale[r], offset[r]);
      if constexpr (STEPS) offset[r] += 128 * scale[r];
    }
  }

  // Adds the products with eight rows of x. x: of the tile's inputs. ones: the sums of x.
  __device__ void add(float (&totals)[4], const u32 (&x)[8], const float (&ones)[2], int group) const {
    float sums[4] = {};
#pragma unroll
    for (int e = 0; e < GROUP / 16; ++e) {
      const int at = 2 * (group * (GROUP / 16) + e);
      multiply(sums, a[e], x[at], x[at + 1]);
    }
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      totals[n] += scale[n / 2] * sums[n];
      if constexpr (STEPS) totals[n] -= offset[n / 2] * ones[n % 2];
    }
  }
};

// Writes a number of a row of x: a sum and, with GATE, that of its up.
__device__ void write(const Task& task, int row, int output, float total, [[maybe_unused]] float up) {
  if (task.bias != nullptr) total += number(task.bias[output]);
  const long long to = (long long)row * task.stride + output;
#if GATE
  if (task.bias != nullptr) up += number(task.bias[output + task.outputs]);
  static_cast<unsigned short*>(task.out)[to] = (unsigned short)gated<GATE == 2>(total, 0, up, 0);
#else
  if (task.is_float) {
    static_cast<float*>(task.out)[to] = total;
  } else {
    static_cast<unsigned short*>(task.out)[to] = (unsigned short)round(total, 0);
  }
#endif
}
