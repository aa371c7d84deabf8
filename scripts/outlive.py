"""Ends engines within answers, and compares each answer with one that nothing disturbed.

    python scripts/outlive.py [--rounds N] [--seed S] [--tp N | --routed] [--dtype T] [--json FILE]
    python scripts/outlive.py --shape NAME [--tokens N] [--faults NAMES] [--pages N] ...

The server has `--restart`, the built-in model and float32. First all kinds of requests are answered
undisturbed. In a round 1 to 32 of them are open at a time, and one worker is killed, stopped, or
its engine raises an error. Every answer must be whole and equal: text, calls, token ids, reasons,
usage, and log-probabilities but for rounding. Round i of seed S is the same in each run but for the
machine's timing. With another --dtype, or with a --shape, whose weights are random, the requests
are those of `near_ties`, and ids may differ at a near tie. --faults names the faults of the rounds,
in turn: `upgrade` is one in which both engines run, to an engine with --pages; behind it, `alone`
is one that ends the old engine first, because the memory does not hold two like that.

With --routed a router is before two servers without `--restart`. In a round 32 streams are open,
and a server or its engine is killed, or the server is asked to end; then it is started again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

import httpx
import psutil

import near_ties
from minisgl_bench.checkpoint import write_checkpoint
from minisgl_bench.report import write_json
from minisgl_bench.shapes import SHAPES
from own_server import START_S, Server, wait_until
from try_replicas import Process

HANG_S: Final = 2.0
HANG_OF_SHAPE_S: Final = 5.0  # a step may compile a kernel
ROUNDING: Final = 2e-3
"""The most by which a log-probability may differ: prompts and single tokens have other kernels."""

BREAKER: Final = """
import os
from minisgl.plugins import Row
from minisgl.runtime.observers import LoopObserver

ROWS = [Row("loop_observers", "breaker", "breaker:create")]

class Broken:
    def __init__(self, pending, error):
        self.pending, self.error = pending, error

    def wait(self):
        self.pending.wait()
        raise self.error

class Breaker(LoopObserver):
    def executor(self, executor):
        self.executor = executor
        return self

    def launch(self, plan):
        flight = self.executor.launch(plan)
        for error in (RuntimeError("broken on purpose"), MemoryError("none on purpose")):
            path = os.environ["BREAKER"] + type(error).__name__
            try:
                os.rename(path, path + ".done")
            except OSError:
                continue
            flight.pending = Broken(flight.pending, error)
        return flight

def create(args, rank):
    return Breaker()
"""
"""A plugin whose engine raises an error as soon as a file with its name exists."""
ERRORS: Final = {"error": "RuntimeError", "memory": "MemoryError"}

UPGRADES: Final = {
    "upgrade": ("both engines run", ["--drain", "120"]),
    "alone": ("one engine at a time", ["--drain", "1"]),
}
"""What the command says of the memory, and its flags."""

STORY: Final = [{"role": "user", "content": "Tell me a long story about a parrot \U0001f99c."}]
TOOL: Final = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city", "days"],
        },
    },
}
SCHEMA: Final = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 60},
        "tags": {"type": "array", "items": {"type": "string"}, "minItems": 4, "maxItems": 12},
    },
    "required": ["name", "tags"],
}
USAGE: Final = {"stream": True, "stream_options": {"include_usage": True}}
CHAT: Final = {"messages": STORY, "max_tokens": 250, "ignore_eos": True, **USAGE}
TEXT: Final = {"prompt": "one, two, three,", "max_tokens": 250, "ignore_eos": True, **USAGE}
LONG: Final = [37 + i * i % 150 for i in range(900)]
JSON_FORMAT: Final = {
    "type": "json_schema",
    "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True},
}
ASKS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "greedy": ("/v1/chat/completions", {**CHAT, "temperature": 0}),
    "seeded": ("/v1/chat/completions", {**CHAT, "seed": 3, "top_p": 0.95}),
    "tools": (
        "/v1/chat/completions",
        {**CHAT, "seed": 4, "tools": [TOOL], "tool_choice": "required", "ignore_eos": False},
    ),
    "schema": (
        "/v1/chat/completions",
        {**CHAT, "seed": 5, "response_format": JSON_FORMAT, "ignore_eos": False},
    ),
    "logprobs": (
        "/v1/chat/completions",
        {**CHAT, "seed": 6, "logprobs": True, "top_logprobs": 2, "temperature": 0.7},
    ),
    "two": ("/v1/chat/completions", {**CHAT, "seed": 7, "n": 2}),
    "whole": ("/v1/chat/completions", {**CHAT, "seed": 8, "stream": False, "stream_options": None}),
    "long": ("/v1/completions", {**TEXT, "prompt": LONG, "max_tokens": 60, "seed": 9}),
    "penalties": (
        "/v1/completions",
        {**TEXT, "seed": 10, "repetition_penalty": 1.2, "frequency_penalty": 0.3,
         "min_tokens": 120, "ignore_eos": False, "bad_words": ["the"]},
    ),
    "stop": ("/v1/completions", {**TEXT, "temperature": 0, "stop": ["twenty, twenty-one", "40,"]}),
    "echo": ("/v1/completions", {**TEXT, "seed": 12, "echo": True, "logprobs": 1,
                                 "prompt": LONG[:400], "max_tokens": 90}),
    "scored": (
        "/generate",
        {"input_ids": LONG[:500], "prompt_logprobs": 0, "max_tokens": 0, "stream": True},
    ),
    "ids": (
        "/generate",
        {"text": "Once", "max_tokens": 220, "seed": 14, "logprobs": True, "stream": True,
         "ignore_eos": True},
    ),
    "messages": (
        "/v1/messages",
        {"model": "minisgl-builtin", "messages": STORY, "max_tokens": 150, "temperature": 0,
         "stream": True},
    ),
    "ollama": (
        "/api/chat",
        {"model": "minisgl-builtin", "messages": STORY,
         "options": {"num_predict": 200, "seed": 16, "temperature": 1.0}},
    ),
}  # fmt: skip


@dataclass(slots=True, kw_only=True)
class Answer:
    """Mutable: pieces are added. texts: by place in the answer. numbers: log-probabilities.

    num_resumed: as the answer says. longest_s: the longest time between two pieces. is_refused: it
    came while the engine was starting.
    """

    texts: dict[str, str] = field(default_factory=dict)
    lists: dict[str, list[Any]] = field(default_factory=dict)
    numbers: list[float] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    num_resumed: int = 0
    num_comments: int = 0
    longest_s: float = 0.0
    error: str = ""
    is_refused: bool = False

    @property
    def ids(self) -> list[int]:
        return self.lists.get("/token_ids", [])

    def take(self, value: Any, place: str = "") -> None:
        """Add a piece: texts and lists grow, numbers of usage are kept."""
        if isinstance(value, dict):
            place += f"/{value['index']}" if "index" in value else ""
            for name, part in value.items():
                self._take(name, part, place)
        elif isinstance(value, list):
            for part in value:
                self.take(part, place)

    def _take(self, name: str, part: Any, place: str) -> None:
        if name == "timings":
            self.num_resumed = max(self.num_resumed, part.get("resumed", 0))
        elif name == "error":
            self.error = json.dumps(part)
        elif name in ("finish_reason", "stop_reason", "done_reason", "stop_match"):
            if part is not None:
                self.facts[f"{place}/{name}"] = part
        elif name.endswith("input_tokens"):
            pass  # how many of them are cached depends on the others
        elif name.endswith("_tokens") or name in ("eval_count", "prompt_eval_count"):
            self.facts[f"{place}/{name}"] = part
        elif name in ("logprob", "token_logprobs", "logprobs") and isinstance(part, float | list):
            self.numbers += [
                n for n in (part if isinstance(part, list) else [part]) if n is not None
            ]
        elif name in ("token_ids", "tokens", "text_offset", "bytes") and isinstance(part, list):
            self.lists.setdefault(f"{place}/{name}", []).extend(part)
        elif name in ("content", "text", "reasoning_content", "arguments", "name", "partial_json"):
            if isinstance(part, str):
                where = f"{place}/{name}"
                self.texts[where] = self.texts.get(where, "") + part
            else:
                self.take(part, place)
        elif name not in ("top_logprobs", "prompt_tokens_details", "completion_tokens_details"):
            is_place = name in ("usage", "choices", "tool_calls")
            self.take(part, f"{place}/{name}" if is_place else place)

    def difference(self, other: Answer) -> str:
        """Return what differs from an undisturbed answer, or ""."""
        if self.error:
            return self.error
        for name in ("texts", "lists", "facts"):
            mine, its = getattr(self, name), getattr(other, name)
            if mine != its:
                where = [key for key in mine | its if mine.get(key) != its.get(key)]
                key = where[0]
                return f"{name} {where}: {mine.get(key)!r} instead of {its.get(key)!r}"
        if len(self.numbers) != len(other.numbers):
            return f"{len(self.numbers)} log-probabilities instead of {len(other.numbers)}"
        return f"log-probabilities by {off}" if (off := self.rounding(other)) > ROUNDING else ""

    def rounding(self, other: Answer) -> float:
        pairs = zip(self.numbers, other.numbers, strict=True)
        return max((abs(a - b) for a, b in pairs), default=0.0)


class Whole:
    """The undisturbed answers to `asks`, and how others are compared with them.

    dtype: by whose rounding ids may differ; "" if none may.
    """

    def __init__(self, url: str, dtype: str, asks: near_ties.Asks = ASKS) -> None:
        self.asks = asks
        with ThreadPoolExecutor(len(asks) if dtype else 1) as threads:
            found = threads.map(lambda name: ask(url, name, asks), asks)
            self.answers = dict(zip(asks, found, strict=True))
        self.ties: near_ties.NearTies | None = None
        if dtype:
            pairs = {name: (answer.ids, answer.numbers) for name, answer in self.answers.items()}
            self.ties = near_ties.NearTies(url, dtype, pairs)

    def difference(self, name: str, answer: Answer) -> str:
        """Return what differs, or ""."""
        whole = self.answers[name]
        if self.ties is None or answer.error:
            return answer.difference(whole)
        if answer.facts != whole.facts:
            return f"{answer.facts} instead of {whole.facts}"
        return self.ties.difference(name, answer.ids, answer.numbers)


def ask(url: str, name: str, asks: near_ties.Asks = ASKS) -> Answer:
    """Return the answer. A request that comes while the engine starts is sent again."""
    while (answer := _ask(url, name, asks)).is_refused:
        time.sleep(0.2)
    return answer


def _ask(url: str, name: str, asks: near_ties.Asks) -> Answer:
    answer, heard_at = Answer(), time.monotonic()
    path, body = asks[name]
    is_ended = False
    try:
        with httpx.stream("POST", url + path, json=body, timeout=200) as response:
            for line in response.iter_lines():
                now = time.monotonic()
                answer.longest_s, heard_at = max(answer.longest_s, now - heard_at), now
                answer.num_comments += line.startswith(":")
                if line.startswith(":") and path == "/api/chat":
                    answer.error = "a comment between lines of JSON"
                data = line.removeprefix("data: ")
                is_ended |= data == "[DONE]" or "message_stop" in data or '"done":true' in data
                if data.startswith("{"):
                    answer.take(json.loads(data))
            answer.is_refused = response.status_code == 503
            if response.status_code != 200:
                answer.error = answer.error or f"HTTP {response.status_code}"
    except httpx.HTTPError as error:
        answer.error = f"{type(error).__name__}: {error}"
    if not (is_ended or name == "whole" or path == "/generate"):
        answer.error = answer.error or "cut off"
    return answer


@dataclass(slots=True, kw_only=True)
class Result:
    """Mutable. resumed: answers that another engine went on with, by kind. excess_s: by fault, the
    longest pause of a stream beyond the server's time of that start: it noticed the fault, and
    computed the tokens again; of an upgrade, the longest time between two pieces. num_ties: answers
    that differ at a near tie.
    """

    seed: int
    tp: int
    faults: Counter[str] = field(default_factory=Counter)
    answers: Counter[str] = field(default_factory=Counter)
    resumed: Counter[str] = field(default_factory=Counter)
    num_comments: int = 0
    excess_s: dict[str, float] = field(default_factory=dict)
    rounding: float = 0.0
    num_ties: int = 0
    problems: list[str] = field(default_factory=list)


def faults_of(workers: dict[str, int], asked: Sequence[str]) -> list[tuple[str, str]]:
    """Return each fault, and the worker that has it. asked: faults of the engine; () is all."""
    if asked:
        return [(kind, "engine") for kind in asked]
    names = sorted(workers, key=lambda name: (not name.startswith("engine"), name))
    named = [(kind, name) for name in names for kind in ("kill", "stop")]
    return [*named[:1], *((kind, "engine") for kind in ERRORS), *named[1:]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What the flags say. num_streams: one of them in each round."""

    dtype: str = "float32"
    shape: str | None = None
    num_tokens: int = 200
    faults: Sequence[str] = ()
    num_streams: Sequence[int] = (1, 2, 4, 8, 16, 32)
    pages: int = 4096


def one_round(
    server: Server, number: int, whole: Whole, breaker: Path, result: Result, wishes: Wishes
) -> None:
    rng = random.Random(result.seed * 100_003 + number)
    workers, num_starts = server.workers(), server.num_starts
    faults = faults_of(workers, wishes.faults)
    fault, worker = faults[number % len(faults)]
    names = rng.choices(sorted(whole.answers), k=rng.choice(wishes.num_streams))
    answers: list[tuple[str, Answer]] = []
    is_over = threading.Event()

    def run(name: str) -> None:
        while True:
            answers.append((name, ask(server.url, name, whole.asks)))
            if fault not in UPGRADES or is_over.is_set():  # a new server takes long to start
                return

    threads = [threading.Thread(target=run, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    time.sleep(rng.random() * (0.2 + 0.08 * len(names)))
    if fault in ERRORS:
        breaker.with_name(f"break{ERRORS[fault]}").touch()
    elif fault in UPGRADES:
        expected, words = UPGRADES[fault]
        done = server.upgrade(*words, "--", "--num-pages", str(wishes.pages))
        if done.returncode or expected not in done.stdout:
            result.problems.append(f"round {number} ({fault}): not {expected}: {done.stdout}")
    else:
        os.kill(workers[worker], signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
    is_over.set()
    for thread in threads:
        thread.join()
    result.faults[f"{fault} {worker}"] += 1
    for name, answer in answers:
        compare(f"round {number} ({fault} {worker}), {name}", name, answer, whole, result)
    if fault in ERRORS:  # the engine may have been idle
        ask(server.url, "ids")
    goes_on = fault in UPGRADES or (fault == "memory" and result.tp == 1)
    if not wait_until(lambda: server.num_starts == num_starts + (not goes_on) and server.is_idle()):
        result.problems.append(f"round {number} ({fault} {worker}): not ready and idle again")
    starts = re.findall(r"started again after (\S+) s", server.log)
    start_s = 0.0 if goes_on else float(starts[-1])
    pauses = [
        answer.longest_s - start_s
        for name, answer in answers
        if (answer.num_resumed or fault in UPGRADES) and name != "whole"  # which comes at once
    ]
    result.excess_s[fault] = max([result.excess_s.get(fault, 0.0), *pauses])


def run(num_rounds: int, seed: int, tp: int, wishes: Wishes | None = None) -> Result:
    result, wishes = Result(seed=seed, tp=tp), wishes or Wishes()
    dtype, shape = wishes.dtype, wishes.shape
    with tempfile.TemporaryDirectory(prefix="outlive") as scratch:
        plugin, folder = Path(scratch) / "plugin", Path(scratch) / "sockets"
        (plugin / "breaker-1.dist-info").mkdir(parents=True)
        folder.mkdir()
        (plugin / "breaker.py").write_text(BREAKER)
        about = plugin / "breaker-1.dist-info"
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: breaker\nVersion: 1\n")
        (about / "entry_points.txt").write_text("[minisgl.plugins]\nbreaker = breaker\n")
        breaker = Path(scratch) / "break"
        paths = [str(plugin), *filter(None, [os.environ.get("PYTHONPATH")])]
        os.environ |= {"PYTHONPATH": os.pathsep.join(paths), "BREAKER": str(breaker)}
        flags = ["--num-pages", "4096", "--max-prefill-length", "128", "--dtype", dtype]
        flags += ["--hang-timeout", str(HANG_OF_SHAPE_S if shape else HANG_S), "--tp", str(tp)]
        if shape:
            write_checkpoint(Path(scratch) / shape, SHAPES[shape], weights=False)
            flags += ["--model", str(Path(scratch) / shape), "--dummy-weight"]
        begun = time.monotonic()
        server = Server(folder, *flags, "--restart", "--max-restarts", "10000")
        try:
            if shape or dtype != "float32":
                whole = Whole(server.url, dtype, near_ties.longer(wishes.num_tokens))
            else:
                whole = Whole(server.url, "")
            for name, answer in whole.answers.items():
                if answer.error or not (answer.texts or answer.numbers):
                    result.problems.append(f"undisturbed, {name}: {answer}")
            for number in range(num_rounds):
                one_round(server, number, whole, breaker, result, wishes)
                print(number, len(result.problems), f"{time.monotonic() - begun:.0f} s", flush=True)
            result.num_ties = len(whole.ties.seen.ties) if whole.ties else 0
        finally:
            server.close()
    return result


ENDS: Final = ("kill server", "kill engine", "end server")


def run_routed(num_rounds: int, seed: int) -> Result:
    result = Result(seed=seed, tp=1)
    flags = ["--num-pages", "4096", "--max-prefill-length", "128", "--dtype", "float32"]
    flags += ["--drain-timeout", "0"]
    names = [name for name in sorted(ASKS) if name != "ollama"]
    with tempfile.TemporaryDirectory(prefix="outlive") as scratch, contextlib.ExitStack() as stack:
        servers = [Process(Path(scratch), "serve", *flags) for _ in range(2)]
        urls = [part for server in servers for part in ("--replica", server.url)]
        router = Process(Path(scratch), "route", *urls)
        for process in (*servers, router):
            stack.callback(process.end)
            process.wait_ready()
        whole = Whole(servers[0].url, "", {name: ASKS[name] for name in names})
        for number in range(num_rounds):
            if not wait_until(lambda: httpx.get(f"{router.url}/health").json()["up"] == 2):
                result.problems.append(f"round {number}: no two servers are up")
            rng = random.Random(seed * 100_003 + number)
            fault, server = ENDS[number % len(ENDS)], servers[rng.randrange(2)]
            asked = rng.choices(names, k=32)
            with ThreadPoolExecutor(len(asked)) as threads:
                waiting = [threads.submit(ask, router.url, name) for name in asked]
                time.sleep(1 + rng.random() * 4)
                if fault == "kill engine":
                    psutil.Process(engine_of(server)).kill()
                else:
                    server.process.send_signal(
                        signal.SIGKILL if fault == "kill server" else signal.SIGTERM
                    )
            result.faults[fault] += 1
            for name, each in zip(asked, waiting, strict=True):
                compare(f"round {number} ({fault}), {name}", name, each.result(), whole, result)
            server.process.wait(START_S)
            server.start()
            server.wait_ready()
    return result


def engine_of(server: Process) -> int:
    """Return the process id of the server's engine: its worker with most memory."""
    workers = psutil.Process(server.process.pid).children()
    return int(max(workers, key=lambda worker: worker.memory_info().rss).pid)


def compare(where: str, name: str, answer: Answer, whole: Whole, result: Result) -> None:
    """Count an answer, and compare it with the undisturbed one of this name."""
    result.answers[name] += 1
    result.resumed[name] += bool(answer.num_resumed)
    result.num_comments += answer.num_comments
    if different := whole.difference(name, answer):
        result.problems.append(f"{where}: {different}")
    elif not whole.ties:
        result.rounding = max(result.rounding, answer.rounding(whole.answers[name]))


def as_json(result: Result) -> dict[str, Any]:
    return {each.name: getattr(result, each.name) for each in fields(result)}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=14, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--tp", type=int, default=1, help="ranks (default: %(default)s)")
    parser.add_argument("--dtype", default="float32", help="default: %(default)s")
    parser.add_argument("--routed", action="store_true", help="a router and two servers")
    parser.add_argument("--shape", choices=SHAPES, help="of a model with random weights")
    parser.add_argument("--tokens", type=int, default=200, help="of an answer (default: 200)")
    parser.add_argument(
        "--streams", type=int, metavar="N", help="open at a time (default: 1 to 32)"
    )
    parser.add_argument("--faults", help=f"with commas: kill, stop, {', '.join(ERRORS | UPGRADES)}")
    parser.add_argument("--pages", type=int, default=4096, help="of the engine behind an upgrade")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results")
    args = parser.parse_args(argv)
    if args.routed:
        result = run_routed(args.rounds, args.seed)
    else:
        wishes = Wishes(
            dtype=args.dtype,
            shape=args.shape,
            num_tokens=args.tokens,
            faults=args.faults.split(",") if args.faults else (),
            num_streams=[args.streams] if args.streams else Wishes().num_streams,
            pages=args.pages,
        )
        result = run(args.rounds, args.seed, args.tp, wishes)
    print(json.dumps(as_json(result), indent=1))
    if args.json:
        write_json(args.json, as_json(result))
    return int(bool(result.problems))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
