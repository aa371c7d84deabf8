"""Ranks over gloo: every collective, and what happens when a rank is gone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import Tensor

from helpers.running_server import free_ports
from minisgl.distributed import DistributedCommunicator, DistributedInfo, SingleRank
from minisgl.distributed.ranks import create_communicator
from minisgl.errors import ConfigError, PeerLost

# A process runs this; what `report` is given comes back.
UNTIL_LOST = """
import json, sys, time
import torch
from minisgl.distributed import DistributedInfo
from minisgl.distributed.ranks import create_communicator
rank, size, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
comm = create_communicator(DistributedInfo(rank, size), store=store, device=torch.device("cpu"))
def report(value):
    print(json.dumps(value), flush=True)
comm.all_min(0)
report("met")
time.sleep(60)
"""


def start(rank: int, size: int, store: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", UNTIL_LOST, str(rank), str(size), store],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return str(json.loads(process.stdout.readline()))


def mine(shape: tuple[int, ...], dtype: torch.dtype, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(shape, generator=generator).mul(8).to(dtype)


@torch.inference_mode()
def check_every_collective(rank: int, size: int, store: str) -> None:
    comm = create_communicator(DistributedInfo(rank, size), store=store, device=torch.device("cpu"))
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int32):
        all_of = [mine((3, 10), dtype, other) for other in range(size)]
        total = comm.all_reduce(all_of[rank].clone())
        exact = torch.stack(all_of).double().sum(0)
        tolerance = {torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}.get(dtype, 0)
        assert ((total.double() - exact).abs() <= tolerance * 8 * size).all(), dtype
        same = comm.all_gather(total.view(torch.int16 if dtype.itemsize == 2 else torch.int32), 0)
        assert all(torch.equal(other, same[:3]) for other in same.split(3)), "other bits"
        for dim in (0, 1, -1):
            assert torch.equal(comm.all_gather(all_of[rank], dim), torch.cat(all_of, dim)), dtype
        columns = [mine((4 * size, 5), dtype, other) for other in range(size)]
        rows = torch.cat(columns, 1)[4 * rank : 4 * rank + 4]
        assert torch.equal(comm.exchange(columns[rank]), rows), dtype
        for source in range(size):
            assert torch.equal(comm.broadcast(all_of[rank].clone(), source), all_of[source]), dtype
    strided = torch.arange(12.0).view(3, 4).t()
    assert torch.equal(comm.all_reduce(strided), strided * size)
    big = 1 << 40  # more than 32 bits
    assert comm.all_min(big + rank) == big
    assert comm.all_min(-rank) == 1 - size
    for step in range(200):
        total = comm.all_reduce(torch.full((16,), float(step + rank)))
        assert total.tolist()[0] == size * step + sum(range(size))
    assert not torch.distributed.is_initialized()
    comm.close()


@pytest.mark.parametrize(
    ("size", "kind"),
    [pytest.param(2, "tcp", marks=pytest.mark.needs("minisgl_gateway")), (3, "file")],
)
def test_every_collective(size: int, kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "a#b?c=%20"  # of a url these would mean something
    folder.mkdir()
    store = f"tcp://127.0.0.1:{free_ports(1)}" if kind == "tcp" else f"file://{folder}/store"
    with ThreadPoolExecutor(size) as pool:
        ranks = [pool.submit(check_every_collective, rank, size, store) for rank in range(size)]
        for rank in ranks:
            rank.result(60)
    assert list(tmp_path.iterdir()) == [folder]


def test_a_lost_rank_is_an_error_at_once(tmp_path: Path) -> None:
    store = f"file://{tmp_path}/store"

    def meet(rank: int) -> DistributedCommunicator:
        comm = create_communicator(
            DistributedInfo(rank, 3), store=store, device=torch.device("cpu")
        )
        comm.all_min(0)
        return comm

    lost = start(1, 3, store)
    try:
        with ThreadPoolExecutor(2) as pool:
            comms = list(pool.map(meet, (0, 2)))
            assert line(lost) == "met"
            killed = time.monotonic()
            lost.send_signal(signal.SIGKILL)
            for rank, told in zip(
                (0, 2),
                [pool.submit(comm.all_reduce, torch.ones(4)) for comm in comms],
                strict=True,
            ):
                with pytest.raises(PeerLost) as raised:
                    told.result(60)
                assert str(raised.value) == (
                    f"rank {rank} of 3: a collective failed, most likely because another rank has "
                    "ended or was silent for 300 s; gloo's own message is in the log, at level info"
                )
        assert time.monotonic() - killed < 45  # gloo's timeout is 300 s
    finally:
        lost.kill()
        lost.communicate()


def test_a_rank_that_does_not_come_is_named_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("minisgl.distributed.gloo.TIMEOUT", timedelta(seconds=1))
    caplog.set_level("INFO", "minisgl")
    url = f"file://{tmp_path}/store"
    with pytest.raises(PeerLost) as raised:
        create_communicator(DistributedInfo(0, 2), store=url, device=torch.device("cpu"))
    assert str(raised.value) == (
        "rank 0 of 2: the ranks cannot connect, most likely because another rank has ended or "
        "was silent for 1 s; gloo's own message is in the log, at level info"
    )
    assert str(raised.value.__cause__) in caplog.text


@pytest.mark.parametrize("store", ["http://127.0.0.1:1", "file:"])
def test_a_store_of_another_kind_is_refused(store: str) -> None:
    with pytest.raises(ConfigError, match="file:///PATH or tcp://HOST:PORT, not at"):
        create_communicator(DistributedInfo(0, 2), store=store, device=torch.device("cpu"))


def test_one_rank_waits_for_no_other() -> None:
    comm = create_communicator(DistributedInfo(0, 1), store="", device=torch.device("cpu"))
    assert isinstance(comm, SingleRank)
    assert comm.all_min(7) == 7
    comm.close()


def test_gpus_for_some_of_the_ranks_are_refused(tmp_path: Path) -> None:
    def create(rank: int, kind: str) -> None:
        create_communicator(
            DistributedInfo(rank, 2), store=f"file://{tmp_path}/store", device=torch.device(kind)
        )

    with ThreadPoolExecutor(2) as pool:
        for ended in (pool.submit(create, 0, "cuda"), pool.submit(create, 1, "cpu")):
            with pytest.raises(ConfigError, match="1 of 2 ranks found a GPU, the others did not"):
                ended.result(60)
