"""The floor of a workload on a card whose memory does not hold all requests at once."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable, Sequence

import pytest

from minisgl.errors import ConfigError
from minisgl_bench.floor import (
    H200_BANDWIDTH,
    H200_FLOPS,
    H200_MEMORY,
    Shape,
    floor_fields,
    floor_s,
    rows_at_once,
    step_rows,
)
from minisgl_bench.lengths import WORKLOADS
from minisgl_bench.shapes import SHAPES, shape_of

# Weights: 4 * (1 * (2 * 2 + 2) * 2 + 2 * 3 * 8) = 240, and 40 of the head; together 560 bytes.
# After n tokens a request holds 8 n + 8 min(n, 2) + 20 bytes.
WINDOWS = Shape(
    hidden_size=4, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=2, intermediate_size=8,
    vocab_size=10, attention_layers=1, window=3, window_kv_bytes=8, window_flops=16, state_bytes=20,
)  # fmt: skip
EXPERTS = Shape(
    hidden_size=4, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=2, intermediate_size=8,
    vocab_size=10, num_experts=8, top_k=2,
)  # fmt: skip
WEIGHTS = {WINDOWS: 560, EXPERTS: 2 * (4 * (2 * 6 * 2 + 2 * 8) + 2 * 4 * 8 * 3 * 8 + 40)}
Requests = list[tuple[int, int]]


def test_a_small_floor_by_hand() -> None:
    requests = [(2, 3)] * 2  # before the steps of its tokens, each holds 0, 52 and 60 bytes
    assert step_rows(WINDOWS, requests) == [2, 2, 2]
    # In 60 bytes beside the weights: 3, 4, 5 and 6 tokens in 1, 2, 3 and 4 steps.
    assert step_rows(WINDOWS, requests, memory=620) == [2, 2, 1, 1]
    assert rows_at_once(WINDOWS, requests, memory=620) == 1  # 60 / (224 / 6)
    # 52 bytes before each second token: one more in each step. A common prefix takes 8 bytes once.
    assert step_rows(WINDOWS, [(2, 2)] * 4, memory=612) == [4, 2, 1, 1]
    assert step_rows(WINDOWS, [(3, 2)] * 4, shared=1, memory=620) == [4, 2, 1, 1]
    prefill = 2 * 240 * 4 + 2 * 40 * 2 + 4 * 4 * 2 * 2 + 16 * 2 * 2
    # In a window of 3 the queries at 2 to 5 see 17 keys: 3**2 / 2 + 2 * 3 - 2**2 / 2 in a request.
    read = 4 * 560 + 8 * 21 + 8 * 17 + 20 * 6
    assert floor_s(WINDOWS, requests, memory=620) == pytest.approx(
        prefill / H200_FLOPS + read / H200_BANDWIDTH, rel=1e-12
    )
    # Two cards have twice the memory and twice the rates.
    assert floor_s(WINDOWS, requests, memory=310, cards=2) == pytest.approx(
        floor_s(WINDOWS, requests, memory=620) / 2, rel=1e-12
    )
    fields = floor_fields(WINDOWS, requests, 1.0, memory=620)
    assert fields == {"floor_s": 0.0, "of_floor": 0.0, "rows_at_once": 1}
    assert "rows_at_once" not in floor_fields(WINDOWS, requests, 1.0, memory=H200_MEMORY)


def test_a_request_that_never_fits_is_refused() -> None:
    with pytest.raises(ConfigError, match="a request holds"):
        floor_s(WINDOWS, [(2, 3)], memory=560 + 59)
    assert step_rows(WINDOWS, [(2, 3)], memory=560 + 60) == [1, 1, 1]
    assert step_rows(WINDOWS, [(10**9, 1)], memory=560) == [1], "no later step reads its keys"


def _draw(rng: random.Random) -> tuple[Shape, Requests, int, float]:
    """Return a shape, requests, the length of their common prefix, and a memory."""
    shape = rng.choice([WINDOWS, EXPERTS])
    shared = rng.choice([0, 0, 1])
    requests = [(rng.randint(2, 6), rng.randint(2, 4)) for _ in range(rng.randint(2, 5))]
    largest = max(shape.held_bytes(prompt - shared + output) for prompt, output in requests)
    room = largest * rng.uniform(1, 1.8)
    return shape, requests, shared, WEIGHTS[shape] + shape.kv_bytes * shared + room


def _at_rest(
    shape: Shape, requests: Requests, shared: int, done: Sequence[int], memory: float
) -> bool:
    """Return whether unfinished requests fit between two steps, after so many tokens of each."""
    held = WEIGHTS[shape] + shape.kv_bytes * shared
    for (prompt, output), count in zip(requests, done, strict=True):
        if 0 < count < output:
            held += shape.held_bytes(prompt - shared + count - 1)
    return held <= memory


def _least(
    shape: Shape, requests: Requests, shared: int, memory: float, cost: Callable[[int], float]
) -> float:
    """Return the least sum of cost(rows) over the steps of any schedule that fits: the shortest
    path over the numbers of tokens that each request has. Paused requests keep what they hold."""
    end = tuple(output for _, output in requests)
    queue, seen = [(0.0, (0,) * len(end))], set()
    while True:
        total, done = heapq.heappop(queue)
        if done == end:
            return total
        if done in seen:
            continue
        seen.add(done)
        for row in itertools.product(
            *(range(1 + (n < last)) for n, last in zip(done, end, strict=True))
        ):
            then = tuple(map(sum, zip(done, row, strict=True)))
            if any(row) and _at_rest(shape, requests, shared, then, memory):
                heapq.heappush(queue, (total + cost(sum(row)), then))


def test_no_schedule_takes_fewer_steps_or_reads_less() -> None:
    rng = random.Random(0)
    above_longest = exact = 0
    for _ in range(60):
        shape, requests, shared, memory = _draw(rng)
        rows = step_rows(shape, requests, shared=shared, memory=memory)
        assert sum(rows) == sum(output for _, output in requests)
        steps = _least(shape, requests, shared, memory, lambda _: 1.0)
        assert len(rows) <= steps
        least = _least(shape, requests, shared, memory, shape.read_bytes)
        assert sum(map(shape.read_bytes, rows)) <= least * (1 + 1e-12)
        above_longest += len(rows) > max(output for _, output in requests)
        exact += len(rows) == steps
    assert above_longest > 8, "the memory decides too rarely"
    assert exact > 16


def test_an_engine_that_admits_what_fits_takes_no_fewer_steps() -> None:
    """It knows each output's length, and starts the next request if all fit to their ends."""
    rng = random.Random(1)
    ratios = []
    for _ in range(20):
        requests = [(rng.randint(2, 60), rng.randint(1, 60)) for _ in range(40)]
        memory = 560 + WINDOWS.held_bytes(120) * rng.uniform(1, 20)
        waiting, done, steps = list(range(40)), [0] * 40, 0
        while any(count < output for count, (_, output) in zip(done, requests, strict=True)):
            running = [i for i in range(40) if 0 < done[i] < requests[i][1]]
            while waiting and _fit_to_their_ends(requests, done, [*running, waiting[0]], memory):
                running.append(waiting.pop(0))
            for i in running:
                done[i] += 1
            steps += 1
        ratios.append(steps / len(step_rows(WINDOWS, requests, memory=memory)))
    assert min(ratios) >= 1
    assert max(ratios) < 2


def _fit_to_their_ends(
    requests: Requests, done: Sequence[int], running: Sequence[int], memory: float
) -> bool:
    some = [requests[i] for i in running]
    for ahead in range(1, 1 + max(output for _, output in some)):
        then = [min(done[i] + ahead, requests[i][1]) for i in running]
        if not _at_rest(WINDOWS, some, 0, then, memory):
            return False
    return True


def test_more_memory_never_raises_the_floor_and_enough_changes_nothing() -> None:
    rng = random.Random(2)
    for _ in range(50):
        shape, requests, shared, memory = _draw(rng)
        memories = [memory * (1 + i / 40) for i in range(40)]
        floors = [floor_s(shape, requests, shared=shared, memory=size) for size in memories]
        assert floors == sorted(floors, reverse=True)
        # Enough: all requests run from the first step on.
        everything = math.ceil(memory)
        longest = max(output for _, output in requests)
        while not all(
            _at_rest(
                shape, requests, shared, [min(i, output) for _, output in requests], everything
            )
            for i in range(longest)
        ):
            everything += 1
        assert floor_s(shape, requests, shared=shared, memory=everything) == floor_s(
            shape, requests, shared=shared
        )


@pytest.mark.parametrize("name", ["qwen3-32b", "gpt-oss-20b"])
def test_256_requests_fit_one_h200(name: str) -> None:
    shape, requests = shape_of(SHAPES[name]), WORKLOADS["throughput"].requests
    assert floor_s(shape, requests, memory=H200_MEMORY) == floor_s(shape, requests)
    assert rows_at_once(shape, requests, memory=H200_MEMORY) == 256


def test_256_requests_of_gemma_4_31b_do_not_fit_one_h200() -> None:
    shape, requests = shape_of(SHAPES["gemma-4-31b"]), WORKLOADS["throughput"].requests
    assert (shape.window, shape.window_kv_bytes) == (1024, 50 * 2 * 16 * 256 * 2)
    assert rows_at_once(shape, requests, memory=H200_MEMORY) == 118
    assert len(step_rows(shape, requests, memory=H200_MEMORY)) == 1292
    assert floor_s(shape, requests) == pytest.approx(52.220, abs=1e-3)
    assert floor_s(shape, requests, memory=H200_MEMORY) == pytest.approx(56.075, abs=1e-3)
    # A cache of 8 bits holds twice as many.
    shape = shape_of(SHAPES["gemma-4-31b"], kv_itemsize=1)
    assert rows_at_once(shape, requests, memory=H200_MEMORY) == 236
    assert floor_s(shape, requests, memory=H200_MEMORY) == floor_s(shape, requests)
