"""The cost of Ray's ingress for a request and a token, for `try_ray.py`.

It is compared with an empty application of Ray Serve that streams as much. CPU seconds are
compared, which a busy machine changes little.

::

    through Ray   client -> proxy -> Ingress -> a server
    directly      client ----------------------> the server
    empty         client -> proxy -> Empty

The ingress adds the time of proxy and Ingress, and the additional time of the servers' processes
(without the engine) against direct requests. The empty application takes the time of proxy and
Empty: it streams as many pieces of the same size, at the pace of the servers' answers in the same
round. The time of idle processes is measured before and after each batch, and subtracted.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import httpx
import psutil
from ray import serve
from starlette.applications import Starlette
from starlette.responses import StreamingResponse
from starlette.routing import Route

FEW, MANY = 8, 136
AT_ONCE: Final = 4
IDLE_S: Final = 1.2
END_S: Final = 120.0


class Empty:
    """Streams the requested number of pieces, of the requested size and pace."""

    def __serve_build_asgi_app__(self) -> Any:
        async def pieces(count: int, size: int, pause_s: float) -> Any:
            began = time.monotonic()
            for index in range(count):
                yield b"data: " + b"x" * (size - 8) + b"\n\n"
                await asyncio.sleep(max(began + (index + 1) * pause_s - time.monotonic(), 0))

        async def answer(request: Any) -> StreamingResponse:
            body = await request.json()
            made = pieces(body["max_tokens"] + body["more"], body["size"], body["pause_s"])
            return StreamingResponse(made, media_type="text/event-stream")

        return Starlette(routes=[Route("/empty", answer, methods=["POST"])])


def _cpu_s(processes: list[psutil.Process]) -> float:
    """Return the seconds that all threads have run."""
    total = 0
    for process in processes:
        for task in Path(f"/proc/{process.pid}/task").iterdir():
            total += int((task / "schedstat").read_text().split()[0])
    return total * 1e-9


def _groups() -> dict[str, list[psutil.Process]]:
    """Return the processes of Ray's proxy, the ingress, the empty application and the servers."""
    found: dict[str, list[psutil.Process]] = {"proxy": [], "ingress": [], "empty": [], "server": []}
    for process in psutil.process_iter(["cmdline"]):
        line = " ".join(process.info["cmdline"] or ())
        if line.startswith("ray::ProxyActor"):
            found["proxy"].append(process)
        elif line.startswith("ray::ServeReplica:model:Ingress"):
            found["ingress"].append(process)
        elif line.startswith("ray::ServeReplica:empty:Empty"):
            found["empty"].append(process)
        elif line.startswith("ray::ServeReplica:model:Engine"):
            family = process.children(recursive=True)
            engine = max(family, key=lambda each: each.memory_info().rss)
            found["server"] += [each for each in family if each != engine]
    assert all(found.values()), found
    return found


class _Asked:
    """Asks one address for streams."""

    def __init__(self, url: str, body: dict[str, Any], groups: list[list[psutil.Process]]) -> None:
        self.url, self._body = url, body
        self._processes = [process for group in groups for process in group]

    def batch(self, num_requests: int, num_tokens: int) -> tuple[float, float]:
        """Return the CPU seconds of a request beyond those of the same time without any, and the
        median seconds of an answer."""
        idle_s = self._idle_s()
        began, before = time.monotonic(), _cpu_s(self._processes)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            answers = list(pool.map(self._ask, [num_tokens] * num_requests))
        used_s, took_s = _cpu_s(self._processes) - before, time.monotonic() - began
        idle_s = (idle_s + self._idle_s()) / 2
        answer_s = statistics.median(seconds for _, seconds in answers)
        return (used_s - idle_s * took_s) / num_requests, answer_s

    def _idle_s(self) -> float:
        began, before = time.monotonic(), _cpu_s(self._processes)
        time.sleep(IDLE_S)
        return (_cpu_s(self._processes) - before) / (time.monotonic() - began)

    def _ask(self, num_tokens: int) -> tuple[int, float]:
        """Return the bytes and the seconds of an answer."""
        began, size = time.perf_counter(), 0
        body = self._body | {"max_tokens": num_tokens}
        with (
            httpx.Client(trust_env=False, timeout=END_S) as client,
            client.stream("POST", self.url, json=body) as stream,
        ):
            stream.raise_for_status()
            for piece in stream.iter_raw():
                size += len(piece)
        return size, time.perf_counter() - began

    def shape(self) -> tuple[int, int]:
        """Return the bytes of a token, and the pieces of an answer beyond its tokens."""
        size = (self._ask(MANY)[0] - self._ask(FEW)[0]) // (MANY - FEW)
        return size, self._num_pieces(FEW) - FEW

    def _num_pieces(self, num_tokens: int) -> int:
        """Return the number of HTTP chunks of an answer."""
        parts = urlsplit(self.url)
        body = json.dumps(self._body | {"max_tokens": num_tokens}).encode()
        head = f"POST {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        with socket.create_connection((parts.hostname, parts.port)) as connection:
            connection.sendall(head.encode() + body)
            stream = connection.makefile("rb")
            while stream.readline().strip():
                pass
            count = 0
            while size := int(stream.readline(), 16):
                stream.read(size + 2)
                count += 1
        return count


def cost(url: str, server: str, rounds: int, requests: int, headers: Any = None) -> dict[str, Any]:
    """Return milliseconds of CPU a request and a token, and the ratios, with each round's.

    url: the ingress's address. server: the address of a server behind it.
    """
    serve.run(
        serve.deployment(max_ongoing_requests=100)(serve.ingress()(Empty)).bind(),
        name="empty", route_prefix="/bare",
    )  # fmt: skip
    groups = _groups()
    body = {"model": "m", "prompt": "What is a radix cache?", "temperature": 0, "stream": True}
    body["ignore_eos"] = True
    direct = _Asked(f"http://{server}/v1/completions", body, [groups["server"]])
    size, more = direct.shape()
    pace = {"size": size, "pause_s": 0.002, "more": more}
    asked = {
        "direct": direct,
        "routed": _Asked(
            f"{url}/v1/completions", body, [groups[n] for n in ("proxy", "ingress", "server")]
        ),
        "empty": _Asked(f"{url}/bare/empty", pace, [groups["proxy"], groups["empty"]]),
    }
    each: dict[str, list[float]] = {"request": [], "token": []}
    base: dict[str, list[float]] = {"request": [], "token": []}
    paces: list[dict[str, float]] = []
    for index in range(rounds + 1):
        seconds, answer_s = {}, {}
        order = [(name, tokens) for name in ("routed", "empty") for tokens in (FEW, MANY)]
        random.Random(index).shuffle(order)
        for name, tokens in [("direct", FEW), ("direct", MANY), *order]:
            seconds[name, tokens], answer_s[name, tokens] = asked[name].batch(requests, tokens)
            if (name, tokens) == ("direct", MANY):  # the pace of as many streams at once
                spread_s = answer_s["direct", MANY] - answer_s["direct", FEW]
                pace["pause_s"] = max(spread_s, 0.0) / (MANY - FEW)
        paces.append({"routed": answer_s["routed", MANY], "empty": answer_s["empty", MANY]})
        if not index:
            continue  # the first round warms up
        for costs, parts in ((each, {"routed": 1, "direct": -1}), (base, {"empty": 1})):
            few, many = (
                sum(sign * seconds[name, tokens] for name, sign in parts.items())
                for tokens in (FEW, MANY)
            )
            token = (many - few) / (MANY - FEW)
            costs["token"].append(token * 1e3)
            costs["request"].append((few - FEW * token) * 1e3)
    serve.delete("empty")
    result: dict[str, Any] = {"bytes_a_token": size, "more_pieces": more}
    result["answer_s"] = [{name: round(s, 3) for name, s in each.items()} for each in paces[1:]]
    for what in ("request", "token"):
        added, empty = statistics.median(each[what]), statistics.median(base[what])
        result[what] = {
            "ingress_adds_ms": round(added, 4),
            "empty_takes_ms": round(empty, 4),
            "ratio": round(added / empty, 3),
            "rounds": [
                (round(a, 4), round(b, 4)) for a, b in zip(each[what], base[what], strict=True)
            ],
        }
    return result
