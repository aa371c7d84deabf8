"""The flags of the gateway: wrong ones are refused before any process starts."""

from __future__ import annotations

import pytest

from minisgl.core.options import options_of
from minisgl.server.flags import parse_args
from minisgl_gateway.args import GatewayArgs

NODES = ("--tp", "4", "--nnodes", "2", "--dist-init-addr", "h:2000")


def test_they_are_flags_of_the_server() -> None:
    args = parse_args([*NODES, "--node-rank", "1"])
    assert isinstance(args, GatewayArgs)
    assert (args.nnodes, args.node_rank, args.dist_init_addr) == (2, 1, "h:2000")
    assert (list(args.local_ranks), args.num_local) == ([2, 3], 2)
    assert list(GatewayArgs(tp=3).local_ranks) == [0, 1, 2]
    for name, (default, option) in options_of(GatewayArgs).items():
        assert default is None or option.rule.accepts(default), name


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--tp 2 --nnodes 2", "needs --dist-init-addr HOST:PORT"),
        ("--tp 3 --nnodes 2 --dist-init-addr h:2000", "--tp 3 cannot be divided by --nnodes 2"),
        ("--tp 2 --nnodes 2 --dist-init-addr h:2000 --node-rank 2", "from 0 to 1, got 2"),
        ("--node-rank 1", "need --nnodes 2 or more"),
        ("--nnodes 2 --dist-init-addr 2000", "must be HOST:PORT"),
        ("--nnodes 2 --dist-init-addr 0.0.0.0:2000", "of one interface"),
        ("--nnodes 2 --dist-init-addr 0:2000", "of one interface, got '0:2000'"),
        ("--nnodes 2 --dist-init-addr 0.0:2000", "of one interface"),
        ("--nnodes 2 --dist-init-addr 00.0.0.0:2000", "of one interface"),
        ("--nnodes 2 --dist-init-addr 0x0:2000", "of one interface"),
        ("--nnodes 2 --dist-init-addr 224.0.0.1:2000", "of one interface"),
        ("--nnodes 2 --dist-init-addr 255.255.255.255:2000", "of one interface"),
        ("--nnodes 2 --dist-init-addr h:65001", "a port from 1 to 64999"),
        ("--tp 2 --nnodes 2 --dist-init-addr h:2000 --dry-run", "does not go with --nnodes"),
        ("--otlp-endpoint localhost:4318", "must be the URL of an OTLP/HTTP collector"),
        ("--otlp-endpoint ftp://x", "such as http://localhost:4318, got 'ftp://x'"),
        ("--otlp-endpoint http://", "http://localhost:4318"),
        ("--otlp-endpoint http://[::1", "got 'http://[::1'"),
        ("--otlp-endpoint http://localhost:abc", "such as http://localhost:4318"),
        ("--otlp-endpoint http://localhost:99999", "such as http://localhost:4318"),
        ("--no-resume", "--no-resume changes what --restart does"),
        ("--max-restarts 9", "--max-restarts changes what --restart does"),
        ("--restart --tp 2 --nnodes 2 --dist-init-addr h:2000", "works on one machine"),
    ],
)
def test_wrong_flags_are_refused_with_a_sentence(
    line: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse_args(line.split(" "))
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 2


@pytest.mark.parametrize("port", [2000, 2001, 2003, 2004])
def test_a_port_that_the_nodes_use_is_refused(
    port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """2002 would be the port of rank 1's broadcasts if rank 1 were on another node than rank 0."""
    with pytest.raises(SystemExit) as exit_:
        parse_args([*NODES, "--port", str(port)])
    assert exit_.value.code == 2
    assert (
        f"--port {port} is one of the ports, from 2000 to 2004, that the nodes use among "
        "themselves (--dist-init-addr h:2000); choose another\n"
    ) in capsys.readouterr().err
    assert parse_args([*NODES, "--port", str(port), "--node-rank", "1"]).port == port


def test_other_ports_are_allowed(capsys: pytest.CaptureFixture[str]) -> None:
    for port in (0, 1999, 2002, 2005):
        assert parse_args([*NODES, "--port", str(port)]).http_port == port
    at_1919 = ["--tp", "2", "--nnodes", "2", "--dist-init-addr", "h:1919"]
    with pytest.raises(SystemExit):
        parse_args(at_1919)
    assert "--port 1919 is one of the ports" in capsys.readouterr().err
    assert parse_args([*at_1919, "--shell"]).http_port == 0  # any free one
