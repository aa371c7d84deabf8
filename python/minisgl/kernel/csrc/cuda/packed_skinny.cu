// Skinny GEMMs of up to 8 rows by packed weights of 4 or 8 bits, out[M, F] = x[M, D] w[F, D]^T,
// which take as long as reading w (its format: kernel/triton/packed.py). Also the experts of a
// mixture, for few tokens.
//
//   tile    8 outputs and all of their inputs. Blocks get equal numbers of tiles. The warps of a block
//           take chunks of its inputs in turn. Each keeps its sums of every tile in shared memory. Warps
//           meet at one barrier, at the end; then the sums are added up.
//   chunk   64 bytes of a row: 128 inputs of 4 bits, or 64 of 8. The 16 rows of an instruction have
//           two chunks of each output: its gate and its up, or (SIDES) two chunks side by side, for
//           which x has columns of its own. Without a gate and with more than 4 rows of x a tile has
//           16 outputs, with a chunk of each.
//           A thread copies 16 bytes of each of its rows to shared memory (cp.async) some chunks
//           ahead, so the main loop has no barrier. Copying begins before the kernel that makes x has
//           ended, that of the scales of all tiles too.
//   decode  numbers become bfloat16 pairs in two to four instructions, and are the left operand of
//           m16n8k16; the rows of x are its 8 columns. The order of inputs within an instruction is
//           free, so w stays as it is and x is permuted when it is staged in shared memory.
//
// Numbers are exact in bfloat16. The float32 sums of a group are multiplied by the group's scale;
// fp4 numbers are multiplied by their scales, which is exact too. Floats are decoded by placing their
// bits in a bfloat16, which changes their exponent bias: x is multiplied by 2^60 and the result by
// the rest of the factor. An integer of 4 bits is decoded with 128 added; the sum of x corrects it.
//
// EXPERTS: 0 for one matrix. 1: x has T rows, out a row for each pair of a token and an expert. 2: x
// and out have a row for each pair, and out is multiplied by the pair's share.
//
// Compiled by NVRTC with KIND, GROUP, SCALE, ROWS, ZEROS, MIDDLE, OUTER, GATE, SIDES, EXPERTS, WARPS,
// STAGES and BESIDE defined (packed_skinny.py).

struct Task {
  const u16 *x, *residual, *norm;  // residual, norm: or null
  const u8 *numbers, *scale, *zero;
  const float* outer;
  const u16* bias;  // or null
  u16 *out, *total;
  const int* ids;       // EXPERTS: of each pair
  const float* shares;  // EXPERTS == 2
  float eps, alpha, limit;
  int rows;             // of x: M, T, or pairs
  int outputs, inputs;  // of a matrix, gate and up counted once
  int pairs, top_k, first, count;  // EXPERTS: those of this rank
  int float_norm;       // whether the norm's weights are float32
  int most_tiles;       // of a block
};

// An expert that some pairs have chosen: its index on this rank, and each token's pair or -1.
struct Expert {
  int index, pairs[COLUMNS];
};

struct Shared {
  float squares[WARPS][COLUMNS];
  int num_experts;
  int ids[EXPERTS ? MAX_PAIRS : 1];
  Expert experts[EXPERTS ? MAX_PAIRS : 1];
};

static_assert(sizeof(Shared) <= BESIDE, "packed_skinny.py asks for less");

// Behind Shared: x, the sums of its parts, scales, zeros and sums of warps of all tiles, stages.
struct Places {
  u32 x, x_stride, x_sums, scales, scale_bytes, zeros, zero_bytes, sums, sums_bytes, stages;
  int chunks, groups, columns;  // chunks are a multiple of TURN

  __device__ Places(const Task& task, u32 base) {
    chunks = (task.inputs + CHUNK * TURN - 1) / (CHUNK * TURN) * TURN;
    groups = GROUP > 0 ? (task.inputs + GROUP - 1) / (GROUP > 0 ? GROUP : 1) : 1;
    x = base;
    x_stride = chunks * CHUNK * 2 + 64;  // conflict-free: half of the banks apart
    x_sums = x + task.rows * x_stride;
    scales = x_sums + (OFFSETS ? (task.rows * chunks * PARTS * 4 + 15) & ~15 : 0);
    columns = EXPERTS == 2 ? task.pairs / task.top_k : task.rows;
    scale_bytes = HAS_SCALES ? (BLOCKS * SCALE_ROWS * groups * SCALE_BYTES + 15) & ~15 : 0;
    zeros = scales + task.most_tiles * scale_bytes;
    zero_bytes = ZEROS ? (BLOCKS * 8 * groups + 15) & ~15 : 0;
    sums = zeros + task.most_tiles * zero_bytes;
    sums_bytes = columns * COLUMN * 4;  // of a warp and a tile
    stages = sums + task.most_tiles * WARPS * sums_bytes;
  }
};

// Eight numbers of x in the order of the instructions.
__device__ uint4 permuted(uint4 x) {
  const u32 low = 0x5410, high = 0x7632;
  if constexpr (IS_BYTE) {
    return {__byte_perm(x.x, x.y, low), __byte_perm(x.x, x.y, high), __byte_perm(x.z, x.w, low),
            __byte_perm(x.z, x.w, high)};
  }
  return {__byte_perm(x.x, x.z, low), __byte_perm(x.x, x.z, high), __byte_perm(x.y, x.w, low),
          __byte_perm(x.y, x.w, high)};
}

template <class Function>
__device__ u32 map_2(u32 x, u32 y, Function function) {
  return round(function(number(x & 0xffff), number(y & 0xffff)),
               function(number(x >> 16), number(y >> 16)));
}

template <class Function>
__device__ uint4 map(uint4 x, uint4 y, Function function) {
  return {map_2(x.x, y.x, function), map_2(x.y, y.y, function), map_2(x.z, y.z, function),
          map_2(x.w, y.w, function)};
}

// x * scale * weights, for eight permuted numbers and their float32 weights in the first order.
__device__ uint4 normed(uint4 x, float scale, const float* weights) {
  constexpr int FAR = IS_BYTE ? 2 : 4, THIRD = IS_BYTE ? 4 : 2;
  const auto two = [=](u32 word, int i) {
    return round(number(word & 0xffff) * scale * weights[i],
                 number(word >> 16) * scale * weights[i + FAR]);
  };
  return {two(x.x, 0), two(x.y, 1), two(x.z, THIRD), two(x.w, THIRD + 1)};
}

template <class Function>
__device__ float sum(uint4 x, Function function) {
  float total = 0;
  for (u32 word : {x.x, x.y, x.z, x.w}) {
    total += function(number(word & 0xffff)) + function(number(word >> 16));
  }
  return total;
}

// Rows of x to shared memory: x + residual, normed, permuted, multiplied by 2^60 for floats.
struct Staging {
  const Task& task;
  const Places& places;
  int vectors, lane;
  uint4 norms[BATCH];  // of the first batch: loaded before x is there

  __device__ Staging(const Task& task, const Places& places)
      : task(task), places(places), vectors(places.chunks * CHUNK / 8), lane(threadIdx.x % 32) {
    if (!task.float_norm) load(norms, task.norm, 0);
  }

  // A thread's vectors of a batch. Those behind the end are zeros.
  __device__ void load(uint4 (&to)[BATCH], const u16* from, int batch) const {
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      const int v = (batch * BATCH + i) * THREADS + threadIdx.x;
      to[i] = from != nullptr && v * 8 < task.inputs
                  ? reinterpret_cast<const uint4*>(from)[v] : uint4{};
    }
  }

  __device__ u32 place(int row, int vector) const {
    const int v = vector % (CHUNK / 8), chunk = vector / (CHUNK / 8);
    int within = v * 16;  // NARROW: a piece is a word of four threads
    if constexpr (!NARROW) within = v % VECTORS * 64 + v / VECTORS * 16;
    return places.x + row * places.x_stride + chunk * CHUNK * 2 + within;
  }

  __device__ void put(int row, int vector, uint4 x) const {
    if (vector >= vectors) return;
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(place(row, vector)), "r"(x.x),
                 "r"(x.y), "r"(x.z), "r"(x.w)
                 : "memory");
  }

  // The last step, for a permuted vector. All threads of a warp call it.
  __device__ void finish(int row, int vector, uint4 x) const {
    if constexpr (OFFSETS) {
      constexpr int SPAN = CHUNK / PARTS / 8;
      float total = sum(x, [](float a) { return a; });
      for (int step = 1; step < SPAN; step *= 2) total += __shfl_xor_sync(~0u, total, step);
      if (vector < vectors && lane % SPAN == 0) {
        const u32 to = places.x_sums + (row * places.chunks * PARTS + vector / SPAN) * 4;
        asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(total) : "memory");
      }
    }
    if constexpr (FLOATS) x = map(x, x, [](float a, float) { return a * 0x1p60f; });
    put(row, vector, x);
  }

  __device__ void run(Shared& shared) const {
    const int batches = (vectors + BATCH * THREADS - 1) / (BATCH * THREADS);
    for (int row = 0; row < task.rows; ++row) {
      const long long first = (long long)row * task.inputs;
      float square = 0;
      for (int batch = 0; batch < batches; ++batch) {
        uint4 x[BATCH], residual[BATCH];
        load(x, task.x + first, batch);
        if (task.residual != nullptr) load(residual, task.residual + first, batch);
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
          const int v = (batch * BATCH + i) * THREADS + threadIdx.x;
          if (v - lane >= vectors) break;
          if (task.residual != nullptr) {
            x[i] = map(x[i], residual[i], [](float a, float b) { return a + b; });
            if (blockIdx.x == 0 && v * 8 < task.inputs) {
              reinterpret_cast<uint4*>(task.total + first)[v] = x[i];
            }
          }
          if (task.norm == nullptr) {
            finish(row, v, permuted(x[i]));
          } else {
            square += sum(x[i], [](float a) { return a * a; });
            put(row, v, permuted(x[i]));
          }
        }
      }
      if (task.norm != nullptr) {
        for (int step = 16; step > 0; step /= 2) square += __shfl_xor_sync(~0u, square, step);
        if (lane == 0) shared.squares[threadIdx.x / 32][row] = square;
      }
    }
    if (task.norm == nullptr) return;
    __syncthreads();
    for (int row = 0; row < task.rows; ++row) {
      float square = 0;
      for (int w = 0; w < WARPS; ++w) square += shared.squares[w][row];
      const float scale = rsqrtf(square / task.inputs + task.eps);
      for (int batch = 0; batch < batches; ++batch) {
        uint4 norm[BATCH];
        if (batch > 0 && !task.float_norm) load(norm, task.norm, batch);
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
          const int v = (batch * BATCH + i) * THREADS + threadIdx.x;
          if (v - lane >= vectors) break;
          const uint4 x = v < vectors ? load_16(place(row, v)) : uint4{};
          if (task.float_norm) {
            const auto* weights = reinterpret_cast<const float*>(task.norm) + v * 8;
            finish(row, v, v * 8 < task.inputs ? normed(x, scale, weights) : x);
            continue;
          }
          finish(row, v, map(x, permuted(batch > 0 ? norm[i] : norms[i]),
                             [scale](float a, float b) { return a * scale * b; }));
        }
      }
    }
  }
};

// Finds the experts that the pairs have chosen, in the order of their first pairs.
__device__ void find_experts(const Task& task, Shared& shared) {
  int* ids = shared.ids;
  for (int i = threadIdx.x; i < task.pairs; i += THREADS) ids[i] = task.ids[i] - task.first;
  for (int i = threadIdx.x; i < MAX_PAIRS * COLUMNS; i += THREADS) {
    shared.experts[i / COLUMNS].pairs[i % COLUMNS] = -1;
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    int found = 0;
    for (int begin = 0; begin < task.pairs; begin += 32) {
      const int pair = begin + threadIdx.x;
      const int id = pair < task.pairs ? ids[pair] : -1;
      bool is_first = id >= 0 && id < task.count;
      for (int other = 0; is_first && other < pair; ++other) is_first = ids[other] != id;
      const u32 firsts = __ballot_sync(~0u, is_first);
      if (is_first) shared.experts[found + __popc(firsts & ((1u << threadIdx.x) - 1))].index = id;
      found += __popc(firsts);
    }
    if (threadIdx.x == 0) shared.num_experts = found;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < shared.num_experts * task.pairs; i += THREADS) {
    Expert& expert = shared.experts[i / task.pairs];
    const int pair = i % task.pairs;
    if (ids[pair] == expert.index) expert.pairs[pair / task.top_k] = pair;
  }
  __syncthreads();
}

// The first rows of a tile's two chunks, counted over all matrices. Thread group g has the rows g
// behind them.
struct Rows {
  int first[2];

  __device__ Rows(const Task& task, const Shared& shared, int tile, int tiles) {
    const int matrix = EXPERTS ? shared.experts[tile / tiles].index : 0;
    const int output = (EXPERTS ? tile % tiles : tile) * TILE;
    first[0] = matrix * task.outputs * (GATE == NONE ? 1 : 2) + output;
    first[1] = first[0] + (SIDES ? 0 : GATE == NONE ? 8 : task.outputs);
  }
};

// Begins to copy the scales or zeros of a tile to shared memory: each block of 8 outputs is
// contiguous.
template <int ROWS_EACH, int OUTPUTS, int BYTES>
__device__ void copy_scales(u32 to, const u8* from, const Rows& rows, int groups) {
  constexpr int WORD = ROWS_EACH == 8 ? 8 : 4;  // bytes of a copy, which are aligned
  const int each = ROWS_EACH * groups * BYTES / WORD;
  for (int at = threadIdx.x; at < BLOCKS * each; at += THREADS) {
    const int block = at >= each;
    const long long row = (block ? rows.first[1] : rows.first[0]) / OUTPUTS;
    copy<WORD>(to + at * WORD, from + row * groups * BYTES + (at - block * each) * WORD);
  }
}

// A group of a row, of a piece or part that may lie behind its end.
__device__ int group_of(int input, int groups) {
  if constexpr (GROUP == 0) return 0;
  const int group = input / (GROUP > 0 ? GROUP : 1);
  return group < groups ? group : groups - 1;
}

extern "C" __global__ void __launch_bounds__(THREADS, EXPERTS && WARPS == 8 ? 2 : 1)
    packed_skinny(const __grid_constant__ Task task) {
  extern __shared__ __align__(16) unsigned char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const Places places(task, shared_address(memory) + BESIDE);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int tiles = task.outputs / TILE, turns = places.chunks / TURN, groups = places.groups;
  const int row_bytes = IS_BYTE ? task.inputs : task.inputs / 2;
  const u32 ring = places.stages + warp * STAGES * STAGE_BYTES;
  // A thread's bytes: its own place, or so that words of a piece lie side by side.
  const u32 slot = (NARROW ? t * 8 + g : lane) * 16;

  // The next kernel may begin. The one that multiplies by `down` reads the ids before it waits, so
  // the ids must be complete when it begins.
  if constexpr (EXPERTS == 1) asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");
  if constexpr (EXPERTS != 0) find_experts(task, shared);
  const long long all = (long long)tiles * (EXPERTS ? shared.num_experts : 1);
  const int begin = int(all * blockIdx.x / gridDim.x);
  const int end = int(all * (blockIdx.x + 1) / gridDim.x);

  // The next copy: bytes of a tile's rows from `offset` on, to a stage.
  constexpr int TURN_BYTES = TURN * 64;
  const int turn_bytes = turns * TURN_BYTES;  // of a row, with what pads it
  int next_tile = begin, offset = warp * TURN_BYTES;
  u32 next_stage = ring;
  const u8 *low, *high;
  auto find = [&]() {
    while (offset >= turn_bytes) offset -= turn_bytes, ++next_tile;
    const Rows rows(task, shared, next_tile < end ? next_tile : 0, tiles);
    low = task.numbers + (long long)(rows.first[0] + g) * row_bytes + t * 16;
    high = task.numbers + (long long)(rows.first[1] + g) * row_bytes + t * 16;
    if constexpr (SIDES) high = low + 64;
  };
  find();
  auto issue = [&]() {
    if (next_tile < end) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const bool there = offset + (SIDES ? half * 64 : 0) + t * 16 < row_bytes;
        copy_16(next_stage + half * 512 + slot, (half ? high : low) + offset, there);
      }
      offset += WARPS * TURN_BYTES;
      if (offset >= turn_bytes) find();
    }
    commit();
    next_stage += STAGE_BYTES;
    if (next_stage == ring + STAGES * STAGE_BYTES) next_stage = ring;
  };
  for (int tile = begin; tile < end; ++tile) {
    const Rows rows(task, shared, tile, tiles);
    if constexpr (HAS_SCALES) {
      const u32 to = places.scales + (tile - begin) * places.scale_bytes;
      copy_scales<SCALE_ROWS, ROWS, SCALE_BYTES>(to, task.scale, rows, groups);
    }
    if constexpr (ZEROS) {
      const u32 to = places.zeros + (tile - begin) * places.zero_bytes;
      copy_scales<8, 1, 1>(to, task.zero, rows, groups);
    }
  }
  commit();
  for (int stage = 0; stage < STAGES - 1; ++stage) issue();
  const Staging staging(task, places);
  if constexpr (EXPERTS != 1) asm volatile("griddepcontrol.wait;" ::: "memory");
  staging.run(shared);
  wait_for_copies<STAGES - 1>();  // of scales
  __syncthreads();

  // A turn's words, read one turn ahead.
  struct Words {
    u32 of[2][WORDS];
  };
  u32 stage = ring;
  auto read = [&](Words& words) {
    wait_for_copies<STAGES - 2>();
    if constexpr (NARROW) __syncwarp();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if constexpr (NARROW) {
#pragma unroll
        for (int p = 0; p < 4; ++p) {
          words.of[half][p] = load_4(stage + half * 512 + (p * 8 + g) * 16 + t * 4);
        }
      } else {
        const uint4 own = load_16(stage + half * 512 + slot);
        u32* to = words.of[half];
        to[0] = own.x, to[1] = own.y, to[2] = own.z, to[3] = own.w;
      }
    }
    if constexpr (NARROW) __syncwarp();  // all have read what is copied to after this
    stage += STAGE_BYTES;
    if (stage == ring + STAGES * STAGE_BYTES) stage = ring;
    issue();
  };
  Words ahead{};
  read(ahead);

  // 16 bytes of x are two instructions'. A column that has no row of x multiplies zeros.
  constexpr int PER_PART = WORDS / PARTS;
  int turn = warp;
  for (int tile = begin; tile < end; ++tile) {
    const Expert& expert = shared.experts[EXPERTS ? tile / tiles : 0];
    // The row of x of a column, or -1.
    auto x_row = [&](int column) {
      if constexpr (EXPERTS == 2) return expert.pairs[column];
      return column < task.rows ? column : -1;
    };
    const int x_of_thread = x_row(g % ROWS_OF_X);
    const u32 x = places.x + (x_of_thread < 0 ? 0 : x_of_thread) * places.x_stride + t * 16 +
                  (SIDES && g >= 4 ? CHUNK * 2 : 0);
    u32 x_sums[2]{};
    if constexpr (OFFSETS) {
      for (int i = 0; i < 2; ++i) {
        const int row = x_row((t * 2 + i) % ROWS_OF_X);
        x_sums[i] = places.x_sums + (row < 0 ? 0 : row) * places.chunks * PARTS * 4 +
                    (SIDES && t >= 2 ? PARTS * 4 : 0);
      }
    }
    // Of this thread's row of the first chunk; `to_high` further on, that of the second.
    const u32 scales_at = places.scales + (tile - begin) * places.scale_bytes +
                          (SCALE_ROWS == 8 ? g * groups * SCALE_BYTES : 0);
    const u32 zeros_at = places.zeros + (tile - begin) * places.zero_bytes + g * groups;
    const u32 scales_to_high = SIDES ? 0 : SCALE_ROWS * groups * SCALE_BYTES;
    const u32 zeros_to_high = SIDES ? 0 : 8 * groups;
    uint4 b[VECTORS]{};
    float totals[4]{}, sums[2][4]{};
    for (; turn < turns; turn += WARPS) {
      const int chunk = turn * TURN;  // the second is the next, if SIDES
      if (x_of_thread >= 0) {
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) b[i] = load_16(x + chunk * CHUNK * 2 + i * 64);
      }
      float x_sum[2][PARTS]{};
      if constexpr (OFFSETS) {
#pragma unroll
        for (int i = 0; i < 2 * PARTS; ++i) {
          const u32 from = x_sums[i % 2] + (chunk * PARTS + i / 2) * 4;
          x_sum[i % 2][i / 2] = __uint_as_float(load_4(from));
        }
      }
      u32 factors[2][2]{};  // of the first and the second half of a piece
      float scales[2][PARTS], offsets[2][PARTS];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int first = (chunk + (SIDES ? half : 0)) * CHUNK;
        const u32 row = scales_at + half * scales_to_high;
        if constexpr (FACTORED) {
          const u32 from = row + group_of(first + t * PIECE, groups) * SCALE_BYTES;
          factors[half][0] = factor_at(from);
          factors[half][1] = GROUP == 16 ? factor_at(from + SCALE_BYTES) : factors[half][0];
        }
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
          const int group = group_of(first + part * (CHUNK / PARTS), groups);
          scales[half][part] = 1, offsets[half][part] = MIDDLE + SHIFT;
          if constexpr (SCALED) scales[half][part] = scale_at(row + group * SCALE_BYTES);
          if constexpr (ZEROS) {
            const u32 zero = load_1(zeros_at + half * zeros_to_high + group);
            offsets[half][part] = float(int(zero) + SHIFT);
          }
        }
      }
      const Words words = ahead;
      read(ahead);
#pragma unroll
      for (int i = 0; i < WORDS; ++i) {
        const int part = i / PER_PART;
        if (FINISHED && i % PER_PART == 0) {
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            sums[0][j] = OFFSETS ? -offsets[j / 2][part] * x_sum[j % 2][part] : 0;
            sums[1][j] = 0;
          }
        }
        const u32 low = words.of[0][i], high = words.of[1][i];
        const u32 f = factors[0][i / 2], h = factors[1][i / 2];
        if constexpr (IS_BYTE) {
          const uint4 x = b[i / 2];
          multiply(sums[i % 2], decode<0>(low, f), decode<0>(high, h), decode<1>(low, f),
                   decode<1>(high, h), i % 2 ? x.z : x.x, i % 2 ? x.w : x.y);
        } else {
          multiply(sums[0], decode<0>(low, f), decode<0>(high, h), decode<1>(low, f),
                   decode<1>(high, h), b[i].x, b[i].y);
          multiply(sums[1], decode<2>(low, f), decode<2>(high, h), decode<3>(low, f),
                   decode<3>(high, h), b[i].z, b[i].w);
        }
        if (FINISHED && i % PER_PART == PER_PART - 1) {
#pragma unroll
          for (int j = 0; j < 4; ++j) totals[j] += scales[j / 2][part] * (sums[0][j] + sums[1][j]);
        }
      }
    }
    turn -= turns;
    if constexpr (!FINISHED) {
      for (int i = 0; i < 4; ++i) totals[i] = sums[0][i] + sums[1][i];
    }
    // Sums of warps, [column][16].
    const u32 sums_at = places.sums + ((tile - begin) * WARPS + warp) * places.sums_bytes;
    for (int i = 0; i < 4; ++i) {
      // SIDES: columns from 4 on are the second chunk's, in the rows from 8 on.
      if (SIDES && (t >= 2) != (i >= 2)) continue;
      const int column = (t * 2 + i % 2) % ROWS_OF_X, row = g + i / 2 * 8;
      if (column < places.columns) {
        const u32 to = sums_at + (column * COLUMN + row) * 4;
        asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(totals[i]) : "memory");
      }
    }
  }
  __syncthreads();
  const int each = places.columns * TILE;
  for (int i = threadIdx.x; i < (end - begin) * each; i += THREADS) {
    const int tile = begin + i / each, row = i % TILE, column = i % each / TILE;
    const Expert& expert = shared.experts[EXPERTS ? tile / tiles : 0];
    const u32 sums_at = places.sums + (tile - begin) * WARPS * places.sums_bytes;
    const int out_row = EXPERTS ? expert.pairs[column] : column;
    if (out_row < 0) continue;
    const int output = (EXPERTS ? tile % tiles : tile) * TILE + row;
    const int matrix = EXPERTS ? expert.index : 0;
    auto result = [&](int half) {
      float total = 0;
      for (int w = 0; w < WARPS; ++w) {
        const u32 place = sums_at + w * places.sums_bytes + (column * COLUMN + row + half * 8) * 4;
        total += __uint_as_float(load_4(place));
        if constexpr (SIDES) total += __uint_as_float(load_4(place + 32));
      }
      if constexpr (FLOATS) total *= KIND == FP8 ? 0x1p60f : 0x1p6f;
      const int of = (matrix * (GATE == NONE ? 1 : 2) + half) * task.outputs + output;
      if constexpr (OUTER) total *= task.outer[of];
      if (task.bias != nullptr) total += number(task.bias[of]);
      return total;
    };
    float y = result(0);
    if constexpr (GATE != NONE) y = gated(y, result(1), task.alpha, task.limit);
    if constexpr (EXPERTS == 2) y *= task.shares[out_row];
    task.out[(long long)out_row * task.outputs + output] = u16(round(y, 0));
  }
}
