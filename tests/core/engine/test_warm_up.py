"""What a first start compiles, and which start is the first."""

from __future__ import annotations

import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from minisgl import plugins
from minisgl.builtin import model_path
from minisgl.core import Plan
from minisgl.engine import Engine, EngineConfig
from minisgl.engine.cpu import CpuDevice
from minisgl.engine.startup import probe, start_engine, warm_up
from minisgl.models.blocks.mixture import MoeSpec


@pytest.mark.parametrize("num_pages", [8, 64])
def test_kinds_of_steps_are_compiled_at_the_first_start_alone(
    num_pages: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds: list[tuple[int, tuple[int, ...], int, bool]] = []
    run_probe = probe.run_probe

    def recorded(engine: Engine, plan: Plan) -> None:
        run_probe(engine, plan)
        kinds.append(
            (
                plan.num_decodes,
                tuple(plan.ends[plan.num_decodes :]),
                engine._tables.common_tokens(plan, engine.page_size),
                plan.begins[0][1].top_k > 0,
            )
        )

    monkeypatch.setattr(CpuDevice, "warm_up_rows", lambda device, most: [1, 5, most])
    monkeypatch.setattr(warm_up, "_markers", lambda *_: [tmp_path / "cache" / "warm"])
    monkeypatch.setattr(warm_up, "run_probe", recorded)

    def start() -> set[tuple[int, tuple[int, ...], int, bool]]:
        kinds.clear()
        config = EngineConfig(
            model=str(model_path()),
            device="cpu",
            num_pages=num_pages,
            max_running_requests=8,
            max_prefill_length=128,
            drafts="off",  # with drafts, a step may have more rows than requests
        )
        start_engine(config).close()
        return set(kinds)

    alone = {(1, (), 0, False), (5, (), 0, False), (8, (), 0, False), (1, (), 0, True)}
    with_prompts = {(rows, (16,), 0, False) for rows in (1, 5, 7)}
    ends = ((16, 1), (64, 1), (64,), (128,), (32,))  # of the last 16 tokens were there before
    prompts = {(0, prompts, 0, False) for prompts in ends}
    shared = {(5, (), 256, False), (8, (), 256, False)} if num_pages == 64 else set()
    assert start() == alone | with_prompts | prompts | shared
    assert start() == set()


@pytest.mark.parametrize(
    "other",
    [
        {"dtype": "bfloat16"},
        {"max_running_requests": 5},
        {"max_seq_len": 1000},  # the page table is narrower
        # Less is compiled where less fits.
        {"num_pages": 3},
        {"max_seq_len": 40},
        {"max_prefill_length": 8},
    ],
    ids=str,
)
def test_the_marks_of_a_first_start_are_found_by_one_like_it_alone(other: dict[str, Any]) -> None:
    def marks(**options: Any) -> list[Path]:
        common = {"dtype": "float32", "num_pages": 16, "max_running_requests": 4}
        engine = Engine(EngineConfig(model=str(model_path()), device="cpu", **common | options))
        try:
            plans = warm_up.plans_of_all_kinds(engine, [1, 2, 4])
            fitting = [plan for plan in plans if probe.fits(engine, plan)]
            assert fitting
            return warm_up._markers(engine, fitting)
        finally:
            engine.close()

    assert marks() == marks() != marks(**other)


def test_marks_tell_models_of_one_shape_apart() -> None:
    engine = Engine(
        EngineConfig(model=str(model_path()), device="cpu", num_pages=16, max_running_requests=4)
    )
    with closing(engine):
        spec, plans = engine.model.spec, [probe.probe_plan(engine, 1)]
        sparse = (True,) * len(spec.layers)

        def mixture(renormalise: bool) -> MoeSpec:
            return MoeSpec(
                num_experts=8, top_k=2, inner_size=16, renormalise=renormalise, is_sparse=sparse,
                names=lambda layer: pytest.fail("nothing is loaded"),
            )  # fmt: skip

        marks = set()
        for other in (
            spec,
            replace(spec, layers=tuple(replace(layer, window=5) for layer in spec.layers)),
            replace(spec, moe=mixture(True)),
            replace(spec, moe=mixture(False)),
        ):
            engine.model.spec = other
            marks.add(warm_up._markers(engine, plans)[0])
    assert len(marks) == 4


def test_marks_depend_on_the_kernels_of_other_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "acme_kernels" / "__init__.py"
    source.parent.mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    engine = Engine(EngineConfig(model=str(model_path()), device="cpu", num_pages=16))
    row = plugins.Row("ops", "acme", "acme_kernels.ops:Ops")
    with closing(engine):
        plans = [probe.probe_plan(engine, 1)]
        marks = {warm_up._markers(engine, plans)[0]}
        monkeypatch.setattr(plugins, "_installed", (*plugins.installed(), row))
        for text in ("", "TILE = 64\n"):
            source.write_text(text)
            marks.add(warm_up._markers(engine, plans)[0])
    assert len(marks) == 3


def test_kernels_are_compiled_again_where_a_folder_of_them_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folders = {"MINISGL_CACHE_DIR": tmp_path / "ours", "TRITON_CACHE_DIR": tmp_path / "tritons"}

    def warms_up() -> bool:
        caplog.clear()
        warm_up.compile_kernels(engine)
        return "first start of this model" in caplog.text

    engine = Engine(
        EngineConfig(model=str(model_path()), device="cpu", num_pages=16, max_running_requests=4)
    )
    for name, folder in folders.items():
        monkeypatch.setenv(name, str(folder))
    with closing(engine), caplog.at_level("INFO"):
        monkeypatch.setattr(engine.device, "warm_up_rows", lambda most: [most])
        assert [warms_up() for _ in range(2)] == [True, False]
        for folder in folders.values():
            shutil.rmtree(folder)
            assert [warms_up() for _ in range(2)] == [True, False]
