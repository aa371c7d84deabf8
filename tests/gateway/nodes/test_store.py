"""The store of ranks on several machines: what is told when the ranks cannot meet there."""

from __future__ import annotations

import contextlib
import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch

from helpers.running_server import free_ports
from minisgl.distributed import DistributedInfo
from minisgl.distributed.ranks import create_communicator
from minisgl.errors import ConfigError, PeerLost


def join(rank: int, url: str) -> None:
    create_communicator(DistributedInfo(rank, 2), store=url, device=torch.device("cpu"))


def test_nothing_listens_where_rank_0_should(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("minisgl_gateway.nodes.store.TIMEOUT", timedelta(seconds=0.5))
    url = f"tcp://127.0.0.1:{free_ports(1)}"
    with pytest.raises(PeerLost) as raised:
        join(1, url)
    assert str(raised.value) == (
        f"rank 1 cannot reach rank 0 at {url} (Connection refused): has rank 0 "
        "ended, or does a firewall block the port?"
    )
    assert capfd.readouterr().err == ""  # torch writes pages


def test_another_program_listens_where_rank_0_should(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minisgl_gateway.nodes.store.ANSWER_TIMEOUT", timedelta(milliseconds=500))

    def answer() -> None:
        with contextlib.suppress(OSError):
            while True:
                other.accept()[0].close()

    with socket.create_server(("127.0.0.1", 0)) as other, ThreadPoolExecutor(1) as pool:
        url = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"rank 0 cannot listen at {url}, where the ranks me"):
            join(0, url)
        pool.submit(answer)
        try:
            with pytest.raises(PeerLost, match=f"rank 1 reaches {url}, but rank 0 does not answer"):
                join(1, url)
        finally:
            other.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_host_that_is_not_known(rank: int) -> None:
    with pytest.raises(ConfigError, match=r"ranks cannot meet at tcp://no\.such"):
        join(rank, "tcp://no.such.host.invalid:1")


@pytest.mark.parametrize("url", ["tcp://127.0.0.1", "tcp://a:b"])
def test_a_url_without_a_port_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="file:///PATH or tcp://HOST:PORT, not at"):
        join(0, url)
