"""Asks a server for ten times what it computes at once, and checks that nothing fails or grows.

    python scripts/soak.py [--seconds S] [--seed N] [--json FILE]

Ten clients for each row of a step ask without a pause: short and long prompts, a common prefix,
structured output, deadlines; some abort, vanish, read slowly or send bad requests. Beside them each
core has a busy neighbour. At the end every page and request must be given back. The script checks
status codes (the only 5xx are 503 and 504, with `Retry-After`), the ends of streams, requested
JSON, and from `GROWS_AFTER_S` on the resident memory of all processes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psutil

from minisgl_bench.report import write_json
from own_server import START_S, Server, leftovers, shared_memory, wait_until

ROWS: Final = 8
CLIENTS: Final = 10 * ROWS
FLAGS: Final = (
    *("--max-running-requests", str(ROWS), "--max-queued-requests", str(4 * ROWS)),
    *("--max-queue-wait", "5", "--num-pages", "512"),
)
KINDS: Final = {
    "short": 6,
    "long": 2,
    "shared": 4,
    "grammar": 2,
    "deadline": 1,
    "abort": 2,
    "vanish": 1,
    "bad": 2,
    "slow": 1,
}
"""The share of each kind of request."""
SHARED: Final = [7 * i % 1000 for i in range(400)]
SCHEMA: Final = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Bo"]}, "is_ok": {"type": "boolean"}},
    "required": ["name", "is_ok"],
    "additionalProperties": False,
}
BAD: Final = (
    b"{",
    b'{"prompt": 5}',
    b'{"prompt": "a", "max_tokens": -1}',
    b'{"prompt": "a", "max_tokens": 100000}',
    b'{"prompt": "a", "temperature": "hot"}',
    b'{"prompt": "a", "structured_outputs": {"regex": "("}}',
)
GROWS_AFTER_S: Final = 300.0
MAX_GROWTH: Final = 0.02
MEMORY_WINDOW: Final = 30
"""The number of samples, one a second, whose median is compared."""


@dataclass(slots=True, kw_only=True)
class Result:
    """Results. Mutable. ends: counts by kind and end. first_s, end_s: the seconds to the first
    event and to the end of each whole answer, by kind. memory: resident bytes of the server's
    processes, once a second."""

    seed: int
    seconds: float
    ends: Counter[str] = field(default_factory=Counter)
    first_s: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    end_s: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    memory: list[int] = field(default_factory=list)
    problems: Counter[str] = field(default_factory=Counter)

    @property
    def growth(self) -> float:
        """The growth of the memory from `GROWS_AFTER_S`, or a quarter of the time, to the end."""
        start = min(int(GROWS_AFTER_S), len(self.memory) // 4)
        window = max(min(MEMORY_WINDOW, len(self.memory) // 4), 1)
        before = statistics.median(self.memory[start : start + window])
        return statistics.median(self.memory[-window:]) / before - 1


def body_of(kind: str, rng: random.Random) -> tuple[str, bytes]:
    """Return path and body of a request."""
    if kind == "bad":
        return "/v1/completions", rng.choice(BAD)
    if kind == "grammar":
        shape = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
        ask = {"messages": [{"role": "user", "content": "Who?"}], "response_format": shape}
        return "/v1/chat/completions", json.dumps({**ask, "max_tokens": 100}).encode()
    length = {"long": 1200, "shared": 20}.get(kind, rng.choice((3, 20, 60)))
    prompt = [rng.randrange(1000) for _ in range(length)]
    body: dict[str, Any] = {
        "prompt": SHARED + prompt if kind == "shared" else prompt,
        "max_tokens": 200 if kind in ("long", "slow", "abort") else rng.choice((1, 8, 40)),
        "stream": kind != "deadline",
        "ignore_eos": True,
    }
    if kind == "deadline":
        body["timeout"] = rng.choice((0.5, 2.0))
    return "/v1/completions", json.dumps(body).encode()


async def exchange(port: int, kind: str, rng: random.Random) -> tuple[str, float | None, float]:
    """Ask once. Returns the answer, and the seconds to the first event and to the end."""
    path, body = body_of(kind, rng)
    client = socket.socket()
    client.setblocking(False)
    if kind == "slow":
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # so the server must wait
    began = time.monotonic()
    await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", port))
    reader, writer = await asyncio.open_connection(sock=client, limit=4096)
    try:
        writer.write(
            b"POST %s HTTP/1.1\r\nhost: localhost\r\n"
            b"content-type: application/json\r\n"
            b"connection: close\r\ncontent-length: %d\r\n\r\n%s" % (path.encode(), len(body), body)
        )
        if kind == "vanish":
            await asyncio.sleep(rng.random())
            return "", None, 0.0
        answer, first_s = b"", None
        while piece := await reader.read(1024 if kind == "slow" else 65536):
            answer += piece
            if first_s is None and b"data:" in answer:
                first_s = time.monotonic() - began
            if kind == "abort" and answer.count(b"data:") > 2:
                break
            if kind == "slow":
                await asyncio.sleep(0.05)
        return answer.decode(errors="replace"), first_s, time.monotonic() - began
    finally:
        writer.transport.abort()


def end_of(kind: str, answer: str) -> tuple[str, str]:
    """Return the end of a request, and its problem, or ""."""
    if kind == "vanish":
        return "vanished", ""
    head, _, text = answer.partition("\r\n\r\n")
    status = head[9:12]
    if status in ("429", "503", "504"):
        promised = "retry-after:" in head.lower()
        return status, "" if promised else f"{status} without Retry-After"
    if kind == "bad":
        return status, "" if status in ("400", "413", "422") else f"{status} for a bad request"
    if status != "200":
        return status or "nothing", f"{status or 'no'} status: {answer[-200:]!r}"
    if code := re.search(r'"code":"(\w+)"', text):
        known = code[1] in ("deadline_exceeded", "queue_timeout")
        return code[1], "" if known else f"a stream ends with {code[1]}"
    if kind == "abort":
        return "aborted", ""
    if "[DONE]" not in text and '"usage":{' not in text:
        return "cut off", f"cut off: {text[-80:]!r}"
    if kind == "grammar" and '"finish_reason":"stop"' in text:
        content = json.loads(text[text.index("{") : text.rindex("}") + 1])["choices"][0]
        value = json.loads(content["message"]["content"])
        if set(value) != {"name", "is_ok"}:
            return "done", f"not of the schema: {value}"
    return "done", ""


async def client(port: int, number: int, deadline: float, result: Result) -> None:
    rng = random.Random(result.seed * 100_003 + number)
    await asyncio.sleep(rng.random())
    while time.monotonic() < deadline:
        (kind,) = rng.choices(list(KINDS), list(KINDS.values()))
        try:
            answer, first_s, end_s = await asyncio.wait_for(exchange(port, kind, rng), START_S)
            end, problem = end_of(kind, answer)
        except TimeoutError:
            end, problem = "no end", f"no end after {START_S:g} s"
        except (OSError, ValueError) as error:
            end, problem = "connection", repr(error)
        result.ends[f"{kind}: {end}"] += 1
        if problem:
            result.problems[f"{kind}: {problem}"] += 1
        if end == "done":
            result.end_s[kind].append(end_s)
            if first_s is not None:
                result.first_s[kind].append(first_s)
        if end in ("429", "503", "connection"):
            await asyncio.sleep(rng.random())


async def watch(server: Server, deadline: float, result: Result) -> None:
    """Sample memory, and ask /health and /ready, once a second."""
    port = int(server.url.rpartition(":")[2])
    while time.monotonic() < deadline:
        server.note_family()
        with contextlib.suppress(psutil.NoSuchProcess):
            result.memory.append(sum(each.memory_info().rss for each in server.family))
        for path in ("/health", "/ready"):
            began = time.monotonic()
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(
                b"GET %s HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n" % path.encode()
            )
            status = (await reader.read())[9:12].decode()
            writer.close()
            result.end_s[path].append(time.monotonic() - began)
            result.ends[f"{path}: {status}"] += 1
            if status != "200":
                result.problems[f"{path}: {status}"] += 1
        await asyncio.sleep(1)


async def load(server: Server, result: Result) -> None:
    port = int(server.url.rpartition(":")[2])
    deadline = time.monotonic() + result.seconds
    clients = [client(port, number, deadline, result) for number in range(CLIENTS)]
    await asyncio.gather(watch(server, deadline, result), *clients)


@contextlib.contextmanager
def busy_neighbours(num: int) -> Iterator[None]:
    """Run so many processes without pauses."""
    spin = [sys.executable, "-c", "while True: pass"]
    neighbours = [subprocess.Popen(spin) for _ in range(num)]
    try:
        yield
    finally:
        for each in neighbours:
            each.kill()
            each.wait()


def run(seconds: float, seed: int, num_neighbours: int) -> Result:
    result = Result(seed=seed, seconds=seconds)
    with tempfile.TemporaryDirectory(prefix="soak") as scratch:
        folder = Path(scratch) / "sockets"
        folder.mkdir()
        before = shared_memory()
        server = Server(folder, *FLAGS)
        with busy_neighbours(num_neighbours):
            asyncio.run(load(server, result))
        if not wait_until(server.is_idle):
            result.problems["requests or pages are left"] += 1
        if code := server.close():
            result.problems[f"exit code {code} after Ctrl-C"] += 1
        if left := leftovers(server, before):
            result.problems[f"left behind: {left}"] += 1
        if "Traceback" in server.log:
            result.problems[f"a traceback in {server.log[-2000:]}"] += 1
    if seconds > 2 * GROWS_AFTER_S and result.growth > MAX_GROWTH:
        result.problems[f"memory grew by {result.growth:.1%}"] += 1
    return result


def quantiles(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    at = {"p50": 0.5, "p99": 0.99}
    return {name: round(ordered[int(len(ordered) * q)], 3) for name, q in at.items()}


def as_json(result: Result) -> dict[str, Any]:
    return {
        "seed": result.seed,
        "seconds": result.seconds,
        "clients": CLIENTS,
        "rows_of_a_step": ROWS,
        "ends": dict(sorted(result.ends.items())),
        "first_token_s": {kind: quantiles(each) for kind, each in result.first_s.items()},
        "end_s": {kind: quantiles(each) for kind, each in result.end_s.items()},
        "memory_growth": round(result.growth, 4),
        "memory_bytes": result.memory[:: max(len(result.memory) // 20, 1)],
        "problems": dict(result.problems),
    }


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=1200, help="default: %(default)s")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the requests (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results")
    args = parser.parse_args(argv)
    result = run(args.seconds, args.seed, os.cpu_count() or 1)
    print(json.dumps(as_json(result), indent=1))
    if args.json:
        write_json(args.json, as_json(result))
    return int(bool(result.problems))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
