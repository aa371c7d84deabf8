// The tiles of grouped GEMMs, how they are fetched and stored, and their kernel. grouped.cu,
// packed_grouped.cu and fp8_grouped.cu say how a tile is multiplied (multiply_tile). A pair is a token
// and one of its experts; each pair's row of x is multiplied by its expert's weights, w [experts, F, D]:
//
//   GATED      w has a gate and an up half, [2 F, D]: out[pair, F] = silu(gate) * up, or with
//              another activation
//   otherwise  out[pair, F] = scale[pair] * sum
//
// TILED: the weights are tiles of 16 rows by 64 inputs, one behind the other, and their scales are
// fetched beside them (tile_numbers.cuh). With STREAM so are those of int4 (GROUPED).
//
// STREAM: there is one matrix, and a pair is one of the `stride` rows of x; no pair has a scale. About as
// many blocks as run at once (stream.py) share the tiles evenly, so a block may have some inputs of a tile
// only, in parts of PART. The blocks that share a tile leave their sums in `partial`. Those that end in it add up
// and store some of its columns each, in the order of the blocks. How tiles are shared depends on the
// weights alone up to MOST rows. One thread fetches: rows of x are bulk copies, too.
//
// A tile is up to MOST pairs of one expert by 256 rows of its weights, or 128 of each half. Its pairs
// are the columns of the matrix instructions, which exist for every multiple of 8. So the pairs of an
// expert are divided into tiles of about the same width, and the last has at most 15 unused columns.
// A block computes tile after tile:
//
//   a warpgroup that fetches   INPUTS inputs a turn: weights by the bulk copy engine, the rows of x,
//                              which lie anywhere, by 16 bytes (cp.async); it is turns or tiles ahead
//   two that multiply          64 weight rows of each half, all pairs (wgmma); then each transposes
//                              the sums by stmatrix, so that a pair's outputs are contiguous
//
// Inputs and matrices of x are counted in units of 16 bits: in fp8, a unit is two inputs.
//
// Compiled by NVRTC, without headers, behind hopper.cuh, with MOST, STAGES, BESIDE, GATED, INPUTS (64
// or 128), PACKED, TILED, ROW_BYTES (of a row of weights in a turn), X_SCALES (x has a scale for each turn
// of a row), STREAM and BFLOAT16 defined.

constexpr int BOX = 128;           // rows of w that one copy brings
constexpr int W_BYTES = 2 * BOX * ROW_BYTES;
constexpr int X_INPUTS = 64;       // of a matrix of x in a stage: 128 bytes, the width of the swizzle
constexpr int X_BYTES = MOST * X_INPUTS * 2;
constexpr int MATRICES = INPUTS / X_INPUTS;
constexpr int MAP_ROWS = TILED ? 16 : 1;  // of the weights, in a row of their tensor map
constexpr int MAP_BOX = BOX / MAP_ROWS;
// What else is fetched of each half in a turn, in boxes of rows of `..._ROW` bytes.
#if TILED  // rows: tiles
constexpr bool GROUPED = false;
constexpr int FACTORS_ROW = 32 * FACTORS, SCALES_ROW = (IS_K ? 32 : 64) * HALVES;
constexpr int SCALED_INPUTS = IS_K ? 256 : INPUTS;  // that SCALES_ROW bytes are for
constexpr int SCALED_ROWS = MAP_BOX;
#elif PACKED && STREAM  // rows: groups of inputs; factors: zeros
constexpr bool GROUPED = KIND == INT4 && GROUP > 0 && SCALE != F32;
constexpr int FACTORS_ROW = GROUPED && ZEROS ? BOX : 0, SCALES_ROW = GROUPED ? 2 * BOX : 0;
constexpr int SCALED_INPUTS = GROUP > 0 ? GROUP : INPUTS;
constexpr int SCALED_ROWS = GROUP > 0 && GROUP < INPUTS ? INPUTS / GROUP : 1;
#else
constexpr bool GROUPED = false;
constexpr int FACTORS_ROW = 0, SCALES_ROW = 0, SCALED_INPUTS = INPUTS, SCALED_ROWS = 1;
#endif
// In a stage, for each half; where rows are swizzled, 1,024 bytes are a pattern.
constexpr int FACTORS_BYTES = (SCALED_ROWS * FACTORS_ROW + 1023) / 1024 * 1024;
constexpr int SCALES_BYTES = SCALED_ROWS * SCALES_ROW;
constexpr int FACTORS_AT = W_BYTES + MATRICES * X_BYTES, SCALES_AT = FACTORS_AT + 2 * FACTORS_BYTES;
constexpr int STAGE_BYTES = (SCALES_AT + 2 * SCALES_BYTES + 1023) / 1024 * 1024;
constexpr int COLUMNS = TILED ? ROW_BYTES * MAP_ROWS / 8 : PACKED ? ROW_BYTES : INPUTS;  // of it, in a turn
constexpr int STEP = 16;           // pairs: widths of tiles are multiples of it
constexpr int PART = 128;          // inputs
// Of weights that are decoded into registers (packed_grouped.cu):
constexpr int BATCH = 4;           // matrix instructions, of 16 inputs each
constexpr int PERIOD = PART;       // inputs: two batches
using Operands = unsigned[2][BATCH][4];  // of a batch, for both halves of a tile
constexpr int OUTPUTS = GATED ? BOX : 2 * BOX;  // of a tile
constexpr int FETCHERS = 128;      // threads
constexpr int FETCHED = MOST / STEP;  // rows of x of a fetching thread
constexpr int PAIRS = (MOST + FETCHERS - 1) / FETCHERS;  // of a fetching thread, in TilePairs
constexpr int EMPTIED = X_SCALES ? 8 : 2;  // arrivals: of warps, whose threads read scales, or warpgroups
constexpr int AT_ONCE = 64;        // pairs whose outputs a warpgroup transposes
constexpr int TRANSPOSED_BYTES = AT_ONCE * 128;  // of it: 64 outputs of each

// Returns a condition that has the same value in all threads of a warp. The compiler then knows that
// they do not part, and keeps descriptors of matrices in uniform registers.
__device__ bool uniform(bool condition) { return __any_sync(~0u, condition); }

__device__ int ceil_div(int x, int y) { return (x + y - 1) / y; }

struct Task {
  const unsigned short* x;
  unsigned short* out;
  const int* counts;    // pairs of each expert
  const int* rows;      // [experts, stride]: its pairs
  const float* scales;  // of each pair
  // share: pairs that have a row of x together; with STREAM, rows of x that a copy brings
  int experts, stride, share, inputs, outputs;
  int width;            // of a row of out, at least `outputs`
  // Of packed weights: scales [experts, F / ROWS, groups] and so on, see packed_rows.cuh.
  int groups;
  int x_stride;  // of x_scales
  const unsigned char *scale, *zero;
  const float* outer;
  const unsigned short* bias;
  const float* x_scales;  // [turns, x_stride]
  float alpha, limit;
  // STREAM. partial: [MOST, threads that multiply] of each block that does not begin the tile, then of
  // each that does.
  float* partial;
  int* done;  // of each block that begins a shared tile: blocks that wrote sums, 2^16 times those that read
};

struct Tile {
  int expert, first, count, width, block;  // `count` pairs from `first` on; `width` with padding
  int input, until;  // the inputs that this block has
  int number;        // of the tile
};

// x: with STREAM. factors, scales: with TILED, of each tile; with GROUPED [groups, outputs].
struct Maps {
  TensorMap w, x, factors, scales;
};

// A tile and its pairs, which the fetching warpgroup writes for the others.
struct TilePairs {
  Tile tile;
  int pairs[STREAM ? 1 : MOST];
  float scales[STREAM ? 1 : MOST];

  __device__ int pair(int column) const { return STREAM ? tile.first + column : pairs[column]; }
};

// The shared memory of a block beside the stages. There are two TilePairs, used alternately.
// Their barriers: `written` by the fetching warpgroup, and `read` by all threads.
struct Shared {
  unsigned long long full[STAGES], empty[STAGES], written[2], read[2];
  TilePairs tile_pairs[2];
  alignas(16) float x_scales[X_SCALES ? STAGES : 1][X_SCALES ? MOST : 1];
  alignas(16) unsigned char transposed[2][TRANSPOSED_BYTES];

  // Behind this struct: for each expert the number of tiles of its pairs and those before it; then
  // its pairs.
  __device__ int* ends() const { return (int*)(this + 1); }
};

static_assert(sizeof(Shared) <= BESIDE, "grouped.py asks for less");
static_assert(!X_SCALES || MOST <= FETCHERS, "a thread fetches one scale of a turn");

// Finds tile number `tile`. The tiles of the same pairs, one for each block of outputs, have
// consecutive numbers.
__device__ Tile find(const Task& task, const Shared& shared, int tile, int blocks) {
  if constexpr (STREAM) {
    const int columns = ceil_div(task.stride, MOST);
    const int width = ceil_div(ceil_div(task.stride, columns), STEP) * STEP;
    const int first = tile % columns * width, count = min(task.stride - first, width);
    return {0, first, count, ceil_div(count, STEP) * STEP, tile / columns, 0, task.inputs, tile};
  }
  const int *ends = shared.ends(), *counts = ends + task.experts;
  const int of_pairs = tile / blocks;
  int low = 0, high = task.experts - 1;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (ends[middle] > of_pairs) high = middle;
    else low = middle + 1;
  }
  const int before = low ? ends[low - 1] : 0, count = counts[low];
  const int width = ceil_div(ceil_div(count, ends[low] - before), STEP) * STEP;
  const int first = (of_pairs - before) * width, left = count - first;
  const int pairs = left >= width ? width : left;
  return {low, first, pairs, ceil_div(pairs, STEP) * STEP, tile % blocks, 0, task.inputs, tile};
}

// The tiles of a block, one after the other; with STREAM, its parts of them.
struct Share {
  int at, end, parts;  // parts: of a tile

  __device__ Share(const Task& task, int tiles, int block) : parts(task.inputs / PART) {
    const long long all = (long long)tiles * parts;
    at = STREAM ? all * block / gridDim.x : block;
    end = STREAM ? all * (block + 1) / gridDim.x : tiles;
  }

  __device__ bool has_more() const { return at < end; }

  // The parts of a tile that are at hand.
  __device__ int count() const { return min(parts - at % parts, end - at); }

  __device__ Tile tile(const Task& task, const Shared& shared, int blocks) const {
    if constexpr (!STREAM) return find(task, shared, at, blocks);
    Tile tile = find(task, shared, at / parts, blocks);
    tile.input = at % parts * PART;
    tile.until = tile.input + count() * PART;
    return tile;
  }

  __device__ void advance() { at += STREAM ? count() : gridDim.x; }
};

// The tiles of all blocks.
__device__ int count_all(const Task& task, const Shared& shared, int blocks) {
  return (STREAM ? ceil_div(task.stride, MOST) : shared.ends()[task.experts - 1]) * blocks;
}

// Fills `ends` and the counts. The first warp calls it.
__device__ void count_tiles(const Task& task, Shared& shared) {
  int total = 0;
  for (int first = 0; first < task.experts; first += 32) {
    const int expert = first + threadIdx.x;
    const int count = expert < task.experts ? task.counts[expert] : 0;
    int sum = ceil_div(count, MOST);
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0u, sum, step);
      if (threadIdx.x >= step) sum += other;
    }
    if (expert < task.experts) {
      shared.ends()[expert] = total + sum;
      shared.ends()[task.experts + expert] = count;
    }
    total += __shfl_sync(~0u, sum, 31);
  }
}

__device__ void copy_16_bytes(unsigned to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

__device__ void copy_4_bytes(unsigned to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

// Begins to copy a turn's weights, and scales of TILED and GROUPED: BOX rows from `first` on, and as many from
// `second` on. The barrier expects them and `others` bytes. One thread calls it.
__device__ void copy_weights(unsigned to, const Maps& maps, int input, int first, int second,
                             unsigned barrier, unsigned others) {
  expect(barrier, W_BYTES + 2 * SCALED_ROWS * (FACTORS_ROW + SCALES_ROW) + others);
  const int column = input / INPUTS * COLUMNS;
  copy(to, maps.w, column, first / MAP_ROWS, barrier);
  copy(to + W_BYTES / 2, maps.w, column, second / MAP_ROWS, barrier);
  auto copy_both = [&](unsigned at, unsigned bytes, const TensorMap& map, int words) {  // words: of a tile
    const int group = input / SCALED_INPUTS;
    copy(to + at, map, GROUPED ? first : words, GROUPED ? group : first / MAP_ROWS, barrier);
    copy(to + at + bytes, map, GROUPED ? second : words, GROUPED ? group : second / MAP_ROWS, barrier);
  };
  if constexpr (FACTORS_ROW) {
    copy_both(FACTORS_AT, FACTORS_BYTES, maps.factors, input / INPUTS * FACTORS_ROW / 8);
  }
  if constexpr (SCALES_ROW) {
    copy_both(SCALES_AT, SCALES_BYTES, maps.scales, input / SCALED_INPUTS * SCALES_ROW / 8);
  }
}

// The address of a byte of row `row` of a box of the bulk copy engine, whose rows have WIDTH bytes: it
// swizzles those of 64 and 128.
template <int WIDTH>
__device__ unsigned in_box(int row, int byte) {
  const int chunk = WIDTH == 128 ? row % 8 : WIDTH == 64 ? row / 2 % 4 : 0;
  return row * WIDTH + (byte ^ chunk << 4);
}

// Arrives at the barrier when all copies that this thread has begun have ended.
__device__ void arrive_with_copies(unsigned barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// The next stage, and the parity of its barriers.
struct Stage {
  int index, parity;

  __device__ void advance() {
    if (++index == STAGES) index = 0, parity ^= 1;
  }
};

// Loads the pairs that a thread writes into TilePairs, FETCHERS apart; past the tile's end, its last
// pair.
__device__ void load_pairs(int (&pairs)[PAIRS], const Task& task, const Tile& tile, int thread) {
  const int* rows = task.rows + (long long)tile.expert * task.stride + tile.first;
#pragma unroll
  for (int i = 0; i < PAIRS; ++i) {
    const int row = thread + i * FETCHERS;
    pairs[i] = rows[row < tile.count ? row : tile.count - 1];
  }
}

__device__ void fetch(const Maps& maps, const Task& task, Shared& shared, unsigned stages,
                      Share share, int blocks) {
  const int thread = threadIdx.x - 256, chunk = thread % 8;
  const unsigned to = W_BYTES + thread / 8 * 128 + ((chunk ^ thread / 8 % 8) << 4);
  Stage at{0, 1};  // stages are empty at first
  Tile next;
  int pairs[PAIRS];
  auto look_ahead = [&] {
    if (!share.has_more()) return;
    next = share.tile(task, shared, blocks);
    load_pairs(pairs, task, next, thread);
  };
  look_ahead();
  for (int number = 0; share.has_more(); ++number) {
    const Tile here = next;
    TilePairs& tile_pairs = shared.tile_pairs[number & 1];
    wait(shared_address(&shared.read[number & 1]), ~(number >> 1) & 1);
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
      const int column = thread + i * FETCHERS;
      if (column < MOST) {
        tile_pairs.pairs[column] = pairs[i];
        if (!GATED) tile_pairs.scales[column] = task.scales[pairs[i]];
      }
    }
    if (thread == 0) tile_pairs.tile = here;
    asm volatile("bar.sync 1, 128;" ::: "memory");
    if (thread == 0) arrive(shared_address(&shared.written[number & 1]));
    const unsigned short* rows[FETCHED];
#pragma unroll
    for (int i = 0; i < FETCHED; ++i) {
      const int row = tile_pairs.pairs[thread / 8 + i * STEP] / task.share;
      rows[i] = task.x + (long long)row * task.inputs + chunk * 8;
    }
    const float* x_scale = nullptr;
    if (X_SCALES && thread < here.width) {
      x_scale = task.x_scales + tile_pairs.pairs[thread] / task.share;
    }
    share.advance();
    look_ahead();
    const int first = here.expert * task.outputs * (GATED ? 2 : 1) + here.block * OUTPUTS;
    const int second = first + (GATED ? task.outputs : BOX);
    for (int input = 0; input < task.inputs; input += INPUTS, at.advance()) {
      const unsigned full = shared_address(&shared.full[at.index]);
      const unsigned stage = stages + at.index * STAGE_BYTES;
      wait(shared_address(&shared.empty[at.index]), at.parity);
      if (thread == 0) copy_weights(stage, maps, input, first, second, full, 0);
#pragma unroll
      for (int i = 0; i < FETCHED; ++i) {
        if (i * STEP >= here.width) continue;
#pragma unroll
        for (int m = 0; m < MATRICES; ++m) {
          copy_16_bytes(stage + to + m * X_BYTES + i * STEP * 128, rows[i] + m * X_INPUTS);
        }
      }
      if (X_SCALES && thread < here.width) {
        copy_4_bytes(shared_address(&shared.x_scales[at.index][thread]), x_scale);
        x_scale += task.x_stride;
      }
      arrive_with_copies(full);
#pragma unroll
      for (int i = 0; i < FETCHED; ++i) rows[i] += INPUTS;
    }
  }
}

// STREAM: one thread does what `fetch` does.
__device__ void fetch_rows(const Maps& maps, const Task& task, Shared& shared, unsigned stages, Share share,
                           int blocks) {
  Stage at{0, 1};
  const unsigned x_bytes = task.share * X_INPUTS * 2;
  for (int number = 0; share.has_more(); ++number, share.advance()) {
    const Tile here = share.tile(task, shared, blocks);
    wait(shared_address(&shared.read[number & 1]), ~(number >> 1) & 1);
    shared.tile_pairs[number & 1].tile = here;
    arrive(shared_address(&shared.written[number & 1]));
    const int first = here.block * OUTPUTS, second = first + (GATED ? task.outputs : BOX);
    for (int input = here.input; input < here.until; input += INPUTS, at.advance()) {
      const unsigned full = shared_address(&shared.full[at.index]);
      const unsigned stage = stages + at.index * STAGE_BYTES;
      wait(shared_address(&shared.empty[at.index]), at.parity);
      copy_weights(stage, maps, input, first, second, full, MATRICES * x_bytes);
#pragma unroll
      for (int m = 0; m < MATRICES; ++m) {
        copy(stage + W_BYTES + m * X_BYTES, maps.x, input + m * X_INPUTS, here.first, full);
      }
    }
  }
}

// Writes a warp's 16 outputs of each of the 16 pairs from `column` on, among the 64 of its warpgroup.
// words: matrices of 8 outputs by 8 pairs, two along the outputs by two along the pairs. The 16 bytes of
// 8 outputs are swizzled, which avoids bank conflicts.
__device__ void transpose(unsigned transposed, int column, const unsigned (&words)[4]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, chunk = warp * 2 + lane / 8 % 2;
  const unsigned to = transposed + (column + lane / 16 * 8 + lane % 8) * 128 + ((chunk ^ lane % 8) << 4);
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
               "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
}

// Waits for the other threads of this warpgroup that multiplies.
__device__ void meet_warpgroup() {
  asm volatile("bar.sync %0, 128;" ::"r"(2 + threadIdx.x / 128) : "memory");
}

// Stores a warpgroup's 64 outputs from `output` on of each of N pairs: 128 bytes, a line of the cache.
// from: the first pair's column. words_of(i, column): the word of a thread's sums i and i + 1, which
// belong to pairs `column` and `column` + 1 of these.
template <int N, typename WordsOf>
__device__ void store(const Task& task, Shared& shared, const TilePairs& tile_pairs, int output, int from,
                      WordsOf words_of) {
  const unsigned transposed = shared_address(shared.transposed[threadIdx.x / 128]);
  const int thread = threadIdx.x % 128, chunk = thread % 8, first = output + chunk * 8;
#pragma unroll
  for (int begin = 0; begin < N; begin += AT_ONCE) {
    const int end = min(begin + AT_ONCE, N);
#pragma unroll
    for (int column = begin; column < end; column += STEP) {  // 8 sums of a thread
      unsigned words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        words[i] = words_of(column / 2 + i * 2, column + i / 2 * 8 + threadIdx.x % 4 * 2);
      }
      transpose(transposed, column - begin, words);
    }
    meet_warpgroup();
#pragma unroll
    for (int column = begin + thread / 8; column < end; column += STEP) {
      unsigned x[4];
      asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                   : "r"(transposed + (column - begin) * 128 + ((chunk ^ column % 8) << 4))
                   : "memory");
      if (first < (STREAM ? task.outputs : task.width) && from + column < tile_pairs.tile.count) {
        auto* at = task.out + (long long)tile_pairs.pair(from + column) * task.width + first;
        asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(x[0]), "r"(x[1]),
                     "r"(x[2]), "r"(x[3])
                     : "memory");
      }
    }
    meet_warpgroup();
  }
}

// Waits for the other threads that multiply.
__device__ void meet_multipliers() { asm volatile("bar.sync 4, 256;" ::: "memory"); }

// STREAM: how the blocks that share the inputs of a tile complete its sums.
struct Exchange {
  int first, last;  // blocks
  int storing;      // blocks that do: all, but not the last if it goes on behind the tile
  float* from;      // the first sum of this thread in block 0
  int* done;

  __device__ Exchange(const Task& task, const Shared& shared, const Tile& tile) {
    const int parts = task.inputs / PART;
    const long long begin = (long long)tile.number * parts, end = begin + parts;
    const long long all = (long long)count_all(task, shared, ceil_div(task.outputs, OUTPUTS)) * parts;
    auto block_of = [&](long long part) { return int(((part + 1) * gridDim.x - 1) / all); };
    first = block_of(begin), last = block_of(end - 1);
    storing = last - first + (all * (last + 1) / gridDim.x == end);
    from = task.partial + threadIdx.x;
    done = task.done + first;
  }

  __device__ bool is_needed() const { return first < last; }

  // The sums of a thread in a block, the first of which is at `step`.
  __device__ float* sums_of(int block, int step) const {
    const int place = block == first ? gridDim.x + block : block;
    return from + ((long long)place * MOST + step * STEP) * 256;
  }

  // Leaves this block's sums for those that store.
  template <int COUNT>
  __device__ void leave(const float (&sums)[2][COUNT]) const {
    float* to = sums_of(blockIdx.x, 0);
#pragma unroll
    for (int i = 0; i < 2 * COUNT; ++i) __stcg(to + i * 256, sums[i / 8 % 2][i / 16 * 8 + i % 8]);
    __threadfence();
    meet_multipliers();
    if (threadIdx.x == 0) asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(done) : "memory");
  }

  // Waits for the sums of all blocks.
  __device__ void await() const {
    if (threadIdx.x % 32 == 0) {
      int count;
      do {
        asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(count) : "l"(done) : "memory");
      } while ((count & 0xffff) < last - first + (storing > 1));
    }
    __syncwarp();
  }

  // Adds the sums of the other blocks to those of the first, which stores all.
  template <int COUNT>
  __device__ void add(float (&sums)[2][COUNT]) const {
    for (int block = first + 1; block <= last; ++block) {
      const float* at = sums_of(block, 0);
#pragma unroll
      for (int i = 0; i < 2 * COUNT; ++i) sums[i / 8 % 2][i / 16 * 8 + i % 8] += __ldcg(at + i * 256);
    }
  }

  // Adds up the sums of a step in the order of the blocks.
  __device__ void add_up(float (&sums)[2][STEP / 2], int step) const {
    constexpr int BLOCKS = 8;  // whose sums are read at once
#pragma unroll
    for (int i = 0; i < STEP; ++i) sums[i / 8][i % 8] = 0;
    for (int block = first; block <= last; block += BLOCKS) {
      float of[BLOCKS][STEP];
#pragma unroll
      for (int b = 0; b < BLOCKS; ++b) {
        const float* at = sums_of(block + b, step);
#pragma unroll
        for (int i = 0; i < STEP; ++i) of[b][i] = block + b <= last ? __ldcg(at + i * 256) : 0;
      }
#pragma unroll
      for (int i = 0; i < BLOCKS * STEP; ++i) sums[i % STEP / 8][i % 8] += of[i / STEP][i % STEP];
    }
  }

  // Says that this block has read. The last of `readers` makes `done` 0 for the next tile.
  __device__ void end(int readers) const {
    meet_multipliers();
    if (threadIdx.x == 0 && (atomicAdd(done, 1 << 16) >> 16) + 1 == readers) *done = 0;
  }
};

// Computes the sums of a tile of at most N pairs and stores its outputs.
template <int N>
__device__ __forceinline__ void multiply_tile(const Task& task, Shared& shared, unsigned stages,
                                              Stage& at, const TilePairs& tile_pairs);

// Calls multiply_tile for the tile's width, which is the same for all threads of a block. With STREAM
// there are fewer widths, which compile in half of the time.
template <int N>
__device__ __forceinline__ void multiply_tile_of(const Task& task, Shared& shared, unsigned stages, Stage& at,
                                 const TilePairs& tile_pairs) {
  if constexpr (N < MOST) {
    if (uniform(tile_pairs.tile.width > N)) {
      multiply_tile_of<N + (STREAM && N > STEP ? 2 * STEP : STEP)>(task, shared, stages, at, tile_pairs);
      return;
    }
  }
  multiply_tile<N>(task, shared, stages, at, tile_pairs);
}

// Grid: at most as many blocks as run at once. inputs: a multiple of INPUTS; outputs: of 8.
extern "C" __global__ void __launch_bounds__(384, 1)
    grouped_product(const __grid_constant__ Maps maps, const Task task) {
  extern __shared__ unsigned char memory[];
  const unsigned base = shared_address(memory), stages = (base + 1023) & ~1023u;
  Shared& shared = *reinterpret_cast<Shared*>(memory + (stages - base) + STAGES * STAGE_BYTES);
  if (threadIdx.x == 256) {
    for (int stage = 0; stage < STAGES; ++stage) {
      make_barrier(shared_address(&shared.full[stage]), STREAM ? 1 : FETCHERS + 1);
      make_barrier(shared_address(&shared.empty[stage]), EMPTIED);
    }
    for (int i = 0; i < 2; ++i) {
      make_barrier(shared_address(&shared.written[i]), 1);
      make_barrier(shared_address(&shared.read[i]), 8);
    }
    show_barriers();
  }
  wait_for_kernel_before();
  if (!STREAM && threadIdx.x < 32) count_tiles(task, shared);
  __syncthreads();

  const int blocks = ceil_div(task.outputs, OUTPUTS);
  Share share(task, count_all(task, shared, blocks), blockIdx.x);
  if (uniform(threadIdx.x >= 256)) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(STREAM ? 24 : 56));
    if constexpr (!STREAM) fetch(maps, task, shared, stages, share, blocks);
    else if (threadIdx.x == 256) fetch_rows(maps, task, shared, stages, share, blocks);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(STREAM ? 240 : 224));
    Stage at{0, 0};
    for (int number = 0; uniform(share.has_more()); ++number, share.advance()) {
      wait(shared_address(&shared.written[number & 1]), number >> 1 & 1);
      multiply_tile_of<STEP>(task, shared, stages, at, shared.tile_pairs[number & 1]);
      if (threadIdx.x % 32 == 0) arrive(shared_address(&shared.read[number & 1]));
    }
  }
}
