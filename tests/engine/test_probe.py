"""Steps at the start: each size once on a machine, and no more rows than there are."""

from __future__ import annotations

import logging
import re
from types import SimpleNamespace
from typing import cast

import pytest

from minisgl.builtin import model_path
from minisgl.engine import Engine, EngineConfig, probe
from minisgl.engine.graph import BESIDE_PROMPTS, PROMPT_TOKENS


@pytest.mark.parametrize(
    ("launch_ms", "rate", "chunks"),
    [
        (1, 400_000, (8192, 4096)),  # what takes 10 ms
        (16, 400_000, (8192, 4096)),  # 1,024 and 4,096 tokens take as long
        (16, 200_000, (8192, 2048)),
        (5, 20_000, (6144, 1024)),  # no smaller one, and a large one takes 0.3 s
    ],
)
def test_chunks_follow_from_what_steps_take(
    launch_ms: float,
    rate: float,
    chunks: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    sizes = []
    caplog.set_level(logging.INFO)

    def prefill_s(engine: object, num_tokens: int) -> float:
        sizes.append(num_tokens)
        return max(launch_ms / 1e3, num_tokens / rate)

    monkeypatch.setattr(probe, "_prefill_s", prefill_s)
    device = SimpleNamespace(probe_tokens=4096, min_chunk_tokens=1024, stall_target_s=0.01)
    comm = SimpleNamespace(rank=0, all_min=lambda value: value)
    memory = SimpleNamespace(num_tokens=100_000)
    engine = SimpleNamespace(device=device, comm=comm, memory=memory, max_seq_len=40_960)
    assert probe.choose_chunks(cast(Engine, engine)) == chunks
    assert sizes == [4096, 2048, 1024]
    most, stalling = chunks
    assert f"chunks of {most:,} tokens, {stalling:,} while more requests" in caplog.text


@pytest.mark.parametrize(
    ("rate", "tokens", "chunks"),
    [(20_000, 4096, (6144, 4096)), (400_000, 1024, (8192, 2560)), (20_000, 1024, (6144, 1024))],
)
def test_chunks_are_those_of_the_slowest_rank(
    rate: int, tokens: int, chunks: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """rate, tokens: what another rank finds, of all and in the time of the fewest. This one takes
    16 ms for any number up to 4,096, which are 256,000 a second."""
    monkeypatch.setattr(probe, "_prefill_s", lambda engine, num_tokens: 16e-3)
    theirs = iter([rate, tokens])
    engine = SimpleNamespace(
        device=SimpleNamespace(probe_tokens=4096, min_chunk_tokens=1024, stall_target_s=0.01),
        comm=SimpleNamespace(rank=1, all_min=lambda value: min(value, next(theirs))),
        memory=SimpleNamespace(num_tokens=100_000),
        max_seq_len=40_960,
    )
    assert probe.choose_chunks(cast(Engine, engine)) == chunks


def test_a_cpus_start_says_each_thing_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    Engine(EngineConfig(folder=model_path(), device="cpu", num_pages=64)).close()
    memory, threads, chunks = caplog.messages[-3:]
    assert memory.startswith("memory on CPU:\n")
    assert re.match(r"steps run on (\d+ threads?$|1 of \d+ threads: )", threads)
    assert re.fullmatch(
        r"prefill runs at \S+ tokens/s: chunks of \S+ tokens \(--max-prefill-length\)", chunks
    )


@pytest.mark.parametrize(
    ("launch_ms", "rate", "wanted"),
    [
        (10.5, 400_000, 4200),
        (13, 400_000, 4352),  # that is all that can be padded
        (7, 400_000, 2800),
        (15, 20_000, 300),  # a large model
        (0, 400_000, 64),  # nothing to gain
    ],
)
def test_prompts_are_replayed_where_launching_takes_longer(
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

    def prefill_s(_: object, num_tokens: int, repeats: int) -> float:
        is_replayed = num_tokens <= runner.max_tokens
        return max(0 if is_replayed else launch_ms / 1e3, num_tokens / rate)

    monkeypatch.setattr(probe, "_prefill_s", prefill_s)
    probe.choose_prompt_graphs(cast(Engine, engine))
    assert runner.max_tokens == pytest.approx(wanted, rel=0.01)
    engine.max_seq_len, runner.max_tokens = 50, 0  # shorter than the smallest size
    probe.choose_prompt_graphs(cast(Engine, engine))
    assert runner.max_tokens == 0
