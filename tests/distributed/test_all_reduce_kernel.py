"""The all-reduce kernel's protocol without a GPU: its source as C++, one thread for each rank.

What PTX does is replaced: words are atomics, and ranks dawdle at random. The threads of a grid run
one after another, which the protocol allows because a thread waits for its namesakes alone.
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
#include <cstdio>
#include <cstring>
#include <random>
#include <thread>
#include <vector>
#define __device__
#define __syncthreads()
static thread_local struct { unsigned x; } blockIdx, threadIdx;
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
    threads.emplace_back([&, rank] { wrong += run(rank, memory); });
  }
  for (auto& thread : threads) thread.join();
  std::printf("%d wrong\\n", wrong.load());
}
"""


def build(source: str, num_ranks: int, folder: Path) -> Path:
    source = source[: source.index("#define KERNEL")]
    for name, ours in (("read", READ), ("write", WRITE)):
        source, found = re.subn(rf"__device__ \w+ {name}\(.*?\n}}\n", ours, source, flags=re.DOTALL)
        assert found == 1
    (folder / "ranks.cpp").write_text(SHIM + source + MAIN)
    macros = (f"-DNUM_RANKS={num_ranks}", "-DNUM_THREADS=4", f"-DCALLS={CALLS}")
    command = ("-std=c++17", "-O1", "-w", "-pthread", *macros, "ranks.cpp", "-o", "ranks")
    subprocess.run([str(COMPILER), *command], cwd=folder, check=True, timeout=60)
    return folder / "ranks"


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_ranks_that_dawdle_have_the_sum(num_ranks: int, tmp_path: Path) -> None:
    source = (jit.CSRC / "cuda" / "all_reduce.cu").read_text()
    done = subprocess.run(
        [build(source, num_ranks, tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "0 wrong\n"
