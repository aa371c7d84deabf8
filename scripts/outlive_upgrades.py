"""Upgrades a server under load again and again, and compares each answer with undisturbed ones.

    python scripts/outlive_upgrades.py [--rounds N] [--clients N] [--tp N] [--json FILE]
    python scripts/outlive_upgrades.py --gaps [--rounds N] [--clients N] [--json FILE]

The server has `--restart`, float32, and the built-in model or one with other weights. Clients ask
all kinds of `outlive.py`, each on a new connection, or on one that stays open. Meanwhile one
upgrade follows another, in turn: the same flags, where open requests end on the old engine, or
move; one engine at a time; other weights. Every answer must be whole, and equal to what one of the
two models answers undisturbed. A refused connection is a problem like any other.

With --gaps it measures instead the time between two tokens of a stream: in `ALONE_S` without an
upgrade, while another server starts beside, and in an upgrade with a drain, of streams that began
before it. Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import re
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
import torch
from safetensors.torch import load_file, save_file

from minisgl.builtin import model_path
from minisgl_bench.report import write_json
from outlive import ASKS, ask
from own_server import Server

QUIET_S: Final = 20.0
"""How long the clients ask before the first upgrade: the longest gap without one."""

ALONE_S: Final = 8.0

LONG: Final = {
    "prompt": "one, two, three,", "max_tokens": 1900, "ignore_eos": True, "temperature": 1.0,
    "stream": True,
}  # fmt: skip
"""The request of `--gaps`: its answer takes longer than a start."""

JSON: Final = {"Content-Type": "application/json"}
FLAGS: Final = ("--num-pages", "4096", "--max-prefill-length", "128", "--dtype", "float32")

KEPT: Final = {"prompt": "one, two, three,", "max_tokens": 12, "temperature": 0}
"""The request on connections that stay open."""

MODES: Final[dict[str, list[str]]] = {
    "drain": ["--drain", "120"],
    "move": ["--drain", "0"],
    "one engine": ["--drain", "1", "--engines", "1"],
    "weights": ["--drain", "120"],
}


@dataclass(slots=True, kw_only=True)
class Result:
    """Mutable. gap_s: the longest time between two pieces of a stream, by mode; "none" is before
    the first upgrade. took_s: of each upgrade. by_model: answers of each model."""

    upgrades: Counter[str] = field(default_factory=Counter)
    answers: Counter[str] = field(default_factory=Counter)
    by_model: Counter[int] = field(default_factory=Counter)
    num_kept: int = 0
    num_resumed: int = 0
    gap_s: dict[str, float] = field(default_factory=dict)
    took_s: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


class Load:
    """Clients that ask until they are stopped. Mutable."""

    def __init__(self, url: str, whole: list[dict[str, Any]], result: Result) -> None:
        self.mode = "none"
        self._url, self._whole, self._result = url, whole, result
        self._lock = threading.Lock()
        self._is_over = threading.Event()

    @contextmanager
    def running(self, num_clients: int) -> Iterator[None]:
        bodies: list[Callable[[int], None]] = [self._ask, self._keep]
        threads = [
            threading.Thread(target=bodies[index % 2], args=(index,))
            for index in range(2 * num_clients)
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._is_over.set()
            for thread in threads:
                thread.join()

    def _ask(self, index: int) -> None:
        rng = random.Random(index)
        while not self._is_over.is_set():
            name, mode = rng.choice(sorted(ASKS)), self.mode
            answer = ask(self._url, name)
            differences = [answer.difference(whole[name]) for whole in self._whole]
            with self._lock:
                result = self._result
                result.answers[name] += 1
                result.num_resumed += bool(answer.num_resumed)
                if name != "whole":  # which comes at once
                    result.gap_s[mode] = max(result.gap_s.get(mode, 0.0), answer.longest_s)
                self._count(f"{mode}, {name}", differences)

    def _keep(self, index: int) -> None:
        with httpx.Client(base_url=self._url, timeout=200) as client:
            while not self._is_over.is_set():
                mode = self.mode
                try:
                    said = client.post("/v1/completions", json=KEPT)
                    text = said.json()["choices"][0]["text"]
                    wrong = [text * (text != whole["kept"]) for whole in self._whole]
                except (httpx.HTTPError, KeyError) as error:
                    wrong = [f"{type(error).__name__}: {error}"] * 2
                with self._lock:
                    self._result.num_kept += 1
                    self._count(f"{mode}, kept", wrong)
                time.sleep(0.02)

    def _count(self, where: str, differences: list[str]) -> None:
        if "" in differences:
            self._result.by_model[differences.index("")] += 1
        else:
            self._result.problems.append(f"{where}: {' | '.join(differences)}"[:500])


def other_model(folder: Path) -> Path:
    """Write the built-in model with other weights into a new folder."""
    folder.mkdir()
    for path in model_path().iterdir():
        if path.is_file() and path.suffix != ".safetensors":
            (folder / path.name).write_bytes(path.read_bytes())
    generator = torch.Generator().manual_seed(0)
    for path in model_path().glob("*.safetensors"):
        weights = load_file(path)
        for name, weight in weights.items():
            if weight.is_floating_point():
                noise = torch.randn(weight.shape, generator=generator)
                weights[name] = (weight * (1 + 0.2 * noise)).to(weight.dtype)
        save_file(weights, folder / path.name)
    return folder


def undisturbed(url: str) -> dict[str, Any]:
    whole: dict[str, Any] = {name: ask(url, name) for name in ASKS}
    kept = httpx.post(f"{url}/v1/completions", json=KEPT, timeout=200).json()
    return {**whole, "kept": kept["choices"][0]["text"]}


def upgrade(server: Server, *words: str) -> str:
    """Upgrade, and return what the command says if it fails, else ""."""
    done = server.upgrade(*words)
    return f"exit code {done.returncode}: {done.stdout}" if done.returncode else ""


def run(num_rounds: int, num_clients: int, tp: int) -> Result:
    result = Result()
    with tempfile.TemporaryDirectory(prefix="outlive") as scratch:
        folder = Path(scratch) / "sockets"
        folder.mkdir()
        models = [str(model_path()), str(other_model(Path(scratch) / "other"))]
        flags = [*FLAGS, "--tp", str(tp), "--restart", "--served-model-name", "minisgl-builtin"]
        server = Server(folder, *flags, "--model", models[1])
        try:
            second = undisturbed(server.url)
            if wrong := upgrade(server, "--", "--model", models[0]):
                result.problems.append(wrong)
            whole, now = [undisturbed(server.url), second], 0
            load = Load(server.url, whole, result)
            with load.running(num_clients):
                time.sleep(QUIET_S)
                for number in range(num_rounds):
                    load.mode = mode = list(MODES)[number % len(MODES)]
                    now ^= mode == "weights"
                    more = ["--", "--model", models[now]] if mode == "weights" else []
                    begun = time.monotonic()
                    if wrong := upgrade(server, *MODES[mode], *more):
                        result.problems.append(f"upgrade {number} ({mode}): {wrong}")
                    result.upgrades[mode] += 1
                    result.took_s.append(round(time.monotonic() - begun, 1))
                    print(number, mode, result.took_s[-1], len(result.problems), flush=True)
        finally:
            code = server.close()
        result.problems += left_behind(code, folder, server.log)
    return result


def left_behind(code: int, folder: Path, log: str) -> list[str]:
    """Return what is wrong after a server's end: its exit code, files in its folder, its log."""
    left = list(folder.iterdir())
    problems = [f"exit code {code}, left: {left}"] if code or left else []
    return problems + re.findall(r"^.*Traceback[\s\S]{0,400}", log, re.MULTILINE)[:1]


class Streams:
    """Clients that read long streams until they are stopped. Mutable: it keeps the gaps.

    gaps: (end of the gap, its seconds, beginning of the stream).
    """

    def __init__(self, url: str, num: int) -> None:
        self.gaps: list[tuple[float, float, float]] = []
        self.problems: list[str] = []
        self._url, self._is_over = url, threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(num)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        host = self._url.removeprefix("http://")
        while not self._is_over.is_set():
            connection = http.client.HTTPConnection(host, timeout=200)
            begun, heard_at, line = time.monotonic(), 0.0, b""
            connection.request("POST", "/v1/completions", json.dumps(LONG), JSON)
            answer = connection.getresponse()
            for read in answer:
                if self._is_over.is_set():
                    break
                if not read.startswith(b"data: "):
                    continue
                now, line = time.monotonic(), read
                if heard_at:
                    self.gaps.append((now, now - heard_at, begun))
                heard_at = now
            if not self._is_over.is_set() and line != b"data: [DONE]\n":
                self.problems.append(f"a stream ended with {line!r}")
            connection.close()

    @contextmanager
    def phase(self, found: list[dict[str, float]], *, only_old: bool = False) -> Iterator[None]:
        """Add the gaps within the block to `found`, and when the longest began. only_old: of
        streams that began before the block."""
        first = time.monotonic()
        yield
        last = time.monotonic()
        its = [each for each in self.gaps if first <= each[0] <= last]
        gaps = sorted(
            (gap, end - gap - first) for end, gap, begun in its if begun < first or not only_old
        )
        parts = {"longest_s": 1.0, "p999_s": 0.999, "p99_s": 0.99, "median_s": 0.5}
        last_index = len(gaps) - 1
        at = {name: gaps[min(int(len(gaps) * p), last_index)][0] for name, p in parts.items()}
        counts = {"longest_at_s": gaps[-1][1], "seconds": last - first, "num_gaps": len(gaps)}
        found.append({name: round(value, 4) for name, value in (at | counts).items()})
        print(found[-1], flush=True)


def measure_gaps(num_rounds: int, num_streams: int) -> dict[str, Any]:
    found: dict[str, Any] = {"alone": [], "another server": [], "upgrade": [], "problems": []}
    with tempfile.TemporaryDirectory(prefix="outlive") as scratch:
        folder, beside = Path(scratch) / "sockets", Path(scratch) / "beside"
        folder.mkdir()
        beside.mkdir()
        server = Server(folder, *FLAGS, "--restart")
        streams = Streams(server.url, num_streams)
        try:
            for _ in range(num_rounds):
                time.sleep(ALONE_S / 4)  # the streams begin
                with streams.phase(found["alone"]):
                    time.sleep(ALONE_S)
                with streams.phase(found["another server"]):
                    other = Server(beside, *FLAGS)
                other.close()
                time.sleep(ALONE_S / 4)
                with streams.phase(found["upgrade"], only_old=True):
                    wrong = upgrade(server, *MODES["drain"])
                found["problems"] += [wrong] * bool(wrong)
        finally:
            streams.stop()
            server.close()
    found["problems"] += streams.problems
    return found


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--clients", type=int, default=4, help="of each sort (default: 4)")
    parser.add_argument("--tp", type=int, default=1, help="ranks (default: %(default)s)")
    parser.add_argument("--gaps", action="store_true", help="measure the time between tokens")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results")
    args = parser.parse_args(argv)
    if args.gaps:
        found = measure_gaps(args.rounds, args.clients)
    else:
        result = run(args.rounds, args.clients, args.tp)
        found = {name: getattr(result, name) for name in Result.__slots__}
    print(json.dumps(found, indent=1))
    if args.json:
        write_json(args.json, found)
    return int(bool(found["problems"]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
