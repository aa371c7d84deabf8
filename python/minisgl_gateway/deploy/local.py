"""`minisgl serve --dp N`: N servers on this machine behind a router.

::

    this process   bind port | start servers ... wait until ready | route       | end them
    server 0..N-1            | supervisor, engine, tokenizers     | step, step  |

A server that ends is replaced. The new one listens on another port, and the router gets its URL
when it is ready. SIGTERM lets open requests finish, for `--drain-timeout`; Ctrl-C ends them.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from contextlib import closing
from dataclasses import replace
from typing import Final, TypeVar

from minisgl import env
from minisgl.errors import ConfigError, StartupFailed
from minisgl.runtime.signals import Signals
from minisgl.server.address import bind
from minisgl.server.args import ServerArgs
from minisgl.server.command import run_serving
from minisgl.server.model import find_model
from minisgl.server.web.guards import door_of
from minisgl.utils.container import container_cores
from minisgl.utils.logger import get_logger
from minisgl_gateway.args import GatewayArgs
from minisgl_gateway.deploy.child import ServerProcess
from minisgl_gateway.early import num_gpus
from minisgl_gateway.front import Front
from minisgl_gateway.router.fleet import Fleet
from minisgl_gateway.router.serve import Router
from minisgl_gateway.tls import tls_context

logger = get_logger(__name__)

END_S: Final = 12.0
"""The longest wait for a server without open requests: twice that for its workers, and 2 s."""

CPU_MEMORY_RATIO: Final = 0.5
"""The default of --memory-ratio on a CPU."""

MAX_PAUSE_S: Final = 60.0
"""The longest pause before the next try to start a server. The first is 1 s; each is twice the one
before."""


A = TypeVar("A", bound=ServerArgs)


def serve_replicas(args: GatewayArgs, began: float) -> int:
    """Serve until a request to stop, and return the exit code. Called in the main thread. Each
    server counts its own start, from later than `began`."""

    def serve(signals: Signals) -> int:
        env.check()
        tls = tls_context(args.ssl_certfile, args.ssl_keyfile)
        with bind(args.host, args.http_port) as bound, closing(_Servers(args)) as servers:
            urls = [server.wait_ready() for server in servers.processes]
            signals.check()
            fleet = Fleet(urls, servers.key)
            door = door_of(args.host, args.cors_origin, args.allowed_host)
            front = Front(bound=bound, tls=tls, door=door, drain_s=args.drain_timeout)
            router = Router(fleet, front)
            asyncio.run(_route(router, fleet, servers, signals))
        return 0

    return run_serving("router", serve, level=args.log_level, log_format=args.log_format)


async def _route(router: Router, fleet: Fleet, servers: _Servers, signals: Signals) -> None:
    watches = [
        asyncio.create_task(servers.keep(index, fleet)) for index in range(len(servers.processes))
    ]
    try:
        await router.serve(signals)
    finally:
        for watch in watches:
            watch.cancel()
        servers.terminate()  # ends threads that wait for a server to start


class _Servers:
    """The servers, by their index. Mutable: one that ends is replaced.

    key: the router's API key, for requests for their states; None if they need none.
    """

    def __init__(self, args: GatewayArgs) -> None:
        if args.model:
            # The servers get the folder: given the id, they would all download the model at once.
            found = find_model(args)
            names = ",".join(found.names)
            args = replace(args, model=str(found.folder), served_model_name=names)
        self._devices = _devices(args)
        self.key = None
        given = args.api_key
        if given is not None or args.api_key_file is not None:
            self.key = secrets.token_urlsafe(24)
            given = f"{given},{self.key}" if given is not None else self.key
        if not self._devices:
            args = with_share_of_memory(args, args.dp)
        self._args = replace(
            args, host="127.0.0.1", port=0, api_key=given, ssl_certfile=None, ssl_keyfile=None
        )
        self.processes: list[ServerProcess] = []
        for index in range(args.dp):
            self.processes.append(self._start(index))

    def _start(self, index: int) -> ServerProcess:
        folder = f"{self._args.profile_dir}/replica-{index}"
        if self._devices:
            variables = {"CUDA_VISIBLE_DEVICES": self._devices[index]}
        else:
            variables = {"OMP_NUM_THREADS": str(max(num_cores() // self._args.dp, 1))}
            variables |= {name: os.environ[name] for name in variables if name in os.environ}
        return ServerProcess(f"replica {index}", replace(self._args, profile_dir=folder), variables)

    async def keep(self, index: int, fleet: Fleet) -> None:
        """Replace the server each time that it ends."""
        loop, pause_s = asyncio.get_running_loop(), 1.0
        while True:
            server, ended = self.processes[index], asyncio.Event()
            loop.add_reader(server.sentinel, ended.set)
            try:
                await ended.wait()
            finally:
                loop.remove_reader(server.sentinel)
            logger.error("%s (pid %d) has ended; starting it again", server.name, server.pid)
            server.wait_ended(0.0)
            try:
                self.processes[index] = server = self._start(index)
                await asyncio.to_thread(server.wait_ready)
            except (StartupFailed, OSError) as error:  # the system may have no room for a process
                logger.error("%s; trying again in %g s", error, pause_s)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, MAX_PAUSE_S)
                continue
            pause_s = 1.0
            await fleet.change([each.url for each in self.processes if each.url])

    def terminate(self) -> None:
        for server in self.processes:
            server.terminate()

    def close(self) -> None:
        """End the servers."""
        self.terminate()
        for server in self.processes:
            server.wait_ended(END_S)


def _devices(args: GatewayArgs) -> list[str]:
    """Return $CUDA_VISIBLE_DEVICES for each server; no items if they use no GPU.

    Raises ConfigError.
    """
    if args.device == "cpu" or (args.device == "auto" and not num_gpus()):
        return []
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    needed = args.dp * args.tp
    devices = given.split(",") if given is not None else [str(i) for i in range(needed)]
    if len(devices) < needed:
        raise ConfigError(
            f"--dp {args.dp} with --tp {args.tp} needs {needed} GPUs, and CUDA_VISIBLE_DEVICES "
            f"names {len(devices)}"
        )
    return [",".join(devices[i * args.tp : (i + 1) * args.tp]) for i in range(args.dp)]


def num_cores() -> int:
    """Return the cores that this process may use, at most those of the container."""
    if hasattr(os, "sched_getaffinity"):
        allowed = len(os.sched_getaffinity(0))
    else:
        allowed = os.cpu_count() or 1  # not Linux
    return min(allowed, container_cores())


def with_share_of_memory(args: A, num: int) -> A:
    """Return the options of one of `num` servers, each with an equal part of a CPU's memory."""
    if args.num_pages is not None:
        return args
    return replace(args, memory_ratio=(args.memory_ratio or CPU_MEMORY_RATIO) / num)
