"""Steps at the start: each size once on a machine, and no more rows than there are."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from minisgl.builtin import model_path
from minisgl.engine import Engine, EngineConfig, probe
from minisgl.engine.cpu import CpuDevice


def test_sizes_are_compiled_at_the_first_start_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[tuple[int, int]] = []
    run_probe = probe.run_probe

    def recorded(engine: Engine, plan: probe.Plan) -> None:
        sizes.append((plan.num_decodes, plan.num_tokens - plan.num_decodes))
        run_probe(engine, plan)

    monkeypatch.setattr(CpuDevice, "warm_up_rows", (1, 3, 8))
    monkeypatch.setattr(probe, "_warm_marker", lambda engine: tmp_path / "cache" / "warm")
    monkeypatch.setattr(probe, "run_probe", recorded)

    def start() -> set[tuple[int, int]]:
        sizes.clear()
        config = EngineConfig(
            folder=model_path(), device="cpu", num_pages=8, max_running=8, max_prefill_tokens=64
        )
        Engine(config).close()
        return set(sizes) - {(1, 0)}  # which is also timed, to choose the number of threads

    assert start() == {(1, 16), (3, 0), (3, 16)}
    assert start() == set()


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
    launch_ms: float, rate: float, chunks: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = []

    def prefill_s(engine: object, num_tokens: int) -> float:
        sizes.append(num_tokens)
        return max(launch_ms / 1e3, num_tokens / rate)

    monkeypatch.setattr(probe, "_prefill_s", prefill_s)
    device = SimpleNamespace(
        probe_tokens=4096, min_chunk_tokens=1024, stall_target_s=0.01, describe=lambda: "a device"
    )
    comm = SimpleNamespace(rank=0, all_min=lambda value: value)
    memory = SimpleNamespace(num_tokens=100_000)
    engine = SimpleNamespace(device=device, comm=comm, memory=memory, max_seq_len=40_960)
    assert probe.choose_chunks(cast(Engine, engine)) == chunks
    assert sizes == [4096, 2048, 1024]
