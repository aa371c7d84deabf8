// The warpgroup of `delta_scan.cu` that fetches, and what it shares with the others. Behind delta.cuh,
// with STAGES and BESIDE defined.

constexpr unsigned KEYS = 0, QUERIES = 2 * MATRIX, VALUES = 4 * MATRIX;  // in a stage
constexpr unsigned INVERSE = 6 * MATRIX, SCORES = 7 * MATRIX, STAGE_BYTES = 8 * MATRIX;

// What the tokens of an interval are multiplied by.
struct Factors {
  alignas(8) float key[C], query[C], value[C], known[C], update[C];
  float state;
};

struct Shared {
  unsigned long long full[STAGES], empty[STAGES];
  Factors factors[STAGES];
};

static_assert(sizeof(Shared) <= BESIDE, "delta_hopper.py asks for less");

// The row and the head of a block.
struct Row : Span {
  int begin, head, key_head;
  long long place;  // of the first interval, in what `delta_prepare` has written
  const int* state_pages;
};

__device__ Row find_row(const Delta& delta) {
  const int index = blockIdx.x / delta.heads, head = blockIdx.x % delta.heads;
  const int *lengths = delta.rows + 2 * delta.rows_stride, *ends = lengths + delta.rows_stride;
  int before = 0;  // intervals of the rows before
  for (int i = threadIdx.x % 32; i < index; i += 32) {
    before += intervals(ends[i] - lengths[i], ends[i]);
  }
  before = __reduce_add_sync(~0u, before);
  const Span span = find_span(delta, index);
  return {span, span.start / C * C, head, head / (delta.heads / delta.key_heads),
          (long long)before * delta.heads + head,
          delta.state_table + (long long)delta.rows[index] * delta.state_stride};
}

__device__ void meet_fetchers() { asm volatile("bar.sync 1, 128;" ::: "memory"); }

// The factors of one token, as they were stored.
struct Stored {
  float decay, last_decay, key, query, beta;
};

// Fetches an interval, and multiplies the one before meanwhile.
__device__ void fetch(const Delta& delta, const Row& row, Shared& shared, unsigned stages) {
  const int thread = threadIdx.x - 2 * GROUP, first = thread / 16;
  const unsigned to = place_of(thread);
  const unsigned square_to = thread / 8 * 128 + ((thread % 8 ^ thread / 8 % 8) << 4);
  const int value = (2 * delta.key_heads + row.head) * WIDTH + thread % 16 * 8;

  auto copy_interval = [&](int base, long long place, unsigned stage) {
    copy_keys_and_queries(delta, row, base, row.key_head, thread, stage + KEYS + to,
                          stage + QUERIES + to);
#pragma unroll
    for (int i = 0; i < PASSES; ++i) {
      const int at = base + first + i * 8;
      const long long token = row.is_new(at) ? row.offset + at : 0;
      const void* from = delta.mixed + token * delta.width() + value;
      copy_16(stage + VALUES + to + i * 1024, from, row.is_new(at));
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const long long from = place * C * C + (thread + i * GROUP) * 8;
      copy_16(stage + INVERSE + square_to + i * 2048, delta.inverses + from, true);
      copy_16(stage + SCORES + square_to + i * 2048, delta.scores + from, true);
    }
  };
  auto load_factors = [&](int base, long long place) -> Stored {
    if (thread >= C || base >= row.end) return {};
    const float* of = delta.factors + place * 3 * C;
    const int at = base + thread;
    const long long weight = (long long)(row.offset + at) * delta.heads + row.head;
    return {of[thread], of[C - 1], of[C + thread], of[2 * C + thread],
            row.is_new(at) ? delta.beta[weight] : 0};
  };
  auto multiply_interval = [&](const Stored& stored, Factors& factors, unsigned stage) {
    if (thread < C) {
      const float faded = exponential(stored.decay);
      factors.key[thread] = stored.key;
      factors.query[thread] = stored.query * faded;
      factors.value[thread] = stored.beta;
      factors.known[thread] = stored.beta * faded;
      factors.update[thread] = exponential(stored.last_decay - stored.decay);
      if (thread == 0) factors.state = exponential(stored.last_decay);
    }
    meet_fetchers();
#pragma unroll
    for (int i = 0; i < PASSES; ++i) {  // each thread, what it has copied
      const unsigned keys = stage + KEYS + to + i * 1024, queries = keys + QUERIES - KEYS;
      store_16(keys, scaled(load_16(keys), factors.key[first + i * 8]));
      store_16(queries, scaled(load_16(queries), factors.query[first + i * 8]));
    }
  };

  long long place = row.place;
  Stored stored = load_factors(row.begin, place);
  int stage = 0, before = 0, parity = 1;  // stages are empty at first
  for (int base = row.begin; base < row.end + C; base += C) {
    if (base < row.end) {
      wait(shared_address(&shared.empty[stage]), parity);
      copy_interval(base, place, stages + stage * STAGE_BYTES);
    }
    commit_copies();
    if (base > row.begin) {
      wait_for_copies<1>();
      multiply_interval(stored, shared.factors[before], stages + before * STAGE_BYTES);
      show_to_multiply();
      arrive(shared_address(&shared.full[before]));
      stored = load_factors(base, place);
    }
    place += delta.heads;
    before = stage;
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
}
