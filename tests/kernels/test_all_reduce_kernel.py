"""The all-reduce kernel's protocol without a GPU: its source as C++, one coroutine for each rank.

What PTX does is replaced: another rank may go on before any word is read or written, and a rank
may sleep for long. The order is drawn from a seed, so it does not depend on the machine's load. The
threads of a grid run one after another, which the protocol allows because a thread waits for its
namesakes alone. A block of `add_norm` has one thread here, since its threads wait for each other.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from minisgl_kernels import CSRC

COMPILER = shutil.which("c++")
CALLS = 400
SHIM = """
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <random>
#include <vector>
#include <ucontext.h>
#define __device__
#define __shared__
#define __syncthreads()
#define __shfl_xor_sync(mask, x, lane) 0  // nothing comes from threads that are not there
#define rsqrtf(x) (1 / std::sqrt(x))
static float __uint_as_float(unsigned word) { float x; std::memcpy(&x, &word, 4); return x; }
static unsigned __float_as_uint(float x) { unsigned word; std::memcpy(&word, &x, 4); return word; }

static struct Index { unsigned x; } blockIdx, threadIdx, blockDim, gridDim;
struct Rank {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(1 << 18);
  Index indices[4];  // while another rank goes on
  int sleeps = 0;  // so many choices of this rank are passed over
  bool ended = false;
};
static std::vector<Rank> all;
static ucontext_t starter;
static int current = -1;
static std::minstd_rand chance(1);

static void go_on(int next) {
  if (next == current) return;
  Index* indices[] = {&blockIdx, &threadIdx, &blockDim, &gridDim};
  const int before = current;
  if (before >= 0) for (int i = 0; i < 4; ++i) all[before].indices[i] = *indices[i];
  current = next;
  if (next >= 0) for (int i = 0; i < 4; ++i) *indices[i] = all[next].indices[i];
  ucontext_t* from = before < 0 ? &starter : &all[before].context;
  swapcontext(from, next < 0 ? &starter : &all[next].context);
}
static void choose() {
  int left = all.size(), next;
  for (const Rank& rank : all) left -= rank.ended;
  if (!left) return go_on(-1);
  do next = chance() % all.size(); while (all[next].ended || all[next].sleeps-- > 0);
  go_on(next);
}
static void dawdle() {
  if (chance() % 20000 == 0) all[current].sleeps = 2000;
  if (chance() % 4 == 0) choose();
}
"""
READ = """__device__ Pack read(const Pack* from) {
  dawdle();
  Pack pack;
  for (int w = 0; w < 4; ++w) pack.words[w] = from->words[w];
  return pack;
}
"""
WRITE = """__device__ void write(Pack* to, Pack pack) {
  for (int w : {2, 0, 3, 1}) {
    dawdle();
    to->words[w] = pack.words[w];
  }
}
"""
MAIN = """
constexpr int CAPACITY = 37;
static float number(int rank, int call, int i) { return (rank * 7 + call * 13 + i * 5) % 41; }

static int run(int rank, const std::vector<Pack*>& memory) {
  Ranks ranks{{}, rank, CAPACITY};
  std::copy(memory.begin(), memory.end(), ranks.memory);
  std::minstd_rand plan(1);  // the same for every rank
  int wrong = 0;
  for (int call = 0; call < CALLS; ++call) {
    const bool once = plan() % 2;
    const int count = 1 + plan() % (once ? CAPACITY : CAPACITY * N);
    const int threads = once ? count : (count + N - 1) / N;
    std::vector<Pack> x(count);
    for (int i = 0; i < count * 4; ++i) {
      x[i / 4].words[i % 4] = __float_as_uint(number(rank, call, i));
    }
    x[call % count].words[1] = EMPTY;
    for (blockIdx.x = 0; blockIdx.x * NUM_THREADS < threads; ++blockIdx.x) {
      for (int thread = NUM_THREADS - 1; thread >= 0; --thread) {  // 0 is who takes the turn
        threadIdx.x = thread;
        if (once) one_shot<Float32>(x.data(), count, ranks);
        else two_shot<Float32>(x.data(), count, ranks);
      }
    }
    for (int i = 0; i < count * 4; ++i) {
      float total = 0;
      for (int other = 0; other < N; ++other) total += number(other, call, i);
      const float got = __uint_as_float(x[i / 4].words[i % 4]);
      wrong += i == call % count * 4 + 1 ? got == got : got != total;
    }
  }
  return wrong;
}

// Rows of 3 packs; half of the calls add what the call before left.
static int run_rows(int rank, const std::vector<Pack*>& memory) {
  constexpr int PACKS = 3, SIZE = 4 * PACKS, SLOTS = CAPACITY / PACKS;
  blockDim.x = 1;
  threadIdx.x = 0;
  Ranks ranks{{}, rank, CAPACITY};
  std::copy(memory.begin(), memory.end(), ranks.memory);
  std::minstd_rand plan(1);
  int wrong = 0, count = 1;
  bool once = true;
  std::vector<Pack> residual(SLOTS * N * PACKS), weight(PACKS);
  std::vector<double> whole(SLOTS * N * SIZE);
  for (int i = 0; i < SIZE; ++i) weight[i / 4].words[i % 4] = __float_as_uint(0.5f + i);
  for (int call = 0; call < CALLS; ++call) {
    const bool goes_on = call && plan() % 2;  // then all is as it was, but the numbers
    if (!goes_on) {
      once = plan() % 2;
      count = 1 + plan() % (once ? SLOTS : SLOTS * N);
    }
    std::vector<Pack> x(count * PACKS);
    for (int i = 0; i < count * SIZE; ++i) {
      x[i / 4].words[i % 4] = __float_as_uint(number(rank, call, i));
    }
    Rows rows{x.data(), residual.data(), weight.data(), count, PACKS, goes_on, 1e-6f};
    const int blocks = once ? count : (count + N - 1) / N;
    for (blockIdx.x = 0; int(blockIdx.x) < blocks; ++blockIdx.x) {
      if (once) add_norm_one_shot<Float32>(rows, ranks);
      else add_norm_two_shot<Float32>(rows, ranks);
    }
    for (int row = 0; row < count; ++row) {
      double square = 0;
      for (int i = row * SIZE; i < (row + 1) * SIZE; ++i) {
        double total = goes_on ? whole[i] : 0;
        for (int other = 0; other < N; ++other) total += number(other, call, i);
        whole[i] = total;
        square += total * total;
        const int at = once ? i : i - rank * blocks * SIZE;  // two_shot keeps its share alone
        if (at < 0 || at >= blocks * SIZE) continue;
        wrong += __uint_as_float(residual[at / 4].words[at % 4]) != total;
      }
      for (int i = row * SIZE; i < (row + 1) * SIZE; ++i) {
        const double normed = whole[i] / std::sqrt(square / SIZE + 1e-6);
        const double expected = (0.5 + i % SIZE) * normed;
        const float got = __uint_as_float(x[i / 4].words[i % 4]);
        wrong += !(std::abs(got - expected) <= 1e-6 * std::abs(expected));
      }
    }
  }
  return wrong;
}

static std::vector<Pack*> memory;
static int wrong = 0;
static bool has_rows = false;

static void rank_body(int rank) {
  wrong += has_rows ? run_rows(rank, memory) : run(rank, memory);
  all[rank].ended = true;
  choose();
}

int main(int count, char** words) {
  has_rows = count > 1 && !std::strcmp(words[1], "rows");
  std::vector<std::vector<Pack>> rooms(N, std::vector<Pack>(4 * N * CAPACITY + CAPACITY));
  for (auto& own : rooms) {
    std::memset(own.data(), 0xff, own.size() * sizeof(Pack));
    memory.push_back(own.data());
  }
  all = std::vector<Rank>(N);
  for (int rank = 0; rank < N; ++rank) {
    ucontext_t& context = all[rank].context;
    getcontext(&context);
    context.uc_stack.ss_sp = all[rank].stack.data();
    context.uc_stack.ss_size = all[rank].stack.size();
    makecontext(&context, reinterpret_cast<void (*)()>(rank_body), 1, rank);
  }
  choose();
  std::printf("%d wrong\\n", wrong);
}
"""


@pytest.fixture(scope="module", params=[2, 3, 4])
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build it for a number of ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    files = ("peer_memory.cuh", "all_reduce.cu")
    source = "".join((CSRC / file).read_text() for file in files)
    source = source[: source.index("#define KERNEL")]
    for name, ours in (("read", READ), ("write", WRITE)):
        source, found = re.subn(rf"__device__ \w+ {name}\(.*?\n}}\n", ours, source, flags=re.DOTALL)
        assert found == 1
    (folder / "ranks.cpp").write_text(SHIM + source + MAIN)
    macros = (f"-DNUM_RANKS={request.param}", "-DNUM_THREADS=4", f"-DCALLS={CALLS}")
    command = ("-std=c++17", "-O1", "-w", *macros, "ranks.cpp", "-o", "ranks")
    subprocess.run([str(COMPILER), *command], cwd=folder, check=True, timeout=150)
    return folder / "ranks"


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize("what", ["sums", "rows"])
def test_ranks_that_dawdle_have_the_sum(program: Path, what: str) -> None:
    done = subprocess.run([program, what], capture_output=True, text=True, timeout=150)
    assert done.stdout == "0 wrong\n"
