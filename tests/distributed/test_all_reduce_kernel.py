"""The all-reduce kernel's protocol without a GPU: its source as C++, one thread for each rank.

What PTX does is replaced: words are atomics, and ranks dawdle at random. The threads of a grid run
one after another, which the protocol allows because a thread waits for its namesakes alone. A block
of `add_norm` has one thread here, since its threads wait for each other.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from minisgl.kernel import jit

COMPILER = shutil.which("c++")
CALLS = 1500
SHIM = """
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <thread>
#include <vector>
#define __device__
#define __shared__
#define __syncthreads()
#define __shfl_xor_sync(mask, x, lane) 0  // nothing comes from threads that are not there
#define rsqrtf(x) (1 / std::sqrt(x))
static thread_local struct { unsigned x; } blockIdx, threadIdx, blockDim, gridDim;
static thread_local std::minstd_rand chance;
static float __uint_as_float(unsigned word) { float x; std::memcpy(&x, &word, 4); return x; }
static unsigned __float_as_uint(float x) { unsigned word; std::memcpy(&word, &x, 4); return word; }
static void dawdle() {
  if (chance() % 8 == 0) std::this_thread::yield();
  if (chance() % 20000 == 0) std::this_thread::sleep_for(std::chrono::microseconds(200));
}
"""
READ = """__device__ Pack read(const Pack* from) {
  dawdle();
  Pack pack;
  for (int w = 0; w < 4; ++w) pack.words[w] = __atomic_load_n(&from->words[w], __ATOMIC_RELAXED);
  return pack;
}
"""
WRITE = """__device__ void write(Pack* to, Pack pack) {
  for (int w : {2, 0, 3, 1}) {
    dawdle();
    __atomic_store_n(&to->words[w], pack.words[w], __ATOMIC_RELAXED);
  }
}
"""
MAIN = """
constexpr int CAPACITY = 37;
static float number(int rank, int call, int i) { return (rank * 7 + call * 13 + i * 5) % 41; }

static int run(int rank, const std::vector<Pack*>& memory) {
  chance.seed(rank + 1);
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
  chance.seed(rank + 1);
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

int main() {
  std::vector<std::vector<Pack>> rooms(N, std::vector<Pack>(4 * N * CAPACITY + CAPACITY));
  std::vector<Pack*> memory;
  for (auto& own : rooms) {
    std::memset(own.data(), 0xff, own.size() * sizeof(Pack));
    memory.push_back(own.data());
  }
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int rank = 0; rank < N; ++rank) {
    threads.emplace_back([&, rank] { wrong += ROWS ? run_rows(rank, memory) : run(rank, memory); });
  }
  for (auto& thread : threads) thread.join();
  std::printf("%d wrong\\n", wrong.load());
}
"""


def build(source: str, num_ranks: int, rows: bool, folder: Path) -> Path:
    source = source[: source.index("#define KERNEL")]
    for name, ours in (("read", READ), ("write", WRITE)):
        source, found = re.subn(rf"__device__ \w+ {name}\(.*?\n}}\n", ours, source, flags=re.DOTALL)
        assert found == 1
    (folder / "ranks.cpp").write_text(SHIM + source + MAIN)
    macros = (f"-DNUM_RANKS={num_ranks}", "-DNUM_THREADS=4", f"-DCALLS={CALLS}", f"-DROWS={rows:d}")
    command = ("-std=c++17", "-O1", "-w", "-pthread", *macros, "ranks.cpp", "-o", "ranks")
    subprocess.run([str(COMPILER), *command], cwd=folder, check=True, timeout=60)
    return folder / "ranks"


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize("rows", [False, True], ids=["sums", "rows"])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_ranks_that_dawdle_have_the_sum(num_ranks: int, rows: bool, tmp_path: Path) -> None:
    source = (jit.CSRC / "cuda" / "all_reduce.cu").read_text()
    done = subprocess.run(
        [build(source, num_ranks, rows, tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "0 wrong\n"
