"""Measures the waits of a light key beside a heavy key's flood, through HTTP.

    python scripts/fair_keys.py [--rounds R] [--count N] [--json FILE]

A server with the built-in model has two keys. In each round the light key sends N short requests
one after the other, first alone, then while 64 clients of the heavy key ask without a pause. The
p99 of its time to the first token may be twice the p99 alone and one step. Run it on a quiet
machine, because the clients take time of the same cores. Two rounds of 150 take about two minutes
on two cores.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from minisgl_bench.report import write_json
from own_server import Server

ROWS: Final = 16
CLIENTS: Final = 4 * ROWS
FLAGS: Final = ("--max-running-requests", str(ROWS), "--num-pages", "1024")
KEYS: Final = '[heavy]\nkey = "heavy"\n[light]\nkey = "light"\n'
SETTLE_S: Final = 3.0
"""The time in which the flood fills the places."""
USAGE: Final = b'"usage":{'


async def ask(port: int, key: str, body: dict[str, Any]) -> float:
    """Ask once, and read to the end. Returns the seconds to the first byte of the body."""
    text = json.dumps({"ignore_eos": True, "temperature": 0, **body}).encode()
    began = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
            b"content-type: application/json\r\n"
            b"authorization: Bearer %s\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%s"
            % (key.encode(), len(text), text)
        )
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"{head!r} {await reader.read()!r}")
        first = await reader.read(1)
        first_s = time.perf_counter() - began
        rest = first + await reader.read()
        if USAGE not in rest and b"[DONE]" not in rest:
            raise RuntimeError(f"an answer was cut off: {rest[-200:]!r}")
        return first_s
    finally:
        writer.close()


def prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(1000) for _ in range(length)]


async def heavy(port: int, rng: random.Random) -> None:
    while True:
        lengths = rng.randint(50, 400), rng.randint(100, 400)
        await ask(port, "heavy", {"prompt": prompt(rng, lengths[0]), "max_tokens": lengths[1]})


async def light(port: int, rng: random.Random, count: int) -> list[float]:
    waits = []
    for _ in range(count):
        body = {"prompt": prompt(rng, 16), "max_tokens": 8, "stream": True}
        waits.append(await ask(port, "light", body))
        await asyncio.sleep(rng.uniform(0.02, 0.08))
    return waits


@contextlib.asynccontextmanager
async def flood(port: int, seed: int) -> AsyncIterator[None]:
    tasks = [
        asyncio.create_task(heavy(port, random.Random(seed * CLIENTS + i))) for i in range(CLIENTS)
    ]
    try:
        await asyncio.sleep(SETTLE_S)
        yield
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def step_times(log: Path, start: int) -> list[float]:
    """Return the seconds from each settled step to the next, in the log's lines from `start` on."""
    steps = [json.loads(line) for line in log.read_text().splitlines()[start:]]
    ends = [step["settle_s"] + step["wait_us"] * 1e-6 for step in steps if step["rows"] >= ROWS]
    return np.diff(ends).tolist()


def measure(rounds: int, count: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="fair") as scratch:
        folder, keys, log = (Path(scratch) / name for name in ("sockets", "keys.toml", "steps"))
        folder.mkdir()
        keys.write_text(KEYS)
        keys.chmod(0o600)
        server = Server(folder, *FLAGS, "--api-key-file", str(keys), "--log-steps", str(log))
        port = int(server.url.rpartition(":")[2])
        alone, beside, steps = [], [], []
        try:
            asyncio.run(light(port, random.Random(99), 20))  # warms up
            for seed in range(rounds):
                alone += asyncio.run(light(port, random.Random(seed), count))

                async def both(seed: int = seed) -> list[float]:
                    async with flood(port, seed):
                        return await light(port, random.Random(1000 + seed), count)

                start = len(log.read_text().splitlines())
                beside += asyncio.run(both())
                steps += step_times(log, start)
                time.sleep(1.0)
        finally:
            server.close()
    return summary(alone, beside, steps)


def summary(alone: list[float], beside: list[float], steps: list[float]) -> dict[str, Any]:
    """Return quantiles in ms. bound_ms: twice the p99 alone and the p99 of a step's time."""

    def quantiles(seconds: list[float]) -> dict[str, float]:
        at = np.round(np.percentile(np.array(seconds) * 1e3, (50, 99, 100)), 2).tolist()
        return dict(zip(("p50_ms", "p99_ms", "longest_ms"), at, strict=True))

    found = {
        name: quantiles(values)
        for name, values in (("alone", alone), ("beside_flood", beside), ("steps_of_flood", steps))
    }
    bound = 2 * found["alone"]["p99_ms"] + found["steps_of_flood"]["p99_ms"]
    return {
        "requests": len(beside),
        "max_running_requests": ROWS,
        "heavy_clients": CLIENTS,
        **found,
        "bound_ms": round(bound, 2),
        "holds": found["beside_flood"]["p99_ms"] <= bound,
    }


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=2, help="default: %(default)s")
    parser.add_argument(
        "--count",
        type=int,
        default=150,
        help="requests of the light key in a round (default: %(default)s)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results")
    args = parser.parse_args(argv)
    found = measure(args.rounds, args.count)
    print(json.dumps(found, indent=1))
    if args.json:
        write_json(args.json, found)
    return int(not found["holds"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
