// Multiplies tiles of grouped GEMMs (grouped_tiles.cuh) by weights of few bits. The matrix instructions
// take the decoded weights from registers: a thread has 4 rows of weights, 2 of each half of a tile, and
// decodes a batch while its warpgroup's matrix instructions of the batch before run.
//
// Behind gate.cuh, grouped_tiles.cuh and a header that decodes, packed_rows.cuh or tile_rows.cuh, with
// OUTER and GATE defined.

constexpr bool ONE_BATCH = INPUTS == 64;  // in a stage; or two

// Stores the outputs of the sums of N pairs, from column `from` on. units: what the sums of each of the
// thread's rows are multiplied by.
template <int N>
__device__ __forceinline__ void finish(const float (&sums)[2][N / 2], const float (&units)[4], const Rows& rows,
                                       const Task& task, Shared& shared, const TilePairs& tile_pairs,
                                       int from) {
  const int output = tile_pairs.tile.block * OUTPUTS + threadIdx.x / 128 * 64;
  float biases[4] = {};
  if ((GATED || STREAM) && task.bias != nullptr) {
#pragma unroll
    for (int i = 0; i < 4; ++i) biases[i] = number(task.bias[rows.number[i]]);
  }
  if constexpr (GATED) {
    store<N>(task, shared, tile_pairs, output, from, [&](int i, int) {
      const int row = i / 2 % 2;
      if (rows.local[row] >= task.outputs) return 0u;
      auto output_of = [&](int j) {
        const float gate = sums[0][j] * units[row] + biases[row];
        const float up = sums[1][j] * units[2 + row] + biases[2 + row];
        return gated(gate, up, task.alpha, task.limit) * (STREAM ? 1 : X_UNIT);
      };
      return round(output_of(i), output_of(i + 1));
    });
  } else {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      store<N>(task, shared, tile_pairs, output + half * BOX, from, [&](int i, int column) {
        const int row = half * 2 + i / 2 % 2;
        if constexpr (STREAM) return round(sums[half][i] + biases[row], sums[half][i + 1] + biases[row]);
        return round(sums[half][i] * units[row] * tile_pairs.scales[column],
                     sums[half][i + 1] * units[row] * tile_pairs.scales[column + 1]);
      });
    }
  }
}

template <int N>
__device__ __forceinline__ void multiply_tile(const Task& task, Shared& shared, unsigned stages,
                                              Stage& at, const TilePairs& tile_pairs) {
  const Tile& tile = tile_pairs.tile;
  const Rows rows(task, tile);
  float sums[2][N / 2];  // of both halves
#pragma unroll
  for (int i = 0; i < N / 2; ++i) sums[0][i] = sums[1][i] = 0;
  float units[4] = {1, 1, 1, 1};
  PeriodScales scales, next;  // of the batches that are decoded now, and of the period after them
  const int first = tile.input / PERIOD, periods = tile.until / PERIOD;
  load_scales(next, task, rows, first);
  int stage = at.index;  // of the batch whose matrix instructions run

  // Decodes the next batch. The scales that it loads are used a period later: the fence, which waits
  // for loads before it, would wait for those just begun.
  auto decode_next = [&](Operands& a, int period, bool second) {
    if (ONE_BATCH || !second) {
      wait(shared_address(&shared.full[at.index]), at.parity);
      if (!STREAM) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // for x's rows
    }
    if (!GROUPED && !second) {
      scales = next;
      if (period + 1 < periods) load_scales(next, task, rows, period + 1);
    }
    decode_batch(a, rows, scales, stages + at.index * STAGE_BYTES, second);
  };
  auto begin = [&](const Operands& a, bool second) {
    stage = at.index;
    const unsigned x = stages + stage * STAGE_BYTES + W_BYTES + (!ONE_BATCH && second) * X_BYTES;
    multiply_begin();
#pragma unroll
    for (int k = 0; k < BATCH; ++k) {
      multiply(sums[0], a[0][k], matrix(x) + k * 2);
      multiply(sums[1], a[1][k], matrix(x) + k * 2);
    }
    multiply_commit();
    if (ONE_BATCH || second) at.advance();
  };
  auto end = [&](bool is_last_of_stage) {
    multiply_wait();
    settle(sums[0]);
    settle(sums[1]);
    if (is_last_of_stage && threadIdx.x % 128 == 0) arrive(shared_address(&shared.empty[stage]));
  };

  Operands even, odd;
  decode_next(even, first, false);
  for (int period = first; period < periods; ++period) {
    if constexpr (SCALED) {
      if (period % PERIODS == 0 || period == first) rescale(sums, units, scales, 0);
    }
    begin(even, false);
    decode_next(odd, period, true);
    end(ONE_BATCH);
    if constexpr (SCALED && PARTS == 2) rescale(sums, units, scales, 1);
    begin(odd, true);
    if (period + 1 < periods) decode_next(even, period + 1, false);
    end(true);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    units[i] *= UNIT;
    if (OUTER) units[i] *= task.outer[rows.number[i]];
  }
  if constexpr (STREAM) {
#pragma unroll
    for (int i = 0; i < N; ++i) sums[i % 2][i / 2] *= units[i % 2 * 2 + i / 4 % 2];
#pragma unroll
    for (int i = 0; i < 4; ++i) units[i] = 1;
    const Exchange exchange(task, shared, tile);
    const int steps = tile.width / STEP, storing = exchange.storing, own = blockIdx.x - exchange.first;
    if (uniform(exchange.is_needed() && own == 0 && storing == 1)) {
      exchange.await();
      exchange.add(sums);
      exchange.end(1);
    } else if (uniform(exchange.is_needed())) {
      exchange.leave(sums);
      if (uniform(own == storing)) return;
      const int first = steps * own / storing, until = steps * (own + 1) / storing;
      if (uniform(first == until)) return;
      exchange.await();
      for (int step = first; uniform(step < until); ++step) {
        float totals[2][STEP / 2];
        exchange.add_up(totals, step);
        finish<STEP>(totals, units, rows, task, shared, tile_pairs, step * STEP);
      }
      exchange.end(min(steps, storing));
      return;
    }
  }
  finish<N>(sums, units, rows, task, shared, tile_pairs, 0);
}
