"""Sizing the KV pool: the arithmetic, the table, the sentences where nothing fits; its end."""

from __future__ import annotations

import gc
import re
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl.builtin import model_path
from minisgl.core.groups import FULL, REQUEST_TOKENS
from minisgl.engine import Engine, EngineConfig
from minisgl.engine.connect import connect
from minisgl.engine.memory import MemoryPlan, plan_engine_memory, plan_memory
from minisgl.errors import ConfigError
from minisgl.kernel.ops import Ops
from minisgl.models.loading.reading import read_config
from minisgl.utils import container

GIB, MIB = 1 << 30, 1 << 20


def recurrent_groups() -> tuple[Any, ...]:
    """Return the zoo's groups of a recurrent model. Late: the other tests run without the zoo."""
    from minisgl_zoo.recurrent.spec import GROUPS

    return GROUPS


def window_group() -> Any:
    """Return the zoo's group of layers with a window."""
    from minisgl_zoo.cache_groups.groups import WindowGroup

    return WindowGroup(window=64)


def plan(num_pages: int | None = None, **changes: Any) -> MemoryPlan:
    settings: dict[str, Any] = {
        "free_bytes": 10 * GIB,
        "memory_ratio": 0.5,
        "weight_bytes": 1 * GIB,
        "activation_bytes": 512 * MIB,
        "groups": (FULL,),
        "group_page_bytes": (MIB,),
        "chunk": 512,
        "page_size": 16,
        "max_seq_len": 1000,
        "max_running": 256,
    }
    return plan_memory(MemoryPlan(**(settings | changes)), num_pages)


def test_pool_takes_what_the_ratio_leaves() -> None:
    assert plan().num_pages == 5 * 1024 - 1024 - 512


def test_pool_is_no_larger_than_it_can_be_filled() -> None:
    assert plan(max_running=2).num_pages == 2 * 63  # 63 pages hold 1,000 tokens


@pytest.mark.needs("minisgl_zoo")
def test_a_limit_holds_for_all_pools_together_and_is_said() -> None:
    limited = plan(kv_limit_bytes=100 * MIB)
    assert limited.num_pages == 100
    assert re.search(r"KV cache, at most +100\.0 MiB  a quarter .* --memory-ratio", str(limited))
    window = {
        "groups": (FULL, window_group()),
        "group_page_bytes": (MIB, MIB),
    }
    assert plan(**window, kv_limit_bytes=2 * GIB).kv_bytes <= 2 * GIB
    assert "at most" not in str(plan()).replace("activations, at most", "")


@pytest.mark.parametrize(
    ("args", "limit"), [({}, 250), ({"memory_ratio": 0.5}, None), ({"num_pages": 9}, None)]
)
def test_a_cpu_gives_a_quarter_of_its_memory_to_the_cache_unless_told(
    args: dict[str, Any], limit: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of what was free went there: 10 GiB for a file of 98 MB. A container's limit counts."""
    (tmp_path / "memory.max").write_text("1000\n")
    monkeypatch.setattr(container, "CGROUP", tmp_path)
    config = EngineConfig(model=str(model_path()), device="cpu", **args)
    device, comm = connect(config)
    model = read_config(config.folder)
    planned: list[MemoryPlan] = []
    monkeypatch.setattr(
        "minisgl.engine.memory.plan_memory", lambda memory, pages: planned.append(memory) or memory
    )
    plan_engine_memory(config, model, torch.float32, device, comm, Ops())
    device.close()
    assert planned[0].kv_limit_bytes == limit


@pytest.mark.needs("minisgl_zoo")
def test_rows_are_planned_for_as_many_requests_as_states() -> None:
    """As many as the full pool suffices for, where memory is short: else all that may run. Saved
    states count, because shorter requests take them."""
    large = {"groups": (FULL, *recurrent_groups()), "group_page_bytes": (MIB, 36 * MIB, 147 * MIB)}
    sizes = {group.kind: group.num_pages for group in plan(**large, free_bytes=80 * GIB).groups}
    running = sizes["full"] * 16 // min(1000, REQUEST_TOKENS) + 1
    assert 50 < running < 256
    saved = sizes["full"] // (2 * 147)
    assert sizes["rows"] == 3 * (running + saved) + 8  # of each, 3/4 of an interval's four pages
    assert sizes["state"] > 9 * running // 8 + saved
    few = {group.kind: group.num_pages for group in plan(**large, max_running=4).groups}
    assert few["rows"] == 3 * 4 + 8


@pytest.mark.needs("minisgl_zoo")
def test_requests_shorter_than_two_intervals_fit_their_rows() -> None:
    groups = {"groups": (FULL, *recurrent_groups()), "group_page_bytes": (1, 1, 1)}
    memory = plan(**groups, max_seq_len=100, max_running=1)
    limits = [group.most_tokens(memory.chunk, memory.page_size) for group in memory.groups]
    assert limits == [112, 112, None]


@pytest.mark.needs("minisgl_zoo")
def test_requests_shorter_than_an_interval_need_no_states() -> None:
    groups = {"groups": (FULL, *recurrent_groups()), "group_page_bytes": (1, 1, 1)}
    memory = plan(**groups, max_seq_len=60, max_running=9)
    assert memory.num_requests == 8  # 36 pages of the full group hold nine, 35 of rows eight
    assert "requests at full length" in str(memory)


@pytest.mark.needs("minisgl_zoo")
def test_requests_at_full_length_are_those_that_fit_at_once() -> None:
    """One computes a chunk of 512 tokens. The others hold a window and two pages, or the rows of a
    whole interval: the plan has three quarters of that for each."""
    window = window_group()
    sizes = {"group_page_bytes": (MIB, 7 * MIB), "max_seq_len": 512, "max_running": 64}
    assert plan(groups=(FULL, window), num_pages=64 * 32, **sizes).num_requests == 64
    assert plan(groups=(FULL, window), num_pages=10 * 32, **sizes).num_requests == 10
    few = plan(groups=(FULL, window), num_pages=31, **sizes)
    assert few.num_requests == 0
    assert "requests at full length            0  of 512 tokens" in str(few)
    hybrid = sizes | {"group_page_bytes": (MIB, MIB, MIB)}
    memory = plan(
        groups=(FULL, *recurrent_groups()), num_pages=64 * 32, **hybrid, free_bytes=80 * GIB
    )
    assert memory.num_requests == 1 + (3 * 64 + 8 - 8) // 4


def test_explicit_pages_win() -> None:
    memory = plan(num_pages=7)
    assert memory.num_tokens == 7 * 16
    assert "7 pages of 16 tokens" in str(memory)
    assert "1 page of 1 token (" in str(plan(num_pages=1, page_size=1))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"weight_bytes": 6 * GIB}, "raise --memory-ratio, or lower --max-seq-len, --max-pre"),
        ({"weight_bytes": 16 * GIB}, "too large for this machine: take --quantization int4"),
        (
            {"weight_bytes": 4 * GIB, "vision_bytes": GIB},
            r"weights take 4\.00 GiB, the vision tower 1\.00 GiB and activations up to",
        ),
        ({"num_pages": 10 * 1024}, "the most that fits is 9216"),
    ],
)
def test_nothing_fits(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        plan(**changes)


@pytest.mark.parametrize("num_pages", [None, 1])
def test_a_step_that_cannot_be_names_what_it_depends_on(num_pages: int | None) -> None:
    says = r"take up to 11\.00 GiB, and 10\.00 GiB are free; lower --max-prefill-length or"
    with pytest.raises(ConfigError, match=says):
        plan(activation_bytes=11 * GIB, num_pages=num_pages)


def test_a_closed_engine_holds_no_tensors() -> None:
    """Neither do cycles, until they are collected: the next engine needs the memory at once."""
    engine = Engine(
        EngineConfig(model=str(model_path()), device="cpu", num_pages=16, max_running_requests=4)
    )
    held = [weakref.ref(getattr(x.owner, x.attr)) for x in engine.model.parameters()]
    held.append(weakref.ref(engine._contexts[0].kv_pool.layer(0).k))
    gc.disable()
    try:
        engine.close()
        assert len(held) > 20
        assert not any(tensor() is not None for tensor in held)
    finally:
        gc.enable()
