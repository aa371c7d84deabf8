"""The cost of HTTP: a server's real processes over a device of known speed, beside it offline.

The API server, the tokenizer, the detokenizer and the scheduler are those of a server; only the
executor computes no model: a step takes `--step-ms`. The offline run is the same scheduler over the
same executor, without processes and sockets. If the machine has a core for each process, the share
that HTTP keeps is its throughput over that offline. Otherwise each process's CPU seconds give the
rate that it could reach with a core of its own.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from minisgl.benchmark.client import Target
from minisgl.builtin import model_path
from minisgl.core import SamplingParams
from minisgl.message import UserMsg, ids_to_bytes
from minisgl.runtime.args import RuntimeArgs
from minisgl.runtime.workers import Workers
from minisgl.scheduler import Scheduler, SchedulerConfig, run
from minisgl.scheduler.io import Message, SourceInbox, ZmqOutbox
from minisgl.scheduler.meter import LoopMeter
from minisgl.server.address import bind, url_of
from minisgl.server.args import ServerArgs
from minisgl.server.model import ServedModel
from minisgl.server.server import Server
from minisgl.tokenizer.tokenizer import load_tokenizer
from minisgl.utils.logger import setup_logging
from minisgl.utils.process import WorkerStatus
from minisgl.utils.zmq import Endpoints, PullQueue
from minisgl_bench import workload as workloads
from minisgl_bench.arguments import above_zero, add_json, benchmark_parser, natural
from minisgl_bench.fakes import ListInbox, ListOutbox, PacedExecutor
from minisgl_bench.online import token_span
from minisgl_bench.report import machine_load, write_json
from minisgl_bench.shards import run_whole

MODEL = "paced"
READY_S, STOP_S = 60.0, 20.0
CONTEXT, PAGE_SIZE = 4096, 16
VOCAB_SIZE = 1000  # ids of prompts; the built-in tokenizer has more


def main(argv: Sequence[str]) -> int:
    parser = benchmark_parser(__name__, __doc__)
    add = parser.add_argument
    # Qwen3-0.6B on one H200: 5.57 s in 1,036 steps (benchmarks/results/offline-qwen3-0.6b.json).
    add("--step-ms", type=above_zero, default=5.5, help="time of a step")
    add("--requests", type=natural, default=256, help="all at once")
    add("--input", type=token_span, default=(100, 1024), metavar="LOW:HIGH", help="prompt tokens")
    add("--output", type=token_span, default=(100, 1024), metavar="LOW:HIGH", help="answer tokens")
    add(
        "--api",
        choices=("completions", "chat", "generate"),
        default="completions",
        help="the endpoint",
    )
    add("--client-processes", type=natural, default=1, help="processes of the client")
    add("--repeat", type=natural, default=3, help="runs, after one to warm up")
    add_json(parser)
    args = parser.parse_args(argv)
    if args.input[1] + args.output[1] > CONTEXT:
        parser.error(f"--input and --output together are at most {CONTEXT:,} tokens")
    load = machine_load()
    work = _Work(args.requests, args.input, args.output)
    offline_s = offline(work, args.step_ms / 1e3)
    with paced_server(args.step_ms / 1e3, args.requests) as (url, processes):
        target = Target(url=url, model=MODEL, api=args.api)
        runs = [
            _measure(target, work, processes, offline_s, args.client_processes, seed)
            for seed in range(args.repeat + 1)
        ][1:]
    result = {
        "kind": "http",
        "load_before": load,
        "step_ms": args.step_ms,
        "workload": {**work.of(0).notes, "requests": args.requests, "api": args.api},
        "offline_s": round(offline_s, 4),
        "runs": runs,
    }
    _show(result)
    if args.json:
        write_json(args.json, result)
    return 0


@dataclass(frozen=True, slots=True)
class _Work:
    """Workloads whose lengths are the same for every seed. The ids differ, so no prompt comes
    twice."""

    requests: int
    inputs: tuple[int, int]
    outputs: tuple[int, int]

    def of(self, seed: int) -> workloads.Workload:
        work = workloads.random_requests(
            self.requests, self.inputs, self.outputs, VOCAB_SIZE, seed=0
        )
        turns = [turn for session in work.sessions for turn in session.turns]
        prompts = [(turn.ids + seed * 37) % VOCAB_SIZE for turn in turns]
        sessions = workloads.at_once(prompts, [turn.max_tokens for turn in turns])
        return workloads.Workload(sessions=sessions, notes=work.notes)


def offline(work: _Work, step_s: float) -> float:
    """Return the seconds that the scheduler and the device need alone."""
    scheduler = Scheduler(_scheduler_config(work.requests))
    messages = [
        UserMsg(
            uid=uid,
            ids=ids_to_bytes(turn.ids),
            sampling=SamplingParams(temperature=0.0, max_tokens=turn.max_tokens, ignore_eos=True),
        )
        for uid, session in enumerate(work.of(0).sessions)
        for turn in session.turns
    ]
    inbox = ListInbox([messages], more=lambda: [] if scheduler.runnable else None)
    start = time.perf_counter()
    run(scheduler, PacedExecutor(step_s, [7]), inbox, ListOutbox())
    return time.perf_counter() - start


def _scheduler_config(num_running: int) -> SchedulerConfig:
    return SchedulerConfig(
        num_pages=num_running * CONTEXT // PAGE_SIZE,
        page_size=PAGE_SIZE,
        max_seq_len=CONTEXT,
        vocab_size=VOCAB_SIZE,
        eos_ids=frozenset(),
        max_prefill_tokens=8192,  # a GPU's; with a step of one length it only counts steps
        max_running=num_running,
    )


# --- the server --------------------------------------------------------------------------------


class _PacedWorkers(Workers):
    """The workers of a server, whose engine runs its plans on a device of known speed."""

    def __init__(self, step_s: float, num_running: int) -> None:
        super().__init__()
        self._step_s, self._num_running = step_s, num_running

    def start_engine(self, args: RuntimeArgs) -> None:
        body = partial(_paced_engine, self.endpoints, self._step_s, self._num_running)
        self._start("scheduler", body)


def _paced_engine(
    endpoints: Endpoints, step_s: float, num_running: int, status: WorkerStatus
) -> None:
    inbox, outbox = SourceInbox(PullQueue(endpoints.scheduler, Message)), ZmqOutbox(endpoints)
    executor = PacedExecutor(step_s, _words())
    meter = LoopMeter(on_report=[outbox.pass_on])
    status.ready({})
    run(Scheduler(_scheduler_config(num_running)), executor, inbox, outbox, meter=meter)


def _words() -> list[int]:
    """Return the ids of the built-in tokenizer that are text by themselves, as most ids are."""
    make = load_tokenizer(model_path()).stream
    texts = ((id_, make(skip_special_tokens=True).feed(id_)) for id_ in range(VOCAB_SIZE))
    return [id_ for id_, text in texts if text.strip().isalpha()]


@contextmanager
def paced_server(step_s: float, num_running: int) -> Iterator[tuple[str, dict[str, int]]]:
    """Yield the URL of a running server, and the pid of each of its processes by name."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    server = context.Process(target=_api, args=(step_s, num_running, there))
    server.start()
    there.close()
    try:
        if not here.poll(READY_S):
            raise TimeoutError(f"the server was not ready after {READY_S:g} s")
        url, pids = here.recv()
        assert server.pid
        yield url, {"api": server.pid, **pids}
    finally:
        server.terminate()
        server.join(STOP_S)
        if server.exitcode is None:
            server.kill()


def _api(step_s: float, num_running: int, pipe: Connection) -> None:
    setup_logging("server", level="warning")
    args = ServerArgs()
    workers = _PacedWorkers(step_s, num_running)
    model = ServedModel(
        names=(MODEL,), defaults=SamplingParams(temperature=0.0), created=0, folder=model_path()
    )
    try:
        workers.start_engine(args)
        workers.start_text(model_path(), args.num_tokenizer)
        with bind("127.0.0.1", 0) as bound:
            server = Server(workers, bound, model, args)
            workers.wait_ready()
            signal.signal(signal.SIGTERM, lambda *_: server.stop())
            pids = {worker.name: worker.process.pid for worker in workers.processes}
            asyncio.run(server.serve(lambda: pipe.send((url_of(bound), pids))))
    finally:
        workers.end()


# --- measuring ---------------------------------------------------------------------------------


def _measure(
    target: Target,
    work: _Work,
    processes: dict[str, int],
    offline_s: float,
    num_clients: int,
    seed: int,
) -> dict[str, Any]:
    before = {name: _cpu_s(pid) for name, pid in processes.items()}
    summary, client_s = run_whole(target, work.of(seed).sessions, num_clients)
    cpu_s = {name: _cpu_s(pid) - before[name] for name, pid in processes.items()}
    cpu_s |= {"client": sum(client_s)}
    tokens = summary["num_output_tokens"]
    per_core = {name: round(tokens / max(seconds, 0.01)) for name, seconds in cpu_s.items()}
    alone = tokens / offline_s
    # The client is many processes where it must be; each of the others is one.
    slowest = min(value for name, value in per_core.items() if name != "client")
    return {
        "offline_tokens_per_s": round(alone),
        "share_kept": round(offline_s / summary["duration_s"], 4),
        "cpu_s": {name: round(seconds, 3) for name, seconds in cpu_s.items()},
        "tokens_per_core_s": per_core,
        "cores_for_offline_rate": round(sum(cpu_s.values()) / offline_s, 2),
        "share_with_a_core_each": round(min(slowest / alone, 1.0), 4),
        "summary": summary,
    }


def _cpu_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def _show(result: dict[str, Any]) -> None:
    runs = result["runs"]
    table = Table("process", "CPU seconds", "tokens per core-second", box=None)
    for name in runs[0]["cpu_s"]:
        seconds = statistics.median(run["cpu_s"][name] for run in runs)
        rate = statistics.median(run["tokens_per_core_s"][name] for run in runs)
        table.add_row(name, f"{seconds:.2f}", f"{rate:,.0f}")
    console = Console(highlight=False)
    console.print(table)
    for run_ in runs:
        summary = run_["summary"]
        console.print(
            f"{summary['output_tokens_per_s']:,.0f} tokens/s over HTTP, "
            f"{run_['offline_tokens_per_s']:,} offline: {run_['share_kept']:.1%} kept; ITL p50 "
            f"{summary['itl_ms']['p50']:.1f} p99 {summary['itl_ms']['p99']:.1f} ms; at the offline "
            f"rate {run_['cores_for_offline_rate']:.2f} cores are busy; with a core for each "
            f"process {run_['share_with_a_core_each']:.0%} would be kept"
        )
