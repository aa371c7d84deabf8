"""Decode steps of a whole model, with our skinny GEMMs and with cuBLAS.

The plans are launched one behind the other, as in the engine's loop. The keys and values are
arbitrary numbers, so every context is there at once, without prefill.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minisgl.core import Plan, SamplingParams, StepFailed
from minisgl.core.plan import Begin, Flight
from minisgl.engine import Engine
from minisgl.errors import ConfigError

STEPS, ROUNDS = 16, 5


def measure_steps(
    name: str, engine: Engine, counts: Sequence[int], contexts: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """The engine's graphs pad steps to some numbers of rows, as when it serves."""
    from minisgl_kernels.ops import TunedOps

    ops = engine._ops
    assert isinstance(ops, TunedOps)
    own_graphs = engine.runner
    cublas_graphs = engine.device.create_runner(engine.max_running, engine.max_prefill_tokens, ops)
    variants = {"own": (ops._skinny, own_graphs), "cublas": (None, cublas_graphs)}
    for context in contexts:
        for count in counts:
            plan = fill_cache(engine, count, context)
            ms: dict[str, list[float]] = {key: [] for key in variants}
            for _ in range(ROUNDS + 1):  # the first captures
                for key, (skinny, graphs) in variants.items():
                    ops._skinny, engine.runner = skinny, graphs
                    ms[key].append(step_s(engine, plan) * 1e3)
            own, cublas = (statistics.median(times[1:]) for times in ms.values())
            print(
                f"{name:<14}{count:>4} rows of {context:>6} tokens   own {own:7.3f} ms   "
                f"cublas {cublas:7.3f}   {own / cublas:.3f} of it",
                flush=True,
            )
            yield {
                "name": f"{name} {count} rows of {context}",
                "own_ms": round(own, 3),
                "cublas_ms": round(cublas, 3),
            }


def fill_cache(engine: Engine, rows: int, context: int) -> Plan:
    """Fill the cache with random keys and values for `rows` rows of `context` tokens.

    Returns the plan of a step that adds a token to each row.

    Raises ConfigError where that is more than the engine can hold.
    """
    pages = -(-context // engine.page_size)
    if rows * pages > engine.memory.num_pages or context > engine.max_seq_len:
        raise ConfigError(
            f"{rows} rows of {context} tokens do not fit: the KV cache has room for "
            f"{engine.memory.num_tokens}, a row for {engine.max_seq_len}"
        )

    def fill() -> Tensor:
        for index in range(engine.model_config.num_layers):
            layer = engine._contexts[0].kv_pool.layer(index)
            layer.k[: rows * pages].normal_()
            layer.v[: rows * pages].normal_()
        return torch.empty(0, dtype=torch.int32)

    engine.device.enqueue(fill).wait()
    every = list(range(rows))
    plan = Plan(
        step=0, uids=every, table_idxs=every, starts=[context - 1] * rows, ends=[context] * rows,
        token_ids=np.zeros(rows, np.int32), num_decodes=rows, sample_rows=every,
        output_idxs=[0] * rows,
    )  # fmt: skip
    # A decode step adds at most one page for each row, so another step brings these pages.
    first = replace(
        plan,
        num_decodes=0,
        new_pages=[(0, row, i, row * pages + i) for row in every for i in range(pages)],
        begins=[Begin(row, SamplingParams(temperature=0.0)) for row in every],
    )
    _wait(engine.launch(first))
    return plan


def step_s(engine: Engine, plan: Plan) -> float:
    """Return the seconds of a step while its successor is launched, as in the engine's loop."""
    flight, ends = engine.launch(plan), []
    for _ in range(STEPS + 1):
        following = engine.launch(plan)
        _wait(flight)
        ends.append(time.perf_counter())
        flight = following
    _wait(flight)
    return (ends[-1] - ends[0]) / STEPS


def _wait(flight: Flight) -> None:
    outcome = flight.wait()
    if isinstance(outcome, StepFailed):
        raise outcome.error
