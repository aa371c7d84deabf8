"""The flags that `serve` has of this package, and the ranks and ports of each node.

Wrong ones are refused before any process starts.
"""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass
from pathlib import Path
from ssl import SSLContext
from typing import Final
from urllib.parse import urlsplit

from minisgl.core.args import with_draft_model
from minisgl.core.image import Media
from minisgl.core.options import SWITCH, option, text, whole
from minisgl.errors import ConfigError
from minisgl.runtime.args import POSITIVE, RuntimeArgs
from minisgl.server.args import FOR_ONE, ServerArgs
from minisgl_gateway.tls import tls_context

MAX_BASE_PORT: Final = 64_999  # the ranks use ports above it, at most 1 + --tp
DEFAULT_RESTARTS: Final = 3


def is_interface(host: str) -> bool:
    """Return whether `host` may be the address of one interface, or is a name.

    False for the IPv4 addresses of all interfaces, multicast groups and broadcast. 0, 00.0.0.0 and
    0x0 are spellings of 0.0.0.0.
    """
    try:
        address = ipaddress.IPv4Address(socket.inet_aton(host))
    except OSError:
        return True
    is_broadcast = int(address) == 2**32 - 1
    return not (address.is_unspecified or address.is_multicast or is_broadcast)


def _is_address(address: str) -> bool:
    host, _, port = address.rpartition(":")
    is_host = bool(host) and ":" not in host and is_interface(host)
    is_port = port.isascii() and port.isdigit()
    return is_host and is_port and 1 <= int(port) <= MAX_BASE_PORT


_ADDRESS: Final = text(
    f"HOST:PORT with a port from 1 to {MAX_BASE_PORT} and the IPv4 address or name of one "
    "interface",
    _is_address,
)


_FILE: Final = text(
    "a file in a folder that exists", lambda file: Path(file).absolute().parent.is_dir()
)


def _is_collector(url: str) -> bool:
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port of letters, or an IPv6 address without its end
        return False
    return is_url and not any(character.isspace() for character in url)


_COLLECTOR: Final = text(
    "the URL of an OTLP/HTTP collector, such as http://localhost:4318", _is_collector
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayArgs(ServerArgs):
    """The options of a server (the row `server` of `options`), on one machine or several.

    `minisgl_gateway.nodes.join` says what the ports are for.
    """

    dp: int = option(
        1,
        whole(1, 64),
        "many devices",
        "data parallelism: N whole servers on this machine behind one port, each with --tp GPUs of "
        "its own; on a CPU they share cores and memory; requests go by prefix and load, and a "
        "server that dies is replaced. For several machines: pip install 'minisgl[ray]' "
        "(docs/replicas.md)",
    )
    nnodes: int = option(
        1,
        whole(1, 1024),
        "many devices",
        "machines that share the --tp ranks equally; start the same command on each, with its "
        "--node-rank; for trusted networks only",
    )
    node_rank: int = option(
        0,
        whole(0, 1023),
        "many devices",
        "which of the machines this is; 0 is the one that serves HTTP",
        metavar="R",
    )
    dist_init_addr: str | None = option(
        None,
        _ADDRESS,
        "many devices",
        "where the machines meet: an IPv4 address or name of node 0's interface, and the first of "
        "1 + --tp free ports",
        metavar="HOST:PORT",
    )
    lora_folder: str | None = option(
        None,
        text("a folder's name"),
        "model",
        "POST /v1/load_lora_adapter loads LoRA adapters below this folder at run time, and from "
        "nowhere else; with API keys only for keys with admin rights",
        metavar="DIR",
    )
    ssl_certfile: str | None = option(
        None,
        text("a file's name"),
        "access",
        "serve HTTPS with this certificate (PEM, with its chain)",
        metavar="FILE",
    )
    ssl_keyfile: str | None = option(
        None,
        text("a file's name"),
        "access",
        "the certificate's private key (PEM, without a password)",
        metavar="FILE",
        unset="in the file of the certificate",
    )
    allowed_media_folder: str | None = option(
        None,
        text("a folder's name"),
        "access",
        "file: URLs of images in requests may name files below this folder",
        metavar="DIR",
        unset="none: data: URLs only",
    )
    allow_image_urls: bool = option(
        False,
        SWITCH,
        "access",
        "fetch http(s): URLs of images in requests, from public addresses only",
    )
    max_queue_wait: float | None = option(
        None,
        POSITIVE,
        "scheduling",
        "seconds for which a request may wait before its first step; then it ends with HTTP 503",
        metavar="S",
        unset="no limit",
    )
    log_steps: str | None = option(
        None,
        _FILE,
        "running",
        "write a JSON line per step of the engine to FILE (earlier: FILE.before): times of each "
        "part, rows, tokens",
        metavar="FILE",
    )
    record: str | None = option(
        None,
        _FILE,
        "running",
        "keep a record of arrivals, steps and ends in FILE and FILE.1 (earlier: FILE.before), at "
        "most 32 MiB each, with no text: the page's X-ray opens it, and minisgl replay FILE sends "
        "the same load to a server. It records no drafts, which need text, so --drafts is off",
        metavar="FILE",
    )
    xray_text: bool = option(
        False,
        SWITCH,
        "running",
        "the page's X-ray shows the first words of each prefix in the prefix cache, of all users' "
        "prompts, and --record FILE keeps them",
    )
    profile_dir: str = option(
        "minisgl-profiles",
        text("a folder's name"),
        "running",
        "folder for the traces of POST /start_profile and /stop_profile, made when the first is "
        "written",
        metavar="DIR",
    )
    restart: bool = option(
        False,
        SWITCH,
        "running",
        "after a worker has died or hangs, start the engine again behind the same port; until then "
        "new requests wait, and open ones go on where they were afterwards",
    )
    max_restarts: int = option(
        DEFAULT_RESTARTS,
        whole(1),
        "running",
        "the most restarts within an hour; the server ends at the next failure",
    )
    no_resume: bool = option(
        False,
        SWITCH,
        "running",
        "with --restart, open requests end with an error when the engine does, and new ones get "
        "HTTP 503 until it has started",
    )
    log_requests: bool = option(
        False,
        SWITCH,
        "running",
        "log a line for each request that ends: its X-Request-Id, times and tokens",
    )
    otlp_endpoint: str | None = option(
        None,
        _COLLECTOR,
        "running",
        "send a span for each request to this OpenTelemetry collector over HTTP, such as "
        "http://localhost:4318; needs pip install 'minisgl[otel]'",
        metavar="URL",
    )

    @property
    def num_slots(self) -> int:
        return self.max_loras if self.lora or self.lora_folder else 0

    @property
    def tls(self) -> SSLContext | None:
        """Raises ConfigError for files that cannot be used."""
        return tls_context(self.ssl_certfile, self.ssl_keyfile)

    @property
    def media(self) -> Media:
        """Raises ConfigError if there is no such folder."""
        folder = self.allowed_media_folder
        if folder is not None and not Path(folder).expanduser().is_dir():
            raise ConfigError(f"--allowed-media-folder {folder} is no folder")
        return Media(folder, self.allow_image_urls)

    @property
    def adapter_folder(self) -> Path | None:
        """Raises ConfigError if there is no such folder."""
        if self.lora_folder is None:
            return None
        folder = Path(self.lora_folder).expanduser()
        if not folder.is_dir():
            raise ConfigError(f"--lora-folder {folder} is no folder")
        return folder.resolve()

    @property
    def local_ranks(self) -> range:
        return self.ranks_of(self.node_rank)

    def ranks_of(self, node: int) -> range:
        """Return the ranks of a node."""
        each = self.tp // self.nnodes
        return range(node * each, (node + 1) * each)

    @property
    def meeting_point(self) -> tuple[str, int]:
        """The host and the port at which the supervisors meet."""
        assert self.dist_init_addr is not None
        host, _, port = self.dist_init_addr.rpartition(":")
        return host, int(port)

    @property
    def store_port(self) -> int:
        return self.meeting_point[1] + 1

    def broadcast_port(self, rank: int) -> int:
        """Return the port at which a rank of another node receives the broadcasts of rank 0."""
        return self.store_port + rank

    @property
    def ports(self) -> list[int]:
        """All ports. The ranks of node 0 need none for broadcasts."""
        others = range(self.tp // self.nnodes, self.tp)
        return [self.meeting_point[1], self.store_port, *map(self.broadcast_port, others)]

    def conflict(self) -> str | None:
        if wrong := ServerArgs.conflict(self):  # super() fails in a dataclass with slots
            return wrong
        if self.ssl_keyfile and not self.ssl_certfile:
            return "--ssl-keyfile needs --ssl-certfile, the certificate of the key"
        if self.shell and self.ssl_certfile:
            return FOR_ONE
        if self.dp > 1 and (other := self._not_with_dp()):
            return f"--dp {self.dp} does not go with {other}"
        if self.record and self.draft_names != "off":
            return (
                f"--drafts {self.draft_names} does not go with --record: a replay has no text to "
                "make drafts from; leave one of them out"
            )
        if not self.restart and (self.no_resume or self.max_restarts != DEFAULT_RESTARTS):
            flag = "--no-resume" if self.no_resume else "--max-restarts"
            return f"{flag} changes what --restart does; add that, or leave it out"
        if self.nnodes == 1:
            if self.node_rank or self.dist_init_addr:
                return "--node-rank and --dist-init-addr need --nnodes 2 or more"
        elif self.restart:
            return "--restart works on one machine, so it does not go with --nnodes"
        elif self.node_rank >= self.nnodes:
            return f"--node-rank counts from 0 to {self.nnodes - 1}, got {self.node_rank}"
        elif self.dist_init_addr is None:
            return (
                f"--nnodes {self.nnodes} needs --dist-init-addr HOST:PORT, the same on each machine"
            )
        elif self.tp % self.nnodes:
            return f"--tp {self.tp} cannot be divided by --nnodes {self.nnodes}"
        elif self.num_slots:
            return "--lora and --lora-folder work on one machine, so they do not go with --nnodes"
        elif self.dry_run:
            return "--dry-run looks at one machine, so it does not go with --nnodes"
        elif self.shell and self.node_rank:
            return "a chat needs the server, which is on node 0"
        elif self.node_rank == 0 and self.http_port in (taken := self.ports):
            return (
                f"--port {self.http_port} is one of the ports, from {taken[0]} to {taken[-1]}, "
                f"that the nodes use among themselves (--dist-init-addr {self.dist_init_addr}); "
                "choose another"
            )
        return None

    def _not_with_dp(self) -> str | None:
        """Return the first option that only one server can have, with the reason, or None."""
        if self.nnodes > 1:
            return "--nnodes: start a server on each machine, and minisgl route before them"
        if self.shell:
            return "a chat: it needs one server"
        if self.dry_run:
            return "--dry-run, which looks at one server"
        if self.log_steps or self.record:
            return "--log-steps and --record, which write one server's file"
        return None

    @property
    def draft_names(self) -> str:
        drafts = "off" if self.record and self.drafts == "auto" else self.drafts
        return with_draft_model(drafts, self.draft_model)

    @property
    def served_by(self) -> str:
        return "replicas" if self.dp > 1 else "shell" if self.shell else "own"


def ours(args: RuntimeArgs) -> GatewayArgs:
    """Return the options, those of this package at their defaults if a program gave none."""
    return args if isinstance(args, GatewayArgs) else GatewayArgs()
