"""A server that another one can take over from, and that may have taken over itself."""

from __future__ import annotations

import asyncio
import contextlib
import math
import multiprocessing
import os
import signal
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from minisgl.errors import ConfigError, EngineError
from minisgl.message import WatchMsg, WatchReply
from minisgl.runtime.workers import Workers
from minisgl.server.args import ServerArgs
from minisgl.server.clients import Keys
from minisgl.server.model import ServedModel
from minisgl.server.server import Server
from minisgl.utils.logger import get_logger
from minisgl.version import __version__
from minisgl_gateway.args import GatewayArgs
from minisgl_gateway.nodes.settings import digest_of
from minisgl_gateway.resume import ResumingFrontend
from minisgl_gateway.upgrade.door import Asked, Say, open_door, path_of
from minisgl_gateway.upgrade.family import FirstProcess
from minisgl_gateway.upgrade.guests import HostFrontend, Replies
from minisgl_gateway.upgrade.hand_over import HandOver
from minisgl_gateway.upgrade.inherited import Flags, Inherited
from minisgl_gateway.upgrade.link import Identity, Link, NotStarted, Ready
from minisgl_gateway.upgrade.memory import tightest
from minisgl_gateway.upgrade.successor import Successor, start

logger = get_logger(__name__)

CHECK_S: Final = 0.05
"""How often the old server looks whether it has any connection or request left."""

ANSWER_S: Final = 30.0
"""The longest wait for the engine, which answers between two steps. On a CPU, a step of a long
prompt takes seconds."""

LAST_S: Final = 2.0
"""How long the ends of the last answers may be on their way, until connections are closed."""


class Upgraded(EngineError):
    """The time of the drain is over, and the new server cannot go on with the request."""

    code = "upgraded"
    status = 503


class UpgradableServer(Server):
    """A server with a door for `minisgl upgrade`. Mutable: it is taken over from once."""

    _frontend_type = HostFrontend

    def __init__(
        self,
        workers: Workers,
        bound: socket.socket,
        model: ServedModel,
        args: ServerArgs,
        keys: Keys | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        super().__init__(workers, bound, model, args, keys, tls)
        self._before = bound if isinstance(bound, Inherited) else None
        self._identity = _identity(args, model, is_plain=tls is None)
        self._first: FirstProcess | None = None
        self._family: asyncio.Task[None] | None = None
        self._predecessor: asyncio.Task[None] | None = None
        self._door: asyncio.Server | None = None
        self._opening: asyncio.Task[None] | None = None
        self._is_upgrading = False
        self._restart: asyncio.Task[None] | None = None
        self._has_successor = False
        self._handing: HandOver | None = None

    async def serve(self, on_ready: Callable[[], None]) -> None:
        def begin() -> None:
            on_ready()
            if self._before:
                self._predecessor = asyncio.create_task(self._take_over(self._before))

        await super().serve(begin)

    def stop(self, *, drain: bool = False) -> None:
        if self._first:
            self._first.pass_on(signal.SIGTERM if drain else signal.SIGINT)
        super().stop(drain=drain)

    # --- the new server --------------------------------------------------------------------------

    async def _take_over(self, before: Inherited) -> None:
        """Tell the old server, and take its connections and requests until it has gone."""
        assert self._loop
        assert self._identity
        self._loop.add_reader(before.kin, self._on_first_gone, before)
        before.kin.sendall(b"serves %d\n" % os.getpid())
        before.handed.setblocking(False)
        link = await Link.of(before.link)
        link.send(Ready(identity=self._identity))
        logger.info("this server takes over (pid %d)", os.getpid())
        handed = asyncio.create_task(self._http.accept(before.handed))
        assert isinstance(self._frontend, HostFrontend)
        await self._frontend.host(link)
        with contextlib.suppress(EOFError):
            await handed
        logger.info("the server before this one has ended")
        link.close()

    def _on_first_gone(self, before: Inherited) -> None:
        assert self._loop
        self._loop.remove_reader(before.kin)
        logger.error("the first process of this server has gone: this one ends, too")
        self.stop()

    # --- the door --------------------------------------------------------------------------------

    def _connect(self, loop: asyncio.AbstractEventLoop) -> None:
        super()._connect(loop)
        is_main = threading.current_thread() is threading.main_thread()
        if self._identity and is_main and not multiprocessing.parent_process():
            self._opening = loop.create_task(self._open_door())

    async def _open_door(self) -> None:
        path = path_of(self._workers.endpoints.folder, self._socket.getsockname()[1])
        with contextlib.suppress(OSError):  # the folder has gone: the workers have ended
            self._door = await open_door(path, self._upgrade)

    def _disconnect(self, loop: asyncio.AbstractEventLoop) -> None:
        super()._disconnect(loop)
        if self._door:
            self._door.close()
            self._door = None

    # --- the old server --------------------------------------------------------------------------

    async def _upgrade(self, asked: Asked, say: Say, left: asyncio.Task[bytes]) -> str:
        """Let a successor take over, and return when this server's requests have ended."""
        if self._predecessor:  # its last word may be on its way
            await asyncio.wait([self._predecessor], timeout=LAST_S)
            if not self._predecessor.done():
                raise ConfigError("the server before this one still has requests; try again later")
        if self._is_upgrading:
            raise ConfigError("an upgrade of this server runs already")
        if self._frontend.is_draining or self._http.should_exit:
            raise ConfigError("this server is shutting down")
        self._is_upgrading, is_alone = True, False
        try:
            is_alone = not await self._holds_two(asked.engines, say)
            if is_alone:
                await self._make_room(asked.drain_s, say)
            successor, link, theirs = await self._start(asked, say, left)
        except Exception:
            if is_alone:
                await self._go_back()
            self._is_upgrading = False
            if self._failure:
                raise self._failure from None
            raise
        self._hand_over(successor, theirs)
        num_open = self._frontend.num_open
        say(f"the new server (pid {successor.process.pid}) has the port; open requests: {num_open}")
        if not is_alone:
            await self._wait(lambda: self._num_left, asked.drain_s)
        if self._restart:
            await asyncio.wait([self._restart])
        num_moved = num_open = self._frontend.num_open
        if num_open or is_alone:
            num_moved = self._move(link, theirs)
            say(f"requests that go on in the new server: {num_moved}")
            if num_moved:  # else the old engine computes them to their ends, too
                await asyncio.to_thread(self._workers.end)
            await self._wait(lambda: self._frontend.num_open)
        if self._handing:
            await self._wait(lambda: self._num_left, LAST_S)
            self._handing.end()
        self._http.should_exit = True
        self._disconnect(asyncio.get_running_loop())
        link.close()
        successor.handed.close()
        if num_open > num_moved:
            raise Upgraded(f"{num_open - num_moved} requests ended with an error")
        return "the old server has ended"

    async def _holds_two(self, asked: int | None, say: Say) -> bool:
        """Return whether both engines run at a time. asked: how many should; None if the memory
        says it."""
        if asked:
            return asked == 2
        trips = self._frontend.round_trips
        question = WatchMsg(seq=trips.new_seq(), memory=True)
        answers = await trips.ask(question, trips.num_ranks, ANSWER_S)
        frames = [answer.frame for answer in answers if isinstance(answer, WatchReply)]
        if len(frames) < trips.num_ranks:
            raise EngineError(f"no answer from the engine within {ANSWER_S:g} s; try again later")
        memory = tightest(frames)
        logger.info("upgrade: %s", memory)
        say(str(memory))
        return memory.holds_two

    async def _make_room(self, drain_s: float, say: Say) -> None:
        """Let new requests wait, and end the engine when the open ones have, after `drain_s` at
        most. Raises ConfigError if this server cannot."""
        raise ConfigError(
            "only a server with --restart, without --no-resume, can let requests wait for another "
            "engine; if the new flags need less memory, ask for both with --engines 2"
        )

    async def _go_back(self) -> None:
        """Undo `_make_room`."""

    async def _start(
        self, asked: Asked, say: Say, left: asyncio.Task[bytes]
    ) -> tuple[Successor, Link, Identity]:
        """Start a successor, and wait until it is ready. Raises ConfigError if it does not start,
        or if the client leaves."""
        before, first = self._before, None
        flags: Flags = before.flags if before else [own_flags()]
        family = before.kin if before else (first := FirstProcess()).theirs
        try:
            successor = start(
                self._socket,
                family,
                [*flags, asked.flags] if asked.flags else flags,
                python=asked.python,
                python_path=asked.python_path,
            )
            link, identity = await self._started(successor, say, left)
        except BaseException:
            if first:
                first.close()
            raise
        if first:
            self._first, self._family = first, asyncio.create_task(first.watch())
        return successor, link, identity

    async def _started(
        self, successor: Successor, say: Say, left: asyncio.Task[bytes]
    ) -> tuple[Link, Identity]:
        """Wait until the successor is ready. Raises ConfigError as `_start`."""
        pid = successor.process.pid
        say(f"the new server starts (pid {pid})")
        link = await Link.of(successor.link)
        ready = asyncio.create_task(link.receive())
        try:
            await asyncio.wait((ready, left), return_when=asyncio.FIRST_COMPLETED)
            has_left, record = not ready.done(), ready.result() if ready.done() else None
            if not isinstance(record, Ready):
                link.close()
                code = await asyncio.to_thread(successor.end)
                why = f"its exit code is {code}, and the log of this server says more"
                if isinstance(record, NotStarted):
                    why = record.why
                elif has_left:
                    why = "the command that asked for it has ended"
                logger.error("upgrade: the new server (pid %d) did not start: %s", pid, why)
                raise ConfigError(f"the new server did not start, so nothing has changed: {why}")
        except BaseException:
            successor.process.kill()
            successor.handed.close()
            ready.cancel()
            raise
        return link, record.identity

    def _hand_over(self, successor: Successor, theirs: Identity) -> None:
        """Accept no more connections, and give away those that are or become idle."""
        assert self._identity
        self._has_successor = True
        is_plain = self._identity.is_plain and theirs.is_plain
        self._http.leave(self._socket, closes=not is_plain)
        if is_plain:  # else no process can go on with another's encryption
            self._handing = HandOver(self._http.connections, successor.handed)
            self._handing.give()

    @property
    def _num_left(self) -> int:
        num_handed = self._handing.num_waiting if self._handing else 0
        return self._frontend.num_open + self._http.connections.num_open + num_handed

    async def _wait(self, num_left: Callable[[], int], most_s: float = math.inf) -> None:
        """Give away connections until nothing is left, for at most `most_s`."""
        begun = time.monotonic()
        while num_left() and time.monotonic() - begun < most_s:
            await asyncio.sleep(CHECK_S)
            if self._handing:
                self._handing.give()

    def _move(self, link: Link, theirs: Identity) -> int:
        """Let the open requests go on in the successor's engine, or end them. Returns how many go
        on."""
        assert self._loop
        assert self._identity
        frontend, ours = self._frontend, self._identity
        error = Upgraded(
            "a new server has taken over, and cannot go on with this answer; ask again"
        )
        is_named = (ours.version, ours.names) == (theirs.version, theirs.names)
        if not (is_named and isinstance(frontend, ResumingFrontend)):
            frontend.fail_all(error)
            return 0
        frontend.settle(error, only_new=ours.digest != theirs.digest)
        self._disconnect(self._loop)
        tokenizer: Any = link  # these have what a frontend uses of queues
        replies: Any = Replies(link)
        frontend.reconnect([tokenizer], replies, self._workers.info)
        dispatch = self._loop.create_task(frontend.run())
        dispatch.add_done_callback(self._on_dispatch_end)
        self._tasks = [dispatch]
        frontend.round_trips.fail(error)
        frontend.resume()
        return frontend.num_open

    async def _after_http(self) -> None:
        await super()._after_http()
        if not self._has_successor:
            return
        assert self._loop
        self._disconnect(self._loop)
        self._socket.close()
        await asyncio.to_thread(self._workers.end)
        if self._failure:  # it is not the new server's
            logger.error("%s", self._failure)
            self._failure = None
        if self._family:
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # successors leave no zombies
            logger.info("this process waits for the new server's end")
            await self._family


def _identity(args: ServerArgs, model: ServedModel, *, is_plain: bool) -> Identity | None:
    """Return what is compared; None for a server that is not upgraded."""
    if not isinstance(args, GatewayArgs) or args.nnodes > 1:
        return None
    digest, names = digest_of(args, model.folder), list(model.names)
    return Identity(version=__version__, digest=digest, names=names, is_plain=is_plain)


def own_flags() -> list[str]:
    """Return the flags of this process's `minisgl serve`."""
    argv = sys.argv[1:]
    return argv[1:] if argv[:1] == ["serve"] else argv
