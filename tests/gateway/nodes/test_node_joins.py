"""Which nodes may join node 0, and what they are told when they may not."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import socket
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType

from helpers.background import Background
from helpers.gguf_files import write
from helpers.running_server import free_ports
from minisgl import env
from minisgl.builtin import model_path
from minisgl.core.options import flag_of, options_of
from minisgl.errors import ConfigError, EngineError
from minisgl.utils.zmq import Endpoints
from minisgl_gateway.args import GatewayArgs
from minisgl_gateway.nodes.join import ANSWER_S, gather_nodes, join_node_0, with_network
from minisgl_gateway.nodes.link import Gone, Hello, NodeLink, NodeMsg
from minisgl_gateway.nodes.settings import OF_NODE_0, OWN, _digest, given_of_node_0, settings_of
from minisgl_zoo.gguf.folder import gguf_folder

LOOPBACK = "127.0.0.1"


def node_args(nnodes: int = 2) -> GatewayArgs:
    port = free_ports(1 + nnodes)
    return GatewayArgs(tp=nnodes, nnodes=nnodes, dist_init_addr=f"{LOOPBACK}:{port}")


def gather(pool: Background, args: GatewayArgs) -> Future[list[NodeLink]]:
    return pool.submit(gather_nodes, args, settings_of(args, model_path()))


def join(pool: Background, args: GatewayArgs, node: int, **other: Any) -> Future[NodeLink]:
    """other: flags that this node has; folder: its checkpoint; settings: changes to them."""
    folder, changes = other.pop("folder", model_path()), other.pop("settings", {})
    args = dataclasses.replace(args, node_rank=node, **other)
    return pool.submit(join_node_0, args, settings_of(args, folder) | changes)


def test_nodes_meet_and_learn_of_each_others_end(pool: Background) -> None:
    args = node_args(3)
    # They differ in what is their own.
    second = join(pool, args, 2, port=5, model="elsewhere", log_level="error")
    first = join(pool, args, 1)
    links = gather(pool, args).result(60)
    assert [link.name for link in links] == ["node 1", "node 2"]
    endpoints = with_network(Endpoints(folder=Path("f")), args, links)
    port = int(str(args.dist_init_addr).partition(":")[2])
    assert endpoints.store == f"tcp://{LOOPBACK}:{port + 1}"
    assert [endpoints.broadcasts(rank) for rank in (1, 2)] == [
        f"tcp://{LOOPBACK}:{port + 2}",
        f"tcp://{LOOPBACK}:{port + 3}",
    ]
    assert endpoints.scheduler.startswith("ipc://")

    links[0].send(Gone(reason=None))
    assert first.result(60).death() is None
    links[0].close()
    second.result(60).send(Gone(reason="the engine-2 process was killed by signal 9"))
    assert (
        str(links[1].death())
        == f"node 2 at {LOOPBACK}: the engine-2 process was killed by signal 9"
    )
    second.result(60).close()
    assert "node 2 at 127.0.0.1 is gone" in str(links[1].death())


def test_nodes_that_are_refused(pool: Background, tmp_path: Path) -> None:
    args = node_args()
    shutil.copytree(model_path(), tmp_path / "m")
    config = (tmp_path / "m" / "config.json").read_text()
    (tmp_path / "m" / "config.json").write_text(config + "\n")
    gathered = gather(pool, args)
    for other, says in (
        ({"page_size": 32}, "--page-size is 32 there, 16 on node 0"),
        ({"folder": tmp_path / "m"}, "the checkpoint is [0-9a-f]{12} there, [0-9a-f]{12} on"),
        ({"settings": {"the version of torch": "9"}}, "the version of torch is 9 there, 2"),
        ({"settings": {"MINISGL_CHECK_PLANS": "1"}}, "MINISGL_CHECK_PLANS is 1 there, 0 on"),
        ({"settings": {"MINISGL_CHECK_PAGES": "1"}}, "MINISGL_CHECK_PAGES is 1 there, 0 on node 0"),
        ({"settings": {"--new-flag": "7"}}, "--new-flag is 7 there, None on node 0"),
    ):
        with pytest.raises(ConfigError, match=f"node 0 refuses this node: {says}"):
            join(pool, args, 1, **other).result(60)
    with pytest.raises(ConfigError, match=r"--node-rank 5 is not awaited; awaited are \[1\]"):
        join(pool, args, 5).result(60)
    # Somebody who is no node, and a node that gives up.
    address = (LOOPBACK, int(str(args.dist_init_addr).partition(":")[2]))
    with socket.create_connection(address) as stranger:
        stranger.sendall(b"\0\0\0\4ABCD")
    assert not gathered.done()
    right = join(pool, args, 1)
    assert [link.name for link in gathered.result(60)] == ["node 1"]
    assert right.result(60).name == "node 0"


def test_what_makes_two_checkpoints_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time of a GGUF file differs between nodes; its weights, and a chat's template, do not."""
    monkeypatch.setenv("MINISGL_CACHE_DIR", str(tmp_path / "cache"))
    folders = []
    for name, time_s in (("a", 1), ("b", 2)):
        path = tmp_path / name / "m.gguf"
        path.parent.mkdir()
        write(path, "llama", GGMLQuantizationType.Q4_0)
        os.utime(path, (time_s, time_s))
        folders.append(gguf_folder(path))
    first, second = folders
    assert _digest(first, weights=True) == _digest(second, weights=True)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert _digest(first, weights=True) != _digest(second, weights=True)
    assert _digest(first, weights=False) == _digest(second, weights=False)
    (second / "chat_template.jinja").write_text("x")
    assert _digest(first, weights=False) != _digest(second, weights=False)


OWN_VARIABLES = {
    *("MINISGL_LOG_LEVEL", "MINISGL_LOG_FORMAT", "MINISGL_CACHE_DIR"),
    "MINISGL_CPU_ISA",  # nodes may have different CPUs
}


@pytest.mark.parametrize("variable", re.findall(r"^(MINISGL_\w+)", env.__doc__ or "", re.MULTILINE))
def test_variables_that_must_be_equal_on_all_nodes(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(variable, raising=False)
    args = node_args()
    ours = settings_of(args, model_path())
    if variable in OWN_VARIABLES:
        assert variable not in ours
        return
    monkeypatch.setenv(variable, "1")
    theirs = settings_of(args, model_path())
    assert {name for name in ours if ours[name] != theirs[name]} == {variable}


def test_flags_that_only_node_0_uses() -> None:
    assert given_of_node_0(node_args()) == []
    given = dataclasses.replace(node_args(), port=1919, log_steps="f", log_level="info", model="m")
    assert given_of_node_0(given) == ["--port", "--log-steps"]


def test_flags_that_may_differ_between_nodes() -> None:
    """All others must agree, also a new one unless it is named."""
    assert not OWN & OF_NODE_0
    assert options_of(GatewayArgs).keys() >= OWN | OF_NODE_0
    agreed = {flag_of(name) for name in options_of(GatewayArgs).keys() - OWN - OF_NODE_0}
    assert agreed == {name for name in settings_of(node_args(), model_path()) if name[:2] == "--"}


def test_random_weights_need_no_files(pool: Background, tmp_path: Path) -> None:
    shutil.copytree(model_path(), tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").unlink()
    with_files, without = (
        settings_of(node_args(), path) for path in (model_path(), tmp_path / "m")
    )
    assert with_files["the checkpoint"] != without["the checkpoint"]
    args = dataclasses.replace(node_args(), dummy_weight=True)
    gathered = gather(pool, args)
    assert join(pool, args, 1, folder=tmp_path / "m").result(60).name == "node 0"
    assert len(gathered.result(60)) == 1


def test_an_address_of_another_machine() -> None:
    args = dataclasses.replace(node_args(), dist_init_addr="192.0.2.1:2000")  # RFC 5737
    with pytest.raises(ConfigError, match="must be an address of this machine, node 0"):
        gather_nodes(args, {})
    args = dataclasses.replace(args, dist_init_addr="no.such.host.invalid:2000")
    with pytest.raises(ConfigError, match="no IPv4 address is known by that name"):
        join_node_0(args, {})


@pytest.mark.parametrize("ip", ["0.0.0.0", "224.0.0.1", "255.255.255.255"])
def test_a_name_of_no_interface(ip: str, monkeypatch: pytest.MonkeyPatch) -> None:
    info = (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (ip, 2000))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [info])
    args = GatewayArgs(tp=2, nnodes=2, dist_init_addr="name:2000")
    for call in (gather_nodes, join_node_0):
        with pytest.raises(ConfigError, match=f"name is {ip}, but must be .* of one interface"):
            call(args, {})


def test_the_ports_are_those_that_the_command_line_refuses() -> None:
    args = GatewayArgs(tp=6, nnodes=3, dist_init_addr=f"{LOOPBACK}:2000")
    with socket.create_server((LOOPBACK, 0)) as server:
        ends = [socket.create_connection(server.getsockname()) for _ in range(2)]
        links = [NodeLink("a node", end) for end in ends]
        endpoints = with_network(Endpoints(folder=Path("f")), args, links)
        for link in links:
            link.close()
    used = [args.dist_init_addr, endpoints.store, *endpoints.broadcast_urls.values()]
    ports = [int(str(address).rpartition(":")[2]) for address in used]
    assert args.ports == ports == [2000, 2001, 2003, 2004, 2005, 2006]


def test_a_port_of_the_ranks_that_is_in_use(pool: Background) -> None:
    args = node_args()
    port = args.meeting_point[1]
    in_use = "port {} is in use at 127.0.0.1: .* another port with --dist-init-addr, the same on"
    with (
        socket.create_server((LOOPBACK, port + 1)),
        pytest.raises(ConfigError, match=in_use.format(port + 1)),
    ):
        gather_nodes(args, {})
    gathered = gather(pool, args)
    with (
        socket.create_server((LOOPBACK, port + 2)),
        pytest.raises(ConfigError, match=in_use.format(port + 2)),
    ):
        join(pool, args, 1).result(60)
    assert join(pool, args, 1).result(60).name == "node 0"
    assert [link.name for link in gathered.result(60)] == ["node 1"]


def test_another_program_listens_where_node_0_should(pool: Background) -> None:
    args = node_args()
    with socket.create_server(args.meeting_point) as other:
        joined = join(pool, args, 1)
        other.accept()[0].close()
        with pytest.raises(EngineError, match=r"what listens at --dist-init-addr .* is not node 0"):
            joined.result(60)


@pytest.mark.parametrize("says", [b"", b"\0\0"])  # nothing, and half of a record's length
def test_another_program_listens_and_does_not_answer(
    says: bytes, pool: Background, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minisgl_gateway.nodes.join.ANSWER_S", 0.2)
    monkeypatch.setattr("minisgl_gateway.nodes.join.HELLO_S", 0.2)
    monkeypatch.setattr("minisgl_gateway.nodes.link.HELLO_S", 0.2)
    args = node_args()
    with socket.create_server(args.meeting_point) as other:
        joined = join(pool, args, 1)
        with other.accept()[0] as connected:
            connected.sendall(says)
            with pytest.raises(EngineError, match=r"is not node 0, .* choose another port"):
                joined.result(60)


def test_a_node_waits_for_node_0s_answer_but_for_the_others_without_end(
    pool: Background, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = []
    receive = NodeLink.receive

    def recorded(link: NodeLink, timeout_s: float | None = None) -> NodeMsg:
        if link.name == "node 0":
            waits.append(timeout_s)
        return receive(link, timeout_s)

    monkeypatch.setattr(NodeLink, "receive", recorded)
    args = node_args()
    gathered, joined = gather(pool, args), join(pool, args, 1)
    assert [link.name for link in (joined.result(60), *gathered.result(60))] == ["node 0", "node 1"]
    assert waits == [ANSWER_S, None]


def test_a_node_that_died_before_the_start_may_come_again(pool: Background) -> None:
    args = node_args(3)
    gathered = gather(pool, args)
    host, port = LOOPBACK, int(str(args.dist_init_addr).partition(":")[2])
    deadline = time.monotonic() + 60
    while True:
        try:
            lost = NodeLink("node 0", socket.create_connection((host, port)))
            break
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    lost.send(Hello(node=2, settings=settings_of(args, model_path())))
    lost.close()
    both = [join(pool, args, node) for node in (2, 1)]
    assert [link.name for link in gathered.result(60)] == ["node 1", "node 2"]
    assert [link.result(60).name for link in both] == ["node 0"] * 2
