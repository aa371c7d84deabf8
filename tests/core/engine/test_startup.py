"""What a start measures and logs, and what follows from the times of steps."""

from __future__ import annotations

import logging
import math
import random
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest

from minisgl.builtin import model_path
from minisgl.core import Plan, StepResult
from minisgl.core.groups import CacheGroup
from minisgl.core.step_times import PLANNED_SHARE, StepTimes
from minisgl.engine import Engine, EngineConfig
from minisgl.engine.cpu import CpuDevice
from minisgl.engine.device import Tuning
from minisgl.engine.graph import BESIDE_PROMPTS, PROMPT_TOKENS
from minisgl.engine.startup import graphs, measure, start_engine
from minisgl.engine.startup.measure import MOST_ROUNDS, fastest_threads
from minisgl.runtime.engine_worker import _Progress


def test_a_cpus_start_says_each_thing_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    start_engine(EngineConfig(model=str(model_path()), device="cpu", num_pages=64)).close()
    memory, threads = caplog.messages[-2:]
    assert memory.startswith("memory on CPU:\n")
    assert re.match(r"steps run on \d+ threads?( \(|: a decode step takes \S+ ms on 1 |$)", threads)


def test_a_start_measures_what_a_step_takes() -> None:
    config = EngineConfig(model=str(model_path()), device="cpu", num_pages=64)
    engine = start_engine(config, measure_steps=True)
    engine.close()
    times = engine.tuning.step_times
    assert times is not None
    sizes = [size for size, _ in times.prompt_us]
    assert sizes == [16, 32, 64, 128, 256][: len(sizes)]  # a busy machine is measured with fewer
    taken_us = [us for _, us in times.prompt_us]
    assert taken_us == sorted(taken_us)
    assert times.step_s(1) == times.decode_us * 1e-6 > 0
    assert times.default_chunk <= 256
    assert 0 < times.default_stall_s <= taken_us[-1] * 1e-6 / PLANNED_SHARE


class FakeEngine:
    """An engine whose steps take a given time, on two ranks of which this is the faster."""

    page_size, max_running, max_seq_len, max_prefill_tokens = 16, 64, 40_960, 8192
    max_decode_rows = 64
    memory = SimpleNamespace(num_tokens=100_000, groups=(CacheGroup(num_pages=6250),))
    device = SimpleNamespace(
        measured_sizes=(64, 1024, 4096, 8192),
        warm_up_rows=lambda most: [most],
        measuring_s=math.inf,
    )
    comm = SimpleNamespace(rank=0, all_min=lambda value: 2 * value)  # times come as negatives
    tuning = Tuning(graph_tokens=1024)

    def __init__(self, step_s: Callable[[Plan], float]) -> None:
        self.now = 0.0
        self._step_s = step_s

    def launch(self, plan: Plan) -> SimpleNamespace:
        self.now += self._step_s(plan)
        return SimpleNamespace(wait=lambda: StepResult(next_ids=[0]))


def test_the_model_of_a_step_is_that_of_the_slowest_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def step_s(plan: Plan) -> float:
        rows, prompt = plan.num_decodes, plan.num_tokens - plan.num_decodes
        attended = sum(plan.starts[:rows]) * 100e-9 + prompt * max(plan.starts) * 1e-9
        return 1e-3 + rows * 1e-5 + prompt * 1e-5 + attended

    engine = FakeEngine(step_s)
    monkeypatch.setattr(measure.time, "perf_counter", lambda: engine.now)
    times = measure.measure_step_times(cast(Engine, engine))
    # The slowest takes 0.1 s and more for 8,192 tokens, and twice as long as this one.
    assert [size for size, _ in times.prompt_us] == [64, 1024, 4096, 8192]
    assert times.step_s(1) == pytest.approx(2 * 1.01e-3, rel=0.01)
    assert times.step_s(33, 10_000) == pytest.approx(2 * 2.33e-3, rel=0.01)
    # One launch multiplies 20 decode rows and 1,000 prompt tokens as it does 1,020 of a prompt.
    assert times.step_s(20, 0, 1000, 1000 * 2048) == pytest.approx(
        2 * (11.2e-3 + 2.048e-3), rel=0.01
    )


@pytest.mark.parametrize(("drafts", "rows"), [("auto", 16), ("off", 1)])
def test_an_engine_of_one_request_has_rows_for_its_drafts(drafts: str, rows: int) -> None:
    engine = Engine(
        EngineConfig(
            model=str(model_path()),
            device="cpu",
            num_pages=64,
            max_running_requests=1,
            drafts=drafts,
        )
    )
    engine.close()
    assert engine.max_decode_rows == rows


def test_rows_of_drafts_are_measured_for_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a draft would cost nothing, by the model of a step's time."""
    engine = FakeEngine(lambda plan: 1e-3 + plan.num_decodes * 1e-5)
    engine.max_running, engine.max_decode_rows = 1, 16
    monkeypatch.setattr(measure.time, "perf_counter", lambda: engine.now)
    times = measure.measure_step_times(cast(Engine, engine))
    assert times.row_us == pytest.approx(20, rel=0.1)


@pytest.mark.parametrize(
    ("decode_ms", "token_ms", "most_s"),
    [(10, 0.3, 1.0), (12, 2.0, 1.0), (400, 60.0, 1.8)],  # a model of 8 B: three steps
)
def test_a_cpu_measures_for_a_second(
    decode_ms: float, token_ms: float, most_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took 4.5 s for a model of 135 M, and 10 for one of 8 B."""

    def step_s(plan: Plan) -> float:
        rows, prompt = plan.num_decodes, plan.num_tokens - plan.num_decodes
        return (decode_ms + (rows + prompt - 1) * token_ms) / 1e3 + max(plan.starts) * 1e-6

    engine = FakeEngine(step_s)
    sizes, seconds = CpuDevice.measured_sizes, CpuDevice.measuring_s
    device = SimpleNamespace(
        measured_sizes=sizes, warm_up_rows=lambda most: [], measuring_s=seconds
    )
    monkeypatch.setattr(FakeEngine, "device", device)
    monkeypatch.setattr(FakeEngine, "comm", SimpleNamespace(rank=0, all_min=lambda value: value))
    monkeypatch.setattr(FakeEngine, "max_prefill_tokens", 256)
    monkeypatch.setattr(measure.time, "perf_counter", lambda: engine.now)
    times = measure.measure_step_times(cast(Engine, engine))
    assert engine.now <= most_s
    assert times.step_s(1) == pytest.approx(decode_ms / 1e3, rel=0.01)
    assert times.step_s(16) == pytest.approx((decode_ms + 15 * token_ms) / 1e3, rel=0.01)
    assert times.step_s(0, 0, 16) == pytest.approx((decode_ms + 15 * token_ms) / 1e3, rel=0.01)


@pytest.mark.parametrize(("host_ms", "device_ms", "gap_ms"), [(0.7, 1.0, 1.0), (1.2, 0.5, 1.2)])
def test_a_decode_step_takes_as_long_as_a_stream_waits(
    host_ms: float, device_ms: float, gap_ms: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host launches a step while the device computes the one before."""
    engine = FakeEngine(lambda _: 0)
    device = SimpleNamespace(ends=0.0)

    def launch(plan: Plan) -> SimpleNamespace:
        engine.now += host_ms / 1e3
        device.ends = end = max(device.ends, engine.now) + device_ms / 1e3

        def wait() -> StepResult:
            engine.now = max(engine.now, end)
            return StepResult(next_ids=[0])

        return SimpleNamespace(wait=wait)

    monkeypatch.setattr(engine, "launch", launch)
    monkeypatch.setattr(FakeEngine, "comm", SimpleNamespace(rank=0, all_min=lambda value: value))
    monkeypatch.setattr(measure.time, "perf_counter", lambda: engine.now)
    times = measure.measure_step_times(cast(Engine, engine))
    assert times.step_s(1) == pytest.approx(gap_ms / 1e3, rel=0.01)


def test_a_pair_takes_as_long_as_in_the_default_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest chunk uses all of a GPU; a smaller one leaves a part idle."""

    def step_s(plan: Plan) -> float:
        prompt = plan.num_tokens - plan.num_decodes
        return 1e-4 + prompt * 1e-6 + max(plan.starts) * max(prompt * 1e-9, 2.048e-6)

    engine = FakeEngine(step_s)
    monkeypatch.setattr(measure.time, "perf_counter", lambda: engine.now)
    times = measure.measure_step_times(cast(Engine, engine))
    assert 1024 <= times.default_chunk < 4096
    assert times.attend_ns == pytest.approx(2 * 2, rel=0.01)


def test_a_chunk_behind_cached_tokens_has_a_cost_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def step_s(plan: Plan) -> float:
        prompt, before = plan.num_tokens - plan.num_decodes, max(plan.starts)
        resumes = 5e-4 if prompt and before else 0
        return 1e-4 + prompt * 1e-6 + prompt * before * 1e-9 + resumes

    engine = FakeEngine(step_s)
    monkeypatch.setattr(measure.time, "perf_counter", lambda: engine.now)
    times = measure.measure_step_times(cast(Engine, engine))
    assert times.attend_ns == pytest.approx(2 * 1, rel=0.01)
    for before in (16, 1000, 10_000):  # as FakeEngine says, the other rank takes twice as long
        taken_s = times.step_s(0, 0, 1024, 1024 * before)
        assert taken_s == pytest.approx(2 * (1e-4 + 1.024e-3 + 5e-4 + 1.024e-6 * before), rel=0.02)


@pytest.mark.parametrize(
    ("prompt_us", "chunk"),
    [
        (((64, 1000), (256, 4000), (1024, 16_000)), 64),  # the rate is that of 64 tokens
        (((64, 10_000), (256, 10_000), (1024, 16_000)), 960),
        (((512, 4000), (1024, 6000), (8192, 48_000)), 896),
        (((16, 5000), (32, 6000)), 32),
    ],
)
def test_the_default_chunk_keeps_most_of_the_best_rate(
    prompt_us: tuple[tuple[int, float], ...], chunk: int
) -> None:
    times = StepTimes(prompt_us=prompt_us)
    assert times.default_chunk == chunk
    best = max(times.rate(size) for size, _ in prompt_us)
    assert times.rate(chunk) >= 0.95 * best
    assert times.default_stall_s == pytest.approx(chunk / times.rate(chunk) / PLANNED_SHARE)


def test_a_padded_step_takes_as_long_as_its_graph() -> None:
    times = StepTimes(prompt_us=((64, 1000), (1024, 2000), (2048, 4000)), padded_tokens=1024)
    assert times.step_s(0, prompt_tokens=65) == pytest.approx(2000e-6)
    assert times.step_s(24, prompt_tokens=1000) == pytest.approx(2000e-6)
    assert times.step_s(0, prompt_tokens=1536) == pytest.approx(3000e-6)  # not padded


def test_beyond_the_largest_measured_step_the_last_slope_counts() -> None:
    times = StepTimes(prompt_us=((64, 1000), (128, 1500)), decode_us=900)
    assert times.step_s(0, 0, 256) == pytest.approx(2500e-6)
    assert times.step_s(0, 0, 1) == pytest.approx(1000e-6)
    assert times.step_s(1) == pytest.approx(900e-6)


class NoisyMachine:
    """Decode steps that take `step_s[threads]`, with 20 % noise."""

    def __init__(self, step_s: dict[int, float], noise: random.Random) -> None:
        self.now, self.num_decodes, self._threads = 0.0, 0, 0
        self._step_s, self._noise = step_s, noise

    def set_threads(self, count: int) -> None:
        self._threads = count

    def decode(self) -> None:
        self.num_decodes += 1
        self.now += self._step_s[self._threads] * max(self._noise.gauss(1, 0.2), 0.1)


@pytest.mark.parametrize(
    ("one_ms", "all_ms", "right"), [(85, 60, 2), (60, 85, 2), (3, 2, 2), (2, 3, 1), (2, 2, None)]
)
def test_noise_does_not_choose_the_threads(one_ms: float, all_ms: float, right: int | None) -> None:
    """Of 200 starts with 20 % noise all choose alike. A step of 60 ms and more is not compared."""
    choices, num_decodes = set(), set()
    for seed in range(200):
        machine = NoisyMachine({1: one_ms / 1e3, 2: all_ms / 1e3}, random.Random(seed))
        choices.add(
            fastest_threads(2, machine.set_threads, machine.decode, clock=lambda m=machine: m.now)
        )
        num_decodes.add(machine.num_decodes)
    assert choices == {right} or right is None
    assert num_decodes <= ({2, 6} if all_ms > 20 else {6 + 4 * MOST_ROUNDS})


@pytest.mark.parametrize(
    ("launch_ms", "rate", "wanted"),
    [
        (5.25, 400_000, 4200),
        (13, 400_000, 8448),  # that is all that can be padded
        (3.5, 400_000, 2800),
        (7.5, 20_000, 300),  # a large model
        (0, 400_000, 128),  # nothing to gain
    ],
)
def test_prompts_are_replayed_where_a_busy_host_launches_more_slowly(
    launch_ms: float, rate: float, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = SimpleNamespace(
        prompt_sizes=PROMPT_TOKENS, beside_prompts=BESIDE_PROMPTS, max_tokens=0
    )
    engine = SimpleNamespace(
        comm=SimpleNamespace(rank=0, all_min=lambda value: value),
        memory=SimpleNamespace(num_tokens=100_000),
        max_seq_len=40_960,
        runner=runner,
    )

    def prompt_us(_: object, num_tokens: int, rounds: int = 3) -> int:
        is_replayed = num_tokens <= runner.max_tokens
        return int(max(0 if is_replayed else launch_ms * 1e3, num_tokens / rate * 1e6))

    monkeypatch.setattr(graphs, "_prompt_us", prompt_us)
    chosen = graphs.choose_prompt_graphs(cast(Engine, engine))
    assert chosen == pytest.approx(wanted, rel=0.01)
    engine.max_seq_len, runner.max_tokens = 50, 0  # shorter than the smallest size
    assert graphs.choose_prompt_graphs(cast(Engine, engine)) == 0


def test_loading_says_how_much_every_two_seconds(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [0.0]
    monkeypatch.setattr("minisgl.runtime.engine_worker.time.monotonic", lambda: now[0])
    progress = _Progress()
    with caplog.at_level(logging.INFO, logger="minisgl"):
        for second in range(6):
            now[0] = float(second)
            progress(second << 30, 8 << 30)
    assert caplog.messages == [
        "loading weights: 2.00 GiB of 8.00 GiB (25 %)",
        "loading weights: 4.00 GiB of 8.00 GiB (50 %)",
    ]
