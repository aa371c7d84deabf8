"""`minisgl upgrade`: a real one, and its parts with fakes."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import psutil
import pytest

from helpers.endless import endless_flags
from helpers.engine_replies import Queue, accepted, ending, read, text
from helpers.running_server import RunningServer, assert_nothing_left
from minisgl.core import Failed, SamplingParams
from minisgl.errors import ConfigError, EngineError, WorkerDied
from minisgl.message import TextPrompt, WatchMsg, ids_from_bytes, ids_to_bytes
from minisgl.server.clients import Origin
from minisgl.utils.zmq import Endpoints
from minisgl_gateway.args import GatewayArgs
from minisgl_gateway.resume import ResumingFrontend
from minisgl_gateway.upgrade import command, door
from minisgl_gateway.upgrade.command import door_of
from minisgl_gateway.upgrade.door import Asked, Said, open_door, path_of
from minisgl_gateway.upgrade.family import FirstProcess
from minisgl_gateway.upgrade.guests import Replies
from minisgl_gateway.upgrade.hand_over import HandOver
from minisgl_gateway.upgrade.inherited import Handed
from minisgl_gateway.upgrade.link import Link, NotStarted
from minisgl_gateway.upgrade.server import UpgradableServer
from minisgl_gateway.upgrade.successor import options_of

ASKED = Asked(flags=[], python=sys.executable, python_path="", drain_s=0, engines=None)


# --- a real one ----------------------------------------------------------------------------------


class Story(threading.Thread):
    """Reads an endless stream. Mutable: the text grows."""

    def __init__(self, server: RunningServer) -> None:
        super().__init__(daemon=True)
        self.text, self.num, self._server = "", 0, server
        self.is_ended = False

    def run(self) -> None:
        with self._server.client() as client:
            stream = client.completions.create(
                model="endless", prompt="a", stream=True, max_tokens=130_000, temperature=1.0,
                seed=5, extra_body={"ignore_eos": True},
            )  # fmt: skip
            for chunk in stream:
                self.text += chunk.choices[0].text if chunk.choices else ""
                self.num += 1
                if self.is_ended:
                    return


class Kept(threading.Thread):
    """Asks again and again on one connection. Mutable: it counts."""

    def __init__(self, server: RunningServer) -> None:
        super().__init__(daemon=True)
        self._host = server.url.removeprefix("http://")
        self.num, self.is_ended = 0, False
        self.sockets: set[object] = set()

    def run(self) -> None:
        connection = http.client.HTTPConnection(self._host, timeout=150)
        while not self.is_ended:
            connection.request("GET", "/health")
            assert connection.getresponse().read() == b'{"status":"ok"}'
            self.sockets.add(connection.sock)
            self.num += 1
            time.sleep(0.02)
        connection.close()


def asking(server: RunningServer, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "minisgl", "upgrade", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "TMPDIR": str(server.sockets)},
    )


def test_a_stream_and_a_connection_go_on(endless: Path, launch: Any) -> None:
    server = launch(*endless_flags(endless), "--restart", "--dtype", "float32")
    kept = Kept(server)
    kept.start()
    (folder,) = server.sockets.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    failing = asking(server, "--", "--num-pages", "zero")
    said = failing.communicate(timeout=150)[0]
    assert failing.returncode == 1
    assert "nothing has changed: argument --num-pages" in said

    engine = psutil.Process(server.pid("engine"))
    story = Story(server)
    story.start()
    upgrade = asking(server, "--drain", "0", "--", "--log-requests")
    assert upgrade.stdout
    lines = iter(upgrade.stdout.readline, "")
    assert re.fullmatch("an engine takes .* are free, .*: both engines run.*\n", next(lines))
    started = re.search(r"starts \(pid (\d+)\)", next(lines))
    assert started
    os.kill(int(started[1]), signal.SIGSTOP)  # it waits until the second command has its answer
    second = asking(server)
    assert "an upgrade of this server runs already" in second.communicate(timeout=150)[0]
    assert second.returncode == 1
    os.kill(int(started[1]), signal.SIGCONT)
    assert "has the port; open requests: 1" in next(lines)
    assert next(lines) == "requests that go on in the new server: 1\n"
    engine.wait(60)  # it does not go on with the story, too
    num = story.num
    while story.num < num + 20 and story.is_alive():
        story.join(0.05)
    assert story.is_alive()
    story.is_ended = True
    story.join(150)
    assert next(lines) == "the old server has ended\n"
    assert upgrade.wait(150) == 0

    num = kept.num
    while kept.num < num + 3 and kept.is_alive():
        kept.join(0.05)
    assert kept.is_alive()
    assert len(kept.sockets) == 1
    kept.is_ended = True
    kept.join(150)
    with server.client() as client:
        again = client.completions.create(
            model="endless", prompt="a", max_tokens=story.num, temperature=1.0, seed=5,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
    length = min(len(again.choices[0].text), len(story.text))
    assert length > 0
    assert again.choices[0].text[:length] == story.text[:length]
    assert server.process.poll() is None  # a service manager knows this one
    (pid,) = re.findall(r"this server takes over \(pid (\d+)\)", server.output["err"])
    family = server.family()
    assert int(pid) in [process.pid for process in family]
    server.process.terminate()
    assert server.ended() == 0
    assert_nothing_left(server, family)


# --- requests of the old server in the new one ---------------------------------------------------


class Two:
    """The frontends of both servers, with a link between them. Mutable."""

    def __init__(self) -> None:
        self.engine, self.first = Queue(), Queue()
        self.old = ResumingFrontend([self.first], Queue())
        self.new = ResumingFrontend([self.engine], Queue())
        self.new.info = {"context_length": 40}

    async def moved(self, goes_on: Callable[[], Any]) -> Any:
        """Move the open requests, call `goes_on`, and return its result when all is delivered."""
        ends = socket.socketpair()
        ours, theirs = [await Link.of(end) for end in ends]
        link: Any = ours
        replies: Any = Replies(ours)
        self.old.reconnect([link], replies, {"context_length": 40})
        hosting = asyncio.create_task(self.new.host(theirs))
        delivering = asyncio.create_task(self.old.run())
        self.old.resume()
        num = self.old.num_open
        while len(self.engine.sent) < num:
            await asyncio.sleep(0)
        result = goes_on()
        while self.new.num_open:
            await asyncio.sleep(0)
        ours.send(NotStarted(why=""))  # no record of an engine: the hosting ends
        await hosting
        theirs.close()
        with pytest.raises(EngineError, match="the server that took over has ended"):
            await delivering
        ours.close()
        return result


def test_a_request_goes_on_by_another_uid() -> None:
    two = Two()
    two.new.submit([TextPrompt(text="other")], SamplingParams())  # the uids differ
    two.new._deliver(ending(0, 1), 0.0)
    two.engine.sent.clear()
    call = two.old.submit([TextPrompt(text="once")], SamplingParams(), origin=Origin())
    (first,) = two.first.sent
    for reply in (accepted(0, first), text(0, "a", 7)):
        two.old._deliver(reply, 0.0)
    two.old.settle(EngineError("-"), only_new=False)

    def go_on() -> None:
        (sent,) = two.engine.sent
        assert (sent.uid, sent.sampling.seed, sent.context_length) == (1, first.sampling.seed, 40)
        assert ids_from_bytes(sent.output).tolist() == [7]
        (kept,) = two.new._kept.values()
        for reply in (accepted(1, sent), text(1, "b", 8)):
            two.new._deliver(reply, 0.0)
        # A second upgrade would go on from all of them.
        assert ids_from_bytes(kept.again(40).output).tolist() == [7, 8]
        two.new._deliver(ending(1, 2), 0.0)

    asyncio.run(two.moved(go_on))
    written, (end,), error = read(call)
    assert (written, end.num_output_tokens, end.num_resumed, error) == ("ab", 2, 1, "")


def test_an_output_that_is_repeated_is_kept_once() -> None:
    """A router has sent it: the ids come again with the text."""
    two, prompt = Two(), TextPrompt(text="once")
    outputs = {0: ids_to_bytes([7])}
    call = two.old.submit([prompt], SamplingParams(), origin=Origin(), outputs=outputs)

    def go_on() -> None:
        (sent,) = two.engine.sent
        assert (sent.output, sent.repeats) == (outputs[0], True)
        for reply in (accepted(0, sent), text(0, "a", 7), text(0, "b", 8)):
            two.new._deliver(reply, 0.0)
        (kept,) = two.new._kept.values()
        again = kept.again(40)
        assert (ids_from_bytes(again.output).tolist(), again.repeats) == ([7, 8], False)
        two.new._deliver(ending(0, 2), 0.0)

    asyncio.run(two.moved(go_on))
    assert read(call)[0] == "ab"


def test_a_client_that_leaves_ends_the_request_in_the_new_server() -> None:
    two = Two()
    call = two.old.submit([TextPrompt(text="once")], SamplingParams(), origin=Origin())
    asyncio.run(two.moved(call.abort))
    assert type(two.engine.sent[-1]).__name__ == "AbortMsg"


def test_requests_of_an_old_server_that_has_died_end() -> None:
    async def die() -> None:
        ours, theirs = [await Link.of(end) for end in socket.socketpair()]
        hosting = asyncio.create_task(two.new.host(theirs))
        two.old.reconnect([cast(Any, ours)], cast(Any, Replies(ours)), {"context_length": 40})
        two.old.submit([TextPrompt(text="once")], SamplingParams())
        ours.close()
        await hosting
        theirs.close()

    two = Two()
    asyncio.run(die())
    assert [type(sent).__name__ for sent in two.engine.sent] == ["TokenizeMsg", "AbortMsg"]
    assert two.new.num_open == 0


def test_what_the_new_server_does_not_know_ends_by_name() -> None:
    class TokenizeMsg(msgspec.Struct, tag=True):
        uid: int = 7
        of_another_version: int = 1

    async def send() -> Failed:
        ours, theirs = [await Link.of(end) for end in socket.socketpair()]
        hosting = asyncio.create_task(Two().new.host(theirs))
        ours.put([WatchMsg(), TokenizeMsg()])
        (failed,) = await Replies(ours).get()
        ours.close()
        await hosting
        theirs.close()
        assert isinstance(failed, Failed)
        return failed

    failed = asyncio.run(send())
    assert (failed.uid, failed.message) == (7, "the new server does not know its form")


def test_an_engine_that_dies_ends_the_request() -> None:
    two = Two()
    call = two.old.submit([TextPrompt(text="once")], SamplingParams(), origin=Origin())
    died = WorkerDied("engine", -9)
    asyncio.run(two.moved(lambda: two.new.fail_all(died)))
    assert read(call)[2] == WorkerDied.__name__


def test_a_request_waits_for_a_new_server_whose_engine_starts_again() -> None:
    async def move() -> None:
        ours, theirs = [await Link.of(end) for end in socket.socketpair()]
        hosting = asyncio.create_task(two.new.host(theirs))
        two.old.reconnect([cast(Any, ours)], cast(Any, Replies(ours)), {"context_length": 40})
        two.old.resume()
        async with asyncio.timeout(5):
            while not two.new.num_open:
                await asyncio.sleep(0)
        assert not two.engine.sent
        two.new.reconnect([cast(Any, two.engine)], cast(Any, Queue()), {"context_length": 40})
        two.new.resume()
        ours.close()
        await hosting
        theirs.close()

    two = Two()
    two.old.submit([TextPrompt(text="once")], SamplingParams(), origin=Origin())
    (first,) = two.first.sent
    for reply in (accepted(0, first), text(0, "a", 7)):
        two.old._deliver(reply, 0.0)
    two.new.pause(WorkerDied("engine", -9), EngineError("it starts again"))
    asyncio.run(move())
    assert ids_from_bytes(two.engine.sent[0].output).tolist() == [7]


def test_with_other_weights_only_new_requests_go_on() -> None:
    two = Two()
    begun = two.old.submit([TextPrompt(text="once")], SamplingParams(), origin=Origin())
    two.old.hold(EngineError("-"))
    fields: Any = ([TextPrompt(text="of a router")], SamplingParams())
    elsewhere = two.old.submit(*fields, origin=Origin(), outputs={0: ids_to_bytes([7])})
    waits = two.old.submit([TextPrompt(text="new")], SamplingParams(), origin=Origin())
    assert (two.old.num_open, two.old.num_sent) == (3, 1)
    two.old.settle(EngineError("other weights"), only_new=True)

    def answer() -> None:
        (sent,) = two.engine.sent
        assert (sent.prompt, sent.output) == (TextPrompt(text="new"), None)
        two.new._deliver(accepted(0, sent), 0.0)
        two.new._deliver(ending(0, 1), 0.0)

    asyncio.run(two.moved(answer))
    assert read(begun)[2] == read(elsewhere)[2] == "EngineError"
    assert [end.num_resumed for end in read(waits)[1]] == [0]


# --- flags, processes, sockets -------------------------------------------------------------------


def test_later_flags_count_and_another_model_replaces_the_first() -> None:
    args = options_of([["first/model", "--tp", "2", "--restart"], ["--tp", "1"], ["second/model"]])
    assert isinstance(args, GatewayArgs)
    assert (args.model, args.tp, args.restart) == ("second/model", 1, True)
    for second in (["third/model"], ["--model", "third/model"]):
        for first in (["first/model"], ["--model", "first/model"]):
            assert options_of([first, second]).model == "third/model"
    with pytest.raises(ConfigError, match="unrecognized arguments: --bogus"):
        options_of([[], ["--bogus"]])
    with pytest.raises(ConfigError, match="only a server of one machine"):
        options_of([[], ["--dp", "2"]])


@pytest.mark.parametrize(
    ("lines", "error"),
    [
        (b"serves 2\nends 2 0\n", None),
        (b"serves 2\nserves 3\nends 2 0\nends 3 0\n", None),
        (b"serves 2\nserves 3\nends 2 0\n", "without a word"),
        (b"serves 2\nends 3 1\nends 2 4\n", "with exit code 4"),
    ],
)
def test_the_first_process_ends_as_the_last_successor(lines: bytes, error: str | None) -> None:
    first = FirstProcess()
    successor = socket.socket(fileno=os.dup(first.theirs.fileno()))
    successor.sendall(lines)
    successor.close()
    if error is None:
        asyncio.run(first.watch())
    else:
        with pytest.raises(EngineError, match=error):
            asyncio.run(first.watch())


def test_a_door_of_another_user_is_not_used(sockets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(sockets))
    with pytest.raises(ConfigError, match="there is no server of this user with"):
        door_of(None)
    for name, mode in (("a", 0o700), ("b", 0o755), ("c", 0o700)):
        folder = sockets / f"minisgl-{name}"
        folder.mkdir()
        folder.chmod(mode)
        (folder / f"upgrade-801{ord(name)}").touch()
    old = sockets / "minisgl-c" / "upgrade-80197"  # its server has been upgraded
    old.touch()
    os.utime(old, (1, 1))
    (sockets / "minisgl-d").symlink_to(sockets / "minisgl-a")
    assert door_of(80197).parent.name == "minisgl-a"
    with pytest.raises(ConfigError, match="choose with --port, of 80197, 80199"):
        door_of(None)
    with pytest.raises(ConfigError, match="no server of this user on port 80198"):
        door_of(80198)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(ConfigError, match="there is no server"):
        door_of(80197)


NOBODY = 65534


def as_nobody(folder: Path, path: Path) -> str:
    """Return how another user's attempts end to list the folder and to connect to the socket."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            for attempt in (os.listdir, socket.socket(socket.AF_UNIX).connect):
                try:
                    attempt(str(folder if attempt is os.listdir else path))
                    os.write(writing, b"allowed ")
                except PermissionError:
                    os.write(writing, b"denied ")
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with open(reading) as said:
        return said.read()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_another_user_is_kept_out(sockets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sockets.chmod(0o755)
    monkeypatch.setattr("tempfile.tempdir", str(sockets))
    folder = Endpoints.create().folder
    path = path_of(folder, 801)

    async def listening() -> list[str]:
        async def upgrade(asked: Asked, say: object, left: object) -> str:
            raise AssertionError

        server = await open_door(path, upgrade)
        found = [as_nobody(folder, path)]
        path.chmod(0o777)  # the folder alone keeps others out
        found.append(as_nobody(folder, path))
        folder.chmod(0o711)  # the attempts are real
        found.append(as_nobody(folder, path))
        server.close()
        return found

    assert asyncio.run(listening()) == ["denied denied ", "denied denied ", "denied allowed "]


def test_an_interrupted_command_has_not_succeeded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(port: int | None) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "door_of", interrupted)
    assert command.upgrade([], 0.0) == 130
    assert "it is off, unless the new server has the port" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("sent", "says"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "this is no request for an upgrade"),
        (b"x" * (door.MAX_LINE + 9), "this is no request for an upgrade"),
        (b"", "it did not come in time"),
        (msgspec.json.encode(ASKED) + b"\n", "the upgrade has failed (KeyError: 'broken')"),
    ],
)
def test_what_comes_at_the_door(
    sent: bytes, says: str, sockets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "ASKED_S", 0.2)

    async def upgrade(asked: Asked, say: object, left: object) -> str:
        assert asked == ASKED
        raise KeyError("broken")

    async def ask() -> Said:
        server = await open_door(sockets / "door", upgrade)
        reader, writer = await asyncio.open_unix_connection(sockets / "door")
        writer.write(sent)
        line = await reader.readline()
        writer.close()
        server.close()
        return msgspec.json.decode(line, type=Said)

    said = asyncio.run(ask())
    assert says in said.text
    assert said.code


def test_connections_wait_while_the_successors_socket_is_full() -> None:
    idle = [SimpleNamespace(release=socket.socket) for _ in range(2)]
    connections: Any = SimpleNamespace(waiting=idle)

    async def hand_over(ours: socket.socket, theirs: socket.socket) -> None:
        ours.setblocking(False)
        num_bytes = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                num_bytes += ours.send(b"c" * 4096)
        giving = HandOver(connections, ours)
        giving.give()
        idle.clear()
        assert giving.num_waiting == 2
        old = object.__new__(UpgradableServer)
        http = SimpleNamespace(connections=SimpleNamespace(num_open=0))
        vars(old).update(_frontend=SimpleNamespace(num_open=0), _http=http, _handing=giving)
        assert old._num_left == 2, "the old server waits for them"
        while num_bytes:
            num_bytes -= len(theirs.recv(num_bytes))
        giving.give()
        assert giving.num_waiting == 0
        for _ in range(2):
            _, (descriptor,), _, _ = socket.recv_fds(theirs, 1, 1)
            os.close(descriptor)

    ours, theirs = socket.socketpair()
    with ours, theirs:
        asyncio.run(hand_over(ours, theirs))


def test_a_handed_connection_is_accepted() -> None:
    ours, theirs = socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as listening, ours:
        client = socket.create_connection(listening.getsockname())
        connection, address = listening.accept()
        socket.send_fds(ours, [b"c"], [connection.fileno()])
        connection.close()
        with Handed(fileno=theirs.detach()) as handed:
            taken, its_address = handed.accept()
            assert its_address == address
            taken.sendall(b"hello")
            assert client.recv(9) == b"hello"
            ours.send(b"c")  # what comes if no descriptor is free here
            with pytest.raises(OSError, match="Too many open files"):
                handed.accept()
            ours.close()
            with pytest.raises(EOFError):
                handed.accept()
        taken.close()
        client.close()
