"""Compile-only warm-up: the first start of a model on a machine compiles the kernels of all steps.

This file lists the steps. `Device.compile_only` compiles their kernels in parallel. Marker files
beside the compiled kernels record that it was done (`_markers`).
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from minisgl import env, kernel, moe, plugins
from minisgl.core import Plan, SamplingParams
from minisgl.engine.graph import MAX_PROMPTS, PROMPT_TOKENS
from minisgl.engine.startup.probe import GREEDY, common_prefix, fits, probe_plan, run_probe
from minisgl.engine.tables import MIN_COMMON_ROWS
from minisgl.utils.logger import get_logger
from minisgl.version import __version__

if TYPE_CHECKING:
    from minisgl.engine.engine import Engine

logger = get_logger(__name__)

FILTERED = SamplingParams(temperature=1.0, seed=0, top_k=20, top_p=0.9, min_p=0.1)
KERNEL_TABLES = ("ops", "attention", "moe")
"""The tables of `minisgl.plugins` whose packages have kernels of steps."""
SHORT, LONG = 16, 64
"""Prompt lengths for which attention uses different block sizes."""


def compile_kernels(engine: Engine) -> None:
    """Compile the kernels of all kinds of steps, once per machine. Later starts find them on disk.

    Without this, the first step of each kind would delay all requests by about a second.
    """
    rows = engine.device.warm_up_rows(engine.max_decode_rows)
    plans = [plan for plan in plans_of_all_kinds(engine, rows) if fits(engine, plan)]
    markers = _markers(engine, plans)
    if engine.comm.all_min(int(all(marker.exists() for marker in markers))):
        return
    logger.info("compiling the kernels that requests will need (first start of this model) ...")
    start = time.monotonic()
    if compiled_only := [plan for plan in plans if can_compile_only(engine, plan)]:
        engine.device.compile_only(_prepared(engine, plan) for plan in compiled_only)
    for plan in plans:
        if not can_compile_only(engine, plan):
            run_probe(engine, plan)
    logger.info("compiled in %.1f s", time.monotonic() - start)
    with contextlib.suppress(OSError):  # without markers the next start compiles again
        for marker in markers:
            marker.parent.mkdir(parents=True, exist_ok=True)
            marker.touch()


def load_kernels(engine: Engine) -> None:
    """Run steps with a prompt beside each number of decode rows, which loads their kernels.

    All streams would wait while a later step loaded one.
    """
    for num_decodes in engine.device.warm_up_rows(engine.max_running):
        plan = _beside_a_prompt(engine, num_decodes)
        if fits(engine, plan):
            run_probe(engine, plan)


def can_compile_only(engine: Engine, plan: Plan) -> bool:
    """Return whether the step can be compiled without running it: the device supports it, and no
    part of the step waits for the device."""
    has_prompts = plan.num_decodes < plan.num_rows
    is_safe = engine.prompts_graph_safe if has_prompts else engine.graph_safe
    return engine.device.can_compile_only and is_safe


def _prepared(engine: Engine, plan: Plan) -> Callable[[], Callable[[], object]]:
    """Return a step in the form that `Device.compile_only` needs."""

    def prepare() -> Callable[[], object]:
        inputs = engine.upload_step(plan)
        return lambda: engine.sampler.sample(engine.forward(inputs), inputs)

    return prepare


def plans_of_all_kinds(engine: Engine, rows: Sequence[int]) -> Iterator[Plan]:
    """Yield a plan for each kind of step.

    rows: numbers of decode rows. Each is combined with a prompt and with a common prefix. Then
    follow greedy and filtered sampling, and prompts of several numbers and lengths.
    """
    for num_decodes in rows:
        yield probe_plan(engine, num_decodes)
        yield _beside_a_prompt(engine, num_decodes)
        if num_decodes >= MIN_COMMON_ROWS:
            yield probe_plan(engine, num_decodes, before=common_prefix(engine))
    for sampling in (GREEDY, FILTERED):
        yield probe_plan(engine, 1, sampling=sampling)
    yield probe_plan(engine, 0, [SHORT], before=engine.page_size)
    for num_tokens in (SHORT, LONG):
        for others in (1, MAX_PROMPTS):
            yield probe_plan(engine, 0, [num_tokens, *[1] * others])
    for num_tokens in PROMPT_TOKENS:
        yield probe_plan(engine, 0, [num_tokens])


def _beside_a_prompt(engine: Engine, num_decodes: int) -> Plan:
    return probe_plan(engine, min(num_decodes, engine.max_running - 1), [SHORT])


def _markers(engine: Engine, plans: Sequence[Plan]) -> list[Path]:
    """Return the marker files of these plans. They exist if their kernels are compiled.

    Each folder of compiled kernels has one, so that deleting a folder deletes its marker.
    """
    config = engine.model_config
    packages = {
        row.target.partition(".")[0] for row in plugins.installed() if row.table in KERNEL_TABLES
    }
    kernels = hashlib.sha256(plugins.digest().encode())
    for name in (kernel.__name__, moe.__name__, *sorted(packages)):
        found = find_spec(name)
        assert found is not None, name
        assert found.origin is not None, name
        for path in sorted(Path(found.origin).parent.rglob("*")):
            if path.suffix in (".py", ".json", ".cu", ".cuh"):
                kernels.update(path.read_bytes())
    kernels.update(Path(__file__).read_bytes())
    spec = engine.model.spec
    depends = (
        __version__, kernels.hexdigest(), torch.__version__, engine.device.describe(),
        env.jit_disabled(), engine.attn_name, engine.dtype, engine.page_size, engine.max_running,
        # The width of the page table is a constant of the kernels that read it.
        -(-engine.max_seq_len // engine.page_size),
        engine.comm.size, type(engine.comm).__name__,
        config.num_heads, config.num_kv_heads, config.head_dim, config.architecture,
        sorted({(w.attr, w.shape, str(w.dtype)) for w in engine.model.parameters()}),
        sorted({(layer.window is not None, layer.num_heads, layer.num_kv_heads, layer.head_dim)
                for layer in spec.layers}),
        spec.moe and (spec.moe.top_k, spec.moe.renormalise),
        [(plan.num_decodes, plan.starts, plan.ends, engine.runner.padded(plan)) for plan in plans],
    )  # fmt: skip
    name = f"minisgl-warm-{hashlib.sha256(repr(depends).encode()).hexdigest()[:16]}"
    return [folder / name for folder in (env.cache_dir(), env.triton_cache_dir())]
