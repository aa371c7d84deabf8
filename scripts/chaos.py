"""Breaks a running server on purpose, and checks that every client gets an end.

    python scripts/chaos.py [--rounds N] [--seed S] [--tp N] [--no-restart] [--json FILE]

In a round clients ask, one fault happens, and every client must have an end within the bound. Then
the server must have started its workers again (with `--restart`), or must have ended with code 1
and left nothing. Faults that break the server: a worker is killed, is stopped, or is killed while
the disk is full. Faults that must not disturb other clients: a worker is stopped for a second; the
disk is full; a client does not read, reads slowly, closes its sending half, or vanishes. The disk
is a small file system in memory, mounted (as root) on the server's TMPDIR. Round i of seed S is the
same in each run but for the machine's timing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

import httpx

from minisgl_bench.report import write_json
from own_server import START_S, Server, full_disk, leftovers, shared_memory, small_disk, wait_until

FAULTS: Final = (
    *("kill", "stop", "pause", "slow", "half-close"),
    *("unread", "vanish", "full", "full-kill"),
)
BREAKS: Final = ("kill", "stop", "full-kill")
"""Faults after which the workers start again, or the server ends."""
HANG_S: Final = 6.0
PAUSE_S: Final = 1.0
LATE_S: Final = 15.0
"""Time for heartbeat, check and answer on a busy machine."""
NUM_CLIENTS: Final = 6


class Client(threading.Thread):
    """One request. end: how it ended, or "". silence_s: the longest time between two pieces of a
    stream; it shows whether a client without an end is slow or its stream stands still.
    """

    def __init__(self, url: str, number: int, rng: random.Random) -> None:
        super().__init__(daemon=True)
        self.end = ""
        self._longest_s = 0.0
        self._heard_at = time.monotonic()
        self._url = url
        self.is_stream = number % 3 != 0
        self._body: dict[str, Any] = {
            "prompt": [rng.randrange(200) for _ in range(rng.choice((3, 40, 300)))],
            "max_tokens": rng.choice((1, 50, 400)),
            "stream": self.is_stream,
            "ignore_eos": True,
        }

    def run(self) -> None:
        try:
            with httpx.stream(
                "POST", f"{self._url}/v1/completions", json=self._body, timeout=120
            ) as response:
                text = ""
                for piece in response.iter_text():
                    text += piece
                    self._longest_s = self.silence_s
                    self._heard_at = time.monotonic()
        except httpx.HTTPError as error:  # the server is gone
            self.end = f"connection: {type(error).__name__}"
            return
        self.end = end_of(text)

    @property
    def silence_s(self) -> float:
        return max(self._longest_s, 0.0 if self.end else time.monotonic() - self._heard_at)


def end_of(text: str) -> str:
    """Return the end of a whole answer: "done", an error's code, or what is wrong with it."""
    codes = re.findall(r'"code":"(\w+)"', text)
    num_ends = len(codes) + len(re.findall(r'"finish_reason":"', text))
    whole = codes or "[DONE]" in text or '"usage":{' in text
    if num_ends != 1 or not whole:
        return f"cut off, {num_ends} ends: {text[-80:]!r}"
    return codes[0] if codes else "done"


def bad_client(url: str, fault: str) -> str:
    """Send a request as a client that misbehaves. Returns the fault of its answer, or "".

    The slow client must get all of it. The client that closes its sending half must get an end.
    """
    port = int(url.rpartition(":")[2])
    body = b'{"prompt": "a", "max_tokens": 400, "stream": true, "ignore_eos": true}'
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # so the server must wait
        client.settimeout(HANG_S + LATE_S)
        client.connect(("127.0.0.1", port))
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
            b"content-type: application/json\r\n"
            b"connection: close\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
        )
        if fault == "vanish":
            return ""
        if fault == "unread":
            time.sleep(1)
            return ""
        if fault == "half-close":
            client.shutdown(socket.SHUT_WR)
        answer = b""
        try:
            while piece := client.recv(1024):
                answer += piece
                time.sleep(0.02 if fault == "slow" else 0)
        except TimeoutError:
            return f"the {fault} client has no end"
        except ConnectionError:
            pass
    is_cut = fault == "slow" and b"[DONE]" not in answer
    return f"the slow client's answer is cut off: {answer[-80:]!r}" if is_cut else ""


@dataclass(slots=True, kw_only=True)
class Result:
    """Mutable. workers: how often each was killed, stopped or paused. ends: of all clients, by
    kind. longest_silence_s: of streams that nothing disturbs. problems: what must not be.
    """

    seed: int
    tp: int
    restart: bool
    rounds: Counter[str] = field(default_factory=Counter)
    workers: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    slowest_end_s: float = 0.0
    longest_silence_s: float = 0.0
    problems: list[str] = field(default_factory=list)


def break_something(server: Server, fault: str, rng: random.Random, result: Result) -> str:
    """Returns what is wrong with a client that misbehaves, or ""."""
    if fault == "full":
        time.sleep(PAUSE_S)
        return ""
    if fault in ("slow", "half-close", "unread", "vanish"):
        return bad_client(server.url, fault)
    workers = server.workers()
    name = rng.choice(sorted(workers))
    result.workers[f"{fault} {name}"] += 1
    os.kill(workers[name], signal.SIGSTOP if fault in ("stop", "pause") else signal.SIGKILL)
    if fault == "pause":
        time.sleep(PAUSE_S)
        os.kill(workers[name], signal.SIGCONT)
    return ""


def one_round(server: Server, number: int, fault: str, result: Result) -> None:
    rng = random.Random(result.seed * 100_003 + number)
    where = f"round {number} ({fault})"
    num_starts = server.num_starts

    def is_over() -> bool:
        """Return whether the workers have started again, or the server has ended."""
        return server.process.poll() is not None or server.num_starts > num_starts

    server.note_family()
    with full_disk(server.folder) if "full" in fault else contextlib.nullcontext():
        clients = [Client(server.url, index, rng) for index in range(NUM_CLIENTS)]
        for client in clients:
            client.start()
            time.sleep(rng.random() * 0.05)
        time.sleep(rng.random() * 0.3)
        problem = break_something(server, fault, rng, result)
        began = time.monotonic()
        # Whom nothing disturbs may need long on a busy machine: its tokens are computed.
        bound_s = HANG_S + LATE_S if fault in BREAKS else START_S
        join(clients, began + bound_s)
        if fault in BREAKS and any(client.is_alive() for client in clients):
            wait_until(is_over)  # they go on in the new workers, whose start may take long
            join(clients, time.monotonic() + bound_s)
        result.slowest_end_s = max(result.slowest_end_s, time.monotonic() - began)
        if problem:
            result.problems.append(f"{where}: {problem}")
        result.rounds[fault] += 1
        for client in clients:
            result.ends[client.end or "no end"] += 1
            if not client.end or client.end.startswith("cut off"):
                end = client.end or f"none, silent for {client.silence_s:.1f} s at most"
                result.problems.append(f"{where}: a client's end: {end}")
        if fault not in BREAKS:
            silences = [client.silence_s for client in clients if client.is_stream]
            result.longest_silence_s = max(result.longest_silence_s, *silences)
        if fault not in BREAKS and (bad := {client.end for client in clients} - {"done", ""}):
            result.problems.append(f"{where}: others were disturbed: {sorted(bad)}")
        if fault in BREAKS:
            wait_for_effect(server, is_over, where, result)
    if server.process.poll() is None and not wait_until(server.is_idle):
        result.problems.append(f"{where}: not ready and idle again")


def join(clients: Sequence[Client], deadline: float) -> None:
    """Wait for the clients' ends."""
    for client in clients:
        client.join(max(deadline - time.monotonic(), 0.01))


def wait_for_effect(
    server: Server, is_over: Callable[[], bool], where: str, result: Result
) -> None:
    """Wait until it is over, for the workers or the server.

    Perhaps no request shows a stopped worker, such as a tokenizer after all texts are encoded. The
    server notices it after `HANG_S`, which must not be in the next round.
    """
    if not wait_until(is_over):
        result.problems.append(f"{where}: the server noticed nothing")
        return
    if (code := server.process.poll()) != (None if result.restart else 1):
        result.problems.append(f"{where}: exit code {code}: {server.log[-500:]}")


def run(num_rounds: int, seed: int, tp: int, restart: bool) -> Result:
    result = Result(seed=seed, tp=tp, restart=restart)
    order = random.Random(seed)
    flags = ["--num-pages", "256", "--hang-timeout", str(HANG_S), "--tp", str(tp)]
    flags += ["--restart", "--max-restarts", "10000"] if restart else []
    server: Server | None = None
    with tempfile.TemporaryDirectory(prefix="chaos") as scratch, contextlib.ExitStack() as stack:
        folder = Path(scratch) / "disk"
        folder.mkdir()
        has_disk = stack.enter_context(small_disk(folder))
        faults = [fault for fault in FAULTS if has_disk or "full" not in fault]
        before = shared_memory()
        for number in range(num_rounds):
            server = server or Server(folder, *flags)
            fault = faults[number] if num_rounds <= len(faults) else order.choice(faults)
            one_round(server, number, fault, result)
            if server.process.poll() is not None or number == num_rounds - 1:
                if server.process.poll() is None and (code := server.close()) != 0:
                    result.problems.append(f"round {number}: exit code {code} after Ctrl-C")
                if left := leftovers(server, before):
                    result.problems.append(f"round {number}: left behind: {left}")
                if "Traceback" in server.log:
                    result.problems.append(f"round {number}: a traceback in {server.log[-2000:]}")
                server = None
    return result


def as_json(result: Result) -> dict[str, Any]:
    return {each.name: getattr(result, each.name) for each in fields(result)}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=12, help="default: %(default)s")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the faults (default: %(default)s)"
    )
    parser.add_argument(
        "--tp", type=int, default=1, help="ranks of the server (default: %(default)s)"
    )
    parser.add_argument(
        "--no-restart", action="store_true", help="the server must end instead of starting again"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results")
    args = parser.parse_args(argv)
    result = run(args.rounds, args.seed, args.tp, not args.no_restart)
    print(json.dumps(as_json(result), indent=1))
    if args.json:
        write_json(args.json, as_json(result))
    return int(bool(result.problems))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
