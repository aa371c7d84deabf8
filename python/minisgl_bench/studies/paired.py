"""Compares two checkouts in interleaved rounds, through `LLM.generate` or through HTTP.

`paired OLD NEW`: each checkout gets a process with one `LLM`, or a server, that lives to the end. A
round gives both the same fresh ids, one after the other; odd rounds swap the order. A workload's
result is the geometric mean of the rounds' ratios new/old (below 1 the new one is faster) with a
bootstrap confidence interval of 95 %. On a GPU it compares wall seconds. On a CPU it compares CPU
seconds of the checkout's processes, because wall seconds change with other load. The first round is
not counted. Over HTTP both are asked by this checkout's client.

The exit status is 1 if the greedy answers to a few prompts differ. For each workload of
`LLM.generate` it also prints how many answers are equal: other chunk sizes may round near ties in
another way.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from minisgl.errors import ConfigError
from minisgl_bench.arguments import above_zero, add_json, benchmark_parser, natural
from minisgl_bench.checkpoint import write_checkpoint
from minisgl_bench.lengths import Workload, workloads
from minisgl_bench.offline import GREEDY, TINY_SCALE
from minisgl_bench.report import machine_load, write_json
from minisgl_bench.shapes import SHAPES
from minisgl_bench.studies.paired_server import server_worker

WORKER = Path(__file__).parent / "paired_worker.py"
SIDES = ("old", "new")
PAGE_SIZE = 16
NUM_RESAMPLES = 10_000
LLM_WORKLOADS = "throughput,single,prefill,shared"
HTTP_WORKLOADS = "throughput,streams,single,mixed"


def main(argv: Sequence[str]) -> int:
    parser = benchmark_parser(__name__, __doc__)
    add = parser.add_argument
    add("old", type=_root, help="root of the checkout to compare with")
    add("new", type=_root, help="root of the other checkout")
    add("--shape", choices=SHAPES, default="qwen3-0.6b", help="shape of the model")
    add("--door", choices=("llm", "http"), default="llm", help="LLM.generate, or a server")
    add(
        "--workloads",
        help=f"with commas (default: {LLM_WORKLOADS}, over HTTP {HTTP_WORKLOADS})",
    )
    add("--rounds", type=natural, default=8, help="counted rounds, after one to warm up")
    add("--scale", type=above_zero, help="factor for all lengths (default: 1, tiny 1/16)")
    add("--clock", choices=("auto", "wall", "cpu"), default="auto", help="auto: cpu on a CPU")
    add("--dtype", default="auto", help="for both LLMs, like the next four")
    add("--num-pages", type=natural, default=None, help="default: what the workloads need")
    add("--max-prefill-length", type=natural, default=None, help="default: each checkout's own")
    add(
        "--threads",
        type=natural,
        default=None,
        help="OMP_NUM_THREADS (default: each checkout chooses)",
    )
    add(
        "--dummy-weight",
        action="store_true",
        help="each checkout makes its own random weights, without a file",
    )
    add("--new-flags", default="", metavar="FLAGS", help="http: more flags for NEW's server alone")
    add("--client-processes", type=natural, default=4, help="http: processes of the client")
    add_json(parser)
    args = parser.parse_args(argv)
    if args.new_flags and args.door == "llm":
        parser.error("--new-flags are a server's: add --door http")
    scale = args.scale or (TINY_SCALE if args.shape == "tiny" else 1.0)
    names = args.workloads or (LLM_WORKLOADS if args.door == "llm" else HTTP_WORKLOADS)
    works = [work.scaled(scale) for work in workloads(names)]
    # Pages, not memory_ratio: that is a share of the free memory, and the first LLM leaves less.
    pages = args.num_pages or num_pages(works)
    settings = {"dtype": args.dtype, "page_size": PAGE_SIZE, "num_pages": pages}
    if args.max_prefill_length:
        settings["max_prefill_length"] = args.max_prefill_length
    if args.dummy_weight:
        settings["dummy_weight"] = True

    roots = {"old": args.old, "new": args.new}
    values, load = SHAPES[args.shape], machine_load()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        write_checkpoint(Path(folder), values, weights=not args.dummy_weight)
        workers: dict[str, Worker] = {}
        for side, root in roots.items():
            opened = _open(side, root, Path(folder), settings, args)
            workers[side] = stack.enter_context(opened)
        clock = args.clock
        if clock == "auto":
            clock = "wall" if torch.cuda.is_available() else "cpu"
        equal = _greedy_equal(workers, values["vocab_size"])
        rows = measure(workers, works, args.rounds, f"{clock}_s", values["vocab_size"])
    same = "equal" if equal else "DIFFERENT"
    print(f"greedy answers to {len(GREEDY.requests)} prompts: {same}")
    if args.json:
        result = {"load_before": load, "shape": args.shape, "clock": clock, "scale": scale}
        result |= {"door": args.door, "settings": settings, "greedy_equal": equal}
        result |= {"new_flags": args.new_flags} if args.new_flags else {}
        commits = {side: _commit(root) for side, root in roots.items()}
        write_json(args.json, {**result, "commits": commits, "rows": rows})
    return 0 if equal else 1


def _open(
    side: str, root: Path, folder: Path, settings: Mapping[str, Any], args: argparse.Namespace
) -> AbstractContextManager[Worker]:
    environment = _environment(root, args.threads)
    if args.door == "llm":
        return llm_worker(side, root, folder, settings, environment)
    flags = shlex.split(args.new_flags) if side == "new" else []
    return server_worker(environment, folder, [*_flags(settings), *flags], args.client_processes)


def _root(text: str) -> Path:
    root = Path(text).absolute()
    if not (root / "python" / "minisgl" / "__init__.py").exists():
        raise argparse.ArgumentTypeError(
            f"{text} is not the root of a checkout: it has no python/minisgl"
        )
    return root


def num_pages(works: Sequence[Workload]) -> int:
    """Return the pages that the largest workload needs, with room for each request's last page."""
    tokens = [
        work.shared
        + sum(prompt - work.shared + output + 2 * PAGE_SIZE for prompt, output in work.requests)
        for work in (*works, GREEDY)
    ]
    return math.ceil(max(tokens) / PAGE_SIZE) + 1


class Worker(Protocol):
    """One checkout, through one door."""

    def run(self, work: Workload, prompts: list[list[int]]) -> dict[str, Any]:
        """Run the workload. Returns {"wall_s", "cpu_s"} and the door's other results."""

    def answers(self, work: Workload, prompts: list[list[int]]) -> Any:
        """Return all answers, to compare."""


class LLMWorker:
    """A process with the `LLM` of one checkout."""

    def __init__(self, side: str, process: subprocess.Popen[str]) -> None:
        self._side, self._process = side, process
        self.package = Path(self._reply()["package"])

    def run(self, work: Workload, prompts: list[list[int]]) -> dict[str, Any]:
        """Run the workload. Returns {"wall_s", "cpu_s", "ids"}. Raises ConfigError if the process
        ended."""
        outputs = [output for _, output in work.requests]
        assert self._process.stdin
        request = {"prompts": prompts, "outputs": outputs, "temperature": work.temperature}
        with suppress(BrokenPipeError):  # _reply raises the error
            print(json.dumps(request), file=self._process.stdin, flush=True)
        return self._reply()

    def answers(self, work: Workload, prompts: list[list[int]]) -> Any:
        return self.run(work, prompts)["ids"]

    def _reply(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            raise ConfigError(
                f"the process of the {self._side} checkout ended with exit status {code}; its "
                "error is above"
            )
        reply: dict[str, Any] = json.loads(line)
        return reply


@contextmanager
def llm_worker(
    side: str, root: Path, folder: Path, settings: Mapping[str, Any], environment: dict[str, str]
) -> Iterator[LLMWorker]:
    """Start the process of a checkout. Raises ConfigError if it does not start."""
    process = subprocess.Popen(
        # -P: the modules beside the worker must not hide those of the standard library.
        [sys.executable, "-P", str(WORKER), str(folder), json.dumps(settings)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        started = LLMWorker(side, process)
        if root not in started.package.parents:
            raise ConfigError(f"the {side} checkout is {root}, but Python found {started.package}")
        yield started
    finally:
        process.kill()
        process.communicate()


def _environment(root: Path, threads: int | None) -> dict[str, str]:
    """Return the environment of a checkout's process: PYTHONPATH is its package, then the entries
    that hold no minisgl."""
    others = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    kept = [path for path in others if not (Path(path) / "minisgl").exists()]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root / "python"), *kept])}
    return environment | ({"OMP_NUM_THREADS": str(threads)} if threads else {})


def _flags(settings: Mapping[str, Any]) -> list[str]:
    """Return a server's flags for keywords of `LLM`."""
    flags = []
    for name, value in settings.items():
        flags += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return flags


def _greedy_equal(workers: Mapping[str, Worker], vocab_size: int) -> bool:
    prompts = GREEDY.prompts(vocab_size, seed=1 << 31)
    old, new = (workers[side].answers(GREEDY, prompts) for side in SIDES)
    return bool(old == new)


def measure(
    workers: Mapping[str, Worker],
    works: Sequence[Workload],
    num_rounds: int,
    clock: str,
    vocab_size: int,
) -> list[dict[str, Any]]:
    """Run the rounds. clock: "wall_s" or "cpu_s". Returns a row for each workload."""
    times: dict[str, list[tuple[float, float]]] = {work.name: [] for work in works}
    equal = dict.fromkeys(times, 0)
    latencies: dict[str, dict[str, list[Any]]] = {
        name: {side: [] for side in SIDES} for name in times
    }
    for number in range(num_rounds + 1):
        order = SIDES if number % 2 else SIDES[::-1]
        for work in works:
            prompts = work.prompts(vocab_size, seed=number)
            replies = {side: workers[side].run(work, prompts) for side in order}
            old, new = (replies[side] for side in SIDES)
            times[work.name].append((old[clock], new[clock]))
            if "ids" in new:
                equal[work.name] += sum(map(list.__eq__, old["ids"], new["ids"]))
            elif number:
                for side in SIDES:
                    latencies[work.name][side].append(replies[side]["latencies"])
    rows = []
    for work in works:
        (first_old, first_new), *counted = times[work.name]
        ratio, low, high = interval([new / old for old, new in counted])
        per_token = 1e6 / work.tokens
        medians = np.median(counted, axis=0)
        shown: dict[str, Any]
        if latencies[work.name]["new"]:
            shown = {side: _medians(latencies[work.name][side]) for side in SIDES}
            text = f"ms {shown}"
        else:
            answers = len(work.requests) * (num_rounds + 1)
            shown = {"equal_answers": equal[work.name], "answers": answers}
            text = f"{equal[work.name]} of {answers} answers equal"
        rows.append(
            {
                "workload": work.name,
                "requests": len(work.requests),
                "tokens": work.tokens,
                "ratio": round(ratio, 4),
                "ratio_low": round(low, 4),
                "ratio_high": round(high, 4),
                "us_per_token": [round(float(median) * per_token, 3) for median in medians],
                "first_s": [round(first_old, 4), round(first_new, 4)],
                "old_s": [round(old, 4) for old, _ in counted],
                "new_s": [round(new, 4) for _, new in counted],
                **shown,
            }
        )
        print(
            f"{work.name:<12} new/old {ratio:.4f} [{low:.4f}, {high:.4f}], {verdict(low, high)}; "
            f"{clock} a token {medians[0] * per_token:.2f} and {medians[1] * per_token:.2f} us; "
            f"first {first_old:.3f} and {first_new:.3f} s; {text}",
            flush=True,
        )
    return rows


def _medians(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the median of each number over the runs."""
    return {name: round(float(np.median([run[name] for run in runs])), 3) for name in runs[0]}


def interval(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Return the geometric mean and the ends of its 95 % bootstrap interval. Deterministic."""
    logs = np.log(ratios)
    picks = np.random.default_rng(0).integers(0, len(logs), (NUM_RESAMPLES, len(logs)))
    low, high = np.percentile(logs[picks].mean(axis=1), (2.5, 97.5))
    return float(np.exp(logs.mean())), float(np.exp(low)), float(np.exp(high))


def verdict(low: float, high: float) -> str:
    if low > 1:
        return "slower"
    return "faster" if high < 1 else "no difference seen"


def _commit(root: Path) -> str | None:
    done = subprocess.run(
        ["git", "-C", str(root), "rev-parse", "--short=12", "HEAD"],
        check=False,
        capture_output=True,
        text=True,
    )
    return done.stdout.strip() or None
