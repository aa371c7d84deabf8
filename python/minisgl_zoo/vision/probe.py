"""Runs a tower to measure it, and no longer than that needs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

PROBE_S = 1.0
"""After this time a probe ends behind the next block: a CPU takes minutes for some towers."""


class _LongEnough(Exception):
    pass


def part_run(model: Any, run: Callable[[], object]) -> float:
    """Call `run`, which runs the blocks of a model one by one. Returns the part of them that ran:
    1, or less after `PROBE_S`. The blocks are the model's longest list; on a GPU all run."""
    lists = (each for each in model.modules() if isinstance(each, torch.nn.ModuleList))
    blocks: Any = max(lists, key=len, default=())
    num_run, end = 0, time.perf_counter() + PROBE_S

    def ran(*_: object) -> None:
        nonlocal num_run
        num_run += 1
        if num_run < len(blocks) and time.perf_counter() > end:
            raise _LongEnough

    hooks = [block.register_forward_hook(ran) for block in blocks]
    try:
        run()
    except _LongEnough:
        return num_run / len(blocks)
    finally:
        for hook in hooks:
            hook.remove()
    return 1.0
