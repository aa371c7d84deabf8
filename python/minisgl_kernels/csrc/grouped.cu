// Multiplies tiles of grouped GEMMs (grouped_tiles.cuh) by weights of 16 bits, which the matrix
// instructions read from shared memory. GELU: the activation of a gate, instead of SiLU.

template <int N>
__device__ void multiply_tile(const Task& task, Shared& shared, unsigned stages, Stage& at,
                              const TilePairs& tile_pairs) {
  const int group = threadIdx.x / 128;
  float first[N / 2], second[N / 2];  // sums of both halves
#pragma unroll
  for (int i = 0; i < N / 2; ++i) first[i] = second[i] = 0;
  for (int input = 0; input < task.inputs; input += INPUTS, at.advance()) {
    wait(shared_address(&shared.full[at.index]), at.parity);
    show_to_multiply();  // x's rows were not bulk copies
    const unsigned stage = stages + at.index * STAGE_BYTES;
    const unsigned long long a = matrix(stage + group * 64 * 128);
    const unsigned long long b = matrix(stage + W_BYTES / 2 + group * 64 * 128);
    const unsigned long long x = matrix(stage + W_BYTES);
    multiply_begin();
#pragma unroll
    for (int k = 0; k < 4; ++k) {  // 16 inputs, 32 bytes
      multiply(first, a + k * 2, x + k * 2);
      multiply(second, b + k * 2, x + k * 2);
    }
    multiply_end();
    if (threadIdx.x % 128 == 0) arrive(shared_address(&shared.empty[at.index]));
  }
  settle(first);
  settle(second);

  const int output = tile_pairs.tile.block * OUTPUTS + group * 64;
  if constexpr (GATED) {
    store<N>(task, shared, tile_pairs, output, 0, [&](int i, int) {
      return gated<GELU>(first[i], first[i + 1], second[i], second[i + 1]);
    });
  } else {
    auto scaled = [&](const float (&sums)[N / 2]) {
      return [&](int i, int column) {
        return round(sums[i] * tile_pairs.scales[column], sums[i + 1] * tile_pairs.scales[column + 1]);
      };
    };
    store<N>(task, shared, tile_pairs, output, 0, scaled(first));
    store<N>(task, shared, tile_pairs, output + BOX, 0, scaled(second));
  }
}
