"""Steps at the start: each size once on a machine, and no more rows than there are."""

from __future__ import annotations

from pathlib import Path

import pytest

from minisgl.builtin import model_path
from minisgl.engine import Engine, EngineConfig, probe
from minisgl.engine.device import CpuDevice


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
