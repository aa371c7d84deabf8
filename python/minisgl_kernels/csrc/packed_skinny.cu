// Skinny GEMMs of up to 8 rows by packed weights of 4 or 8 bits, out[M, F] = x[M, D] w[F, D]^T,
// which take as long as reading w (its format: minisgl_zoo/weights/packed.py). Also the experts of a
// mixture, for few tokens.
//
//   tile    8 outputs and all of their inputs. Blocks get equal numbers of tiles. Each warp of a block
//           takes as many consecutive chunks of its tiles, and keeps its sums of each tile in shared
//           memory. Warps meet at one barrier, at the end; then the sums are added up.
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
// Compiled by NVRTC behind packed_numbers.cuh and packed_staging.cuh, with KIND, GROUP, SCALE, ROWS,
// ZEROS, MIDDLE, OUTER, GATE, SIDES, EXPERTS, WARPS, STAGES, BESIDE, EVEN and PLAIN defined
// (packed_skinny.py).

// Finds the experts that the pairs have chosen, in the order of their first pairs.
__device__ void find_experts(const Task& task, Shared& shared) {
  if (task.pairs == task.top_k) {  // of one token, which are different experts
    if (threadIdx.x < 32) {
      int found = 0;
      for (int pair = threadIdx.x; pair - int(threadIdx.x) < task.pairs; pair += 32) {
        const int id = pair < task.pairs ? task.ids[pair] - task.first : -1;
        const bool is_here = id >= 0 && id < task.count;
        const u32 here = __ballot_sync(~0u, is_here);
        if (is_here) {
          Expert& expert = shared.experts[found + __popc(here & ((1u << threadIdx.x) - 1))];
          expert.index = id, expert.pairs[0] = pair;
          for (int column = 1; column < COLUMNS; ++column) expert.pairs[column] = -1;
        }
        found += __popc(here);
      }
      if (threadIdx.x == 0) shared.num_experts = found;
    }
    __syncthreads();
    return;
  }
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

// A warp begins to copy the scales or zeros of a tile to shared memory: each block of 8 outputs is
// contiguous.
template <int ROWS_EACH, int OUTPUTS, int BYTES>
__device__ void copy_scales(u32 to, const u8* from, const Rows& rows, int groups) {
  constexpr int WORD = ROWS_EACH == 8 ? 8 : 4;  // bytes of a copy, which are aligned
  const int each = ROWS_EACH * groups * BYTES / WORD;
  for (int at = threadIdx.x % 32; at < BLOCKS * each; at += 32) {
    const int block = at >= each;
    const long long row = (block ? rows.first[1] : rows.first[0]) / OUTPUTS;
    copy<WORD>(to + at * WORD, from + row * groups * BYTES + (at - block * each) * WORD);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, EXPERTS ? 2 : 1)
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
  const u32 all = tiles * (EXPERTS ? shared.num_experts : 1);
  // The two blocks that a multiprocessor gets have neighbouring shares: together as many as others.
  const u32 cores = gridDim.x / 2;
  const u32 share = EXPERTS ? blockIdx.x % cores * 2 + blockIdx.x / cores : blockIdx.x;
  const int begin = all * share / gridDim.x, end = all * (share + 1) / gridDim.x;

  // A warp takes consecutive turns of the block's tiles: as many as any other, or fewer at the end.
  const int num_turns = (end - begin) * turns, each_turns = (num_turns + WARPS - 1) / WARPS;
  const int first_turn = min(warp * each_turns, num_turns);
  int left = min(each_turns, num_turns - first_turn);

  // The next copy: a turn's bytes of a tile's rows, to a stage.
  constexpr int TURN_BYTES = TURN * 64;
  const long long to_second = SIDES ? 64 : (long long)(GATE == NONE ? 8 : task.outputs) * row_bytes;
  int next_tile = begin + first_turn / turns, to_copy = left;
  int offset = first_turn % turns * TURN_BYTES;
  u32 stage = ring;
  const u8* next;
  auto find = [&]() {
    const Rows rows(task, shared, next_tile < end ? next_tile : 0, tiles);
    next = task.numbers + (long long)(rows.first[0] + g) * row_bytes + t * 16 + offset;
  };
  find();
  auto issue = [&](u32 to) {
    if (to_copy > 0) {
      const int rest = row_bytes - t * 16 - offset;
      copy_16(to + slot, next, EVEN || rest > 0);
      copy_16(to + slot + 512, next + to_second, EVEN || rest > (SIDES ? 64 : 0));
      --to_copy, offset += TURN_BYTES, next += TURN_BYTES;
      if (offset == turns * TURN_BYTES) offset = 0, ++next_tile, find();
    }
    commit_copies();
  };
  issue(ring);
  for (int tile = begin + warp; tile < end; tile += WARPS) {
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
  // The scales are in the second group.
  for (int i = 1; i < STAGES - 1; ++i) issue(ring + i * STAGE_BYTES);
  Staging staging(task, places);
  if constexpr (EXPERTS != 1) asm volatile("griddepcontrol.wait;" ::: "memory");
  staging.run(shared);
  wait_for_copies<STAGES - 3>();  // of scales
  __syncthreads();

  u32 words[2][WORDS];
  u32 read_before = ring + (STAGES - 1) * STAGE_BYTES;
  auto read = [&]() {
    wait_for_copies<STAGES - 2>();
    if constexpr (NARROW) __syncwarp();  // all have read the stage that is copied to after this
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if constexpr (NARROW) {
#pragma unroll
        for (int p = 0; p < 4; ++p) {
          words[half][p] = load_4(stage + half * 512 + (p * 8 + g) * 16 + t * 4);
        }
      } else {
        const uint4 own = load_16(stage + half * 512 + slot);
        u32* to = words[half];
        to[0] = own.x, to[1] = own.y, to[2] = own.z, to[3] = own.w;
      }
    }
    issue(read_before);
    read_before = stage;
    stage = stage == ring + (STAGES - 1) * STAGE_BYTES ? ring : stage + STAGE_BYTES;
  };

  // 16 bytes of x are two instructions'. A column that has no row of x multiplies another row, for sums
  // that are never read.
  constexpr int PER_PART = WORDS / PARTS;
  int turn = first_turn % turns;
  for (int tile = begin + first_turn / turns; left > 0; ++tile) {
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
    // Scales and zeros of this thread's row of the first chunk; those of the second chunk's row are
    // `scales_to_high` and `zeros_to_high` further on.
    const u32 scales_at = places.scales + (tile - begin) * places.scale_bytes +
                          (SCALE_ROWS == 8 ? g * groups * SCALE_BYTES : 0);
    const u32 zeros_at = places.zeros + (tile - begin) * places.zero_bytes + g * groups;
    const u32 scales_to_high = SIDES ? 0 : SCALE_ROWS * groups * SCALE_BYTES;
    const u32 zeros_to_high = SIDES ? 0 : 8 * groups;
    uint4 b[VECTORS]{};
    float totals[4]{}, sums[CHAINS][4]{};
    const int stop = min(turn + left, turns);
    left -= stop - turn;
    for (; turn < stop; ++turn) {
      read();
      const int chunk = turn * TURN;  // the second is the next, if SIDES
#pragma unroll
      for (int i = 0; i < VECTORS; ++i) b[i] = load_16(x + chunk * CHUNK * 2 + i * 64);
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
#pragma unroll
      for (int i = 0; i < WORDS; ++i) {
        const int part = i / PER_PART;
        if (FINISHED && i % PER_PART == 0) {
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            sums[0][j] = OFFSETS ? -offsets[j / 2][part] * x_sum[j % 2][part] : 0;
            sums[CHAINS - 1][j] = CHAINS == 2 ? 0 : sums[0][j];
          }
        }
        const u32 low = words[0][i], high = words[1][i];
        const u32 f = factors[0][i / 2], h = factors[1][i / 2];
        if constexpr (IS_BYTE) {
          const uint4 x = b[i / 2];
          multiply(sums[i % CHAINS], decode<0>(low, f), decode<0>(high, h), decode<1>(low, f),
                   decode<1>(high, h), i % 2 ? x.z : x.x, i % 2 ? x.w : x.y);
        } else {
          multiply(sums[0], decode<0>(low, f), decode<0>(high, h), decode<1>(low, f),
                   decode<1>(high, h), b[i].x, b[i].y);
          multiply(sums[CHAINS - 1], decode<2>(low, f), decode<2>(high, h), decode<3>(low, f),
                   decode<3>(high, h), b[i].z, b[i].w);
        }
        if (FINISHED && i % PER_PART == PER_PART - 1) {
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const float sum = CHAINS == 2 ? sums[0][j] + sums[1][j] : sums[0][j];
            totals[j] += scales[j / 2][part] * sum;
          }
        }
      }
    }
    turn = 0;
    if constexpr (!FINISHED) {
      for (int i = 0; i < 4; ++i) totals[i] = CHAINS == 2 ? sums[0][i] + sums[1][i] : sums[0][i];
    }
    // Sums of warps, [column][16].
    const u32 sums_at = places.sums + ((tile - begin) * WARPS + warp) * places.sums_bytes;
    for (int i = 0; i < 4; ++i) {
      // SIDES: columns from 4 on are the second chunk's, in the rows from 8 on.
      if (SIDES && (t >= 2) != (i >= 2)) continue;
      const int column = (t * 2 + i % 2) % ROWS_OF_X, row = g + i / 2 * 8;
      if (column < places.columns) {
        store_4(sums_at + (column * COLUMN + row) * 4, totals[i]);
      }
    }
  }
  __syncthreads();
  const int each = places.columns * TILE;
  for (int i = threadIdx.x; i < (end - begin) * each; i += THREADS) {
    const int tile = begin + i / each, row = i % TILE, column = i % each / TILE;
    const Expert& expert = shared.experts[EXPERTS ? tile / tiles : 0];
    const u32 sums_at = places.sums + (tile - begin) * WARPS * places.sums_bytes;
    const int first = (tile - begin) * turns, last = first + turns - 1;
    const int first_warp = first / each_turns, last_warp = last / each_turns;
    const int out_row = EXPERTS ? expert.pairs[column] : column;
    if (out_row < 0) continue;
    const int output = (EXPERTS ? tile % tiles : tile) * TILE + row;
    const int matrix = EXPERTS ? expert.index : 0;
    const float scale = !PLAIN && task.norm != nullptr ? norm_scale(task, shared, column) : 1;
    auto result = [&](int half) {
      float total = 0;
      for (int w = first_warp; w <= last_warp; ++w) {
        const u32 place = sums_at + w * places.sums_bytes + (column * COLUMN + row + half * 8) * 4;
        total += __uint_as_float(load_4(place));
        if constexpr (SIDES) total += __uint_as_float(load_4(place + 32));
      }
      if constexpr (FLOATS) total *= KIND == FP8 ? 0x1p60f : 0x1p6f;
      const int of = (matrix * (GATE == NONE ? 1 : 2) + half) * task.outputs + output;
      if constexpr (!PLAIN) total *= scale;
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
