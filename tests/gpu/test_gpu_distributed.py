"""Communicators between GPUs: each rank is a process that runs `communicator_checks`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from filelock import FileLock

from helpers import communicator_checks
from helpers.communicator_checks import CASES

MAX_RANKS = 4
TIMEOUT_S = 80


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """Return for each rank: case -> traceback, or "".

    The ranks run once, whichever processes share the tests: of several on the same GPUs, all of
    which wait in loops for each other, none would come to its end in time.
    """
    size = min(torch.cuda.device_count(), MAX_RANKS)
    if size < 2:
        pytest.skip("needs two GPUs")
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # that of all processes
    path = folder / "ranks.json"
    with FileLock(f"{path}.lock"):
        if not path.exists():
            path.write_text(json.dumps(run_ranks(size)))
    outcomes: list[dict[str, str]] = json.loads(path.read_text())
    return outcomes


def run_ranks(size: int) -> list[dict[str, str]]:
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            subprocess.Popen(
                [
                    sys.executable,
                    communicator_checks.__file__,
                    str(rank),
                    str(size),
                    f"file://{folder}/store",
                ],
                stdout=(Path(folder) / f"out{rank}").open("w"),
            )
            for rank in range(size)
        ]
        try:
            for process in ranks:
                process.wait(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            pass  # its cases are missing then
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        outs = [(Path(folder) / f"out{rank}").read_text().splitlines() for rank in range(size)]
    return [dict(json.loads(line) for line in lines) for lines in outs]


@pytest.mark.parametrize("case", CASES)
def test_ranks(case: str, outcomes: list[dict[str, str]]) -> None:
    for rank, outcome in enumerate(outcomes):
        assert outcome.get(case, "never came to it") == "", f"rank {rank}"
