"""A server whose GPU computes for ever, or whose engine is stopped amid a step.

With two ranks, one on each GPU, the other rank then waits in a collective.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
import torch

from helpers.endless import endless_answer, endless_flags, save_endless
from minisgl.builtin import model_path

MOST_S = 12.0
NUM_CLIENTS = 8

PLANT = """
import importlib.abc, importlib.util, os, sys

class Plant(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "minisgl.engine.engine":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module
        def exec_module(module):
            load(module)
            plant(module.Engine)
        spec.loader.exec_module = exec_module
        return spec

def plant(engine):
    enqueue = engine.enqueue
    def planted(self, plan, work):
        import torch
        def step():
            if str(self.comm.rank) == os.environ["RANK_THAT_HANGS"] and os.path.exists(
                os.environ["HANG"]
            ):
                torch.cuda._sleep(1 << 50)
            return work()
        return enqueue(self, plan, step)
    engine.enqueue = planted

sys.meta_path.insert(0, Plant())
"""
"""A step that the rank begins while the file `HANG` exists never ends on the device."""


@pytest.mark.parametrize("how", ["endless step", "stopped process"])
@pytest.mark.parametrize(("num_ranks", "rank"), [(1, 0), (2, 0), (2, 1)])
def test_every_client_has_an_end(
    num_ranks: int, rank: int, how: str, launch: Any, tmp_path: Path
) -> None:
    if torch.cuda.device_count() < num_ranks:
        pytest.skip(f"needs {num_ranks} GPUs")
    planted = tmp_path / "planted"
    planted.mkdir()
    (planted / "sitecustomize.py").write_text(PLANT)
    hang, model = tmp_path / "hang", save_endless(tmp_path / "endless")
    config = json.loads((model_path() / "config.json").read_text())  # shapes that kernels take
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 2**17}))
    server = launch(
        *endless_flags(model),
        *("--device", "cuda", "--tp", str(num_ranks)),
        PYTHONPATH=os.pathsep.join([str(planted), *filter(None, [os.environ.get("PYTHONPATH")])]),
        HANG=str(hang),
        RANK_THAT_HANGS=str(rank),
    )
    engine = f"engine-{rank}" if num_ranks > 1 else "engine"
    # Of ranks that all wait, the error names any.
    named = engine if how == "stopped process" else "engine(-[01])?"

    def wait_for_the_end(answer: Iterator[Any]) -> float:
        with pytest.raises(openai.APIError, match=f"the {named} process"):
            list(answer)
        return time.monotonic()

    with server.client() as client, ThreadPoolExecutor(NUM_CLIENTS) as pool:
        family = server.family()
        answers = [endless_answer(client) for _ in range(NUM_CLIENTS)]
        began = time.monotonic()
        if how == "endless step":
            hang.touch()
        else:
            os.kill(server.pid(engine), signal.SIGSTOP)
        seconds = [end - began for end in pool.map(wait_for_the_end, answers)]
    print(
        f"{how} of rank {rank} of {num_ranks}: {NUM_CLIENTS} clients ended after "
        f"{min(seconds):.1f} to {max(seconds):.1f} s"
    )
    assert max(seconds) <= MOST_S
    assert server.ended() == 1
    _, alive = psutil.wait_procs(family, timeout=30)
    assert not alive
    assert list(server.sockets.iterdir()) == []
