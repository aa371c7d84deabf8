"""Runs the client in several processes, each with an event loop and a share of the sessions.

They begin at the same time of the machine's monotonic clock, which all processes share.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import queue
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from minisgl.benchmark.client import Target
from minisgl.benchmark.record import Record
from minisgl.errors import ConfigError
from minisgl_bench.sessions import Client, Session
from minisgl_bench.summary import Slo, summarize

START_IN_S = 0.1  # seconds from the readiness of all processes to the first request
REPORT_EVERY_S = 0.25


def run_whole(
    target: Target, sessions: list[Session], processes: int
) -> tuple[dict[str, Any], list[float]]:
    """Run sessions of which none may fail. Returns the summary of `summarize`, and the CPU seconds
    of each client process. Raises RuntimeError, with the first error.
    """
    records, cpu_s = run_sharded(target, sessions, concurrency=None, processes=processes)
    summary: dict[str, Any] = summarize(records, Slo())["summary"]
    if summary["num_failed"]:
        first = next(record.error for record in records if record.error)
        raise RuntimeError(f"{summary['num_failed']} of {len(records)} requests failed: {first}")
    return summary, cpu_s


def run_sharded(
    target: Target,
    sessions: Sequence[Session],
    *,
    concurrency: int | None,
    processes: int,
    on_progress: Callable[[int, int], None] = lambda requests, tokens: None,
) -> tuple[list[Record], list[float]]:
    """Return the records in order of sending, and the CPU seconds of each client process.

    Raises ConfigError when a conversation cannot be continued as asked, RuntimeError when a
    client process fails.
    """
    if target.api == "completions" and not target.text and any(len(s.turns) > 1 for s in sessions):
        raise ConfigError(
            "turns of token ids need the ids of the answers, which /v1/completions does not send: "
            "use --text, --api chat, or --api generate"
        )
    if concurrency is not None:
        processes = min(processes, concurrency)
    processes = max(1, min(processes, len(sessions)))
    numbered = list(enumerate(sessions))
    context = multiprocessing.get_context("spawn")
    reports: Any = context.Queue()
    pipes, children = [], []
    for index in range(processes):
        here, there = context.Pipe()
        share = (
            None
            if concurrency is None
            else concurrency // processes + (index < concurrency % processes)
        )
        child = context.Process(
            target=_child,
            args=(target, numbered[index::processes], share, there, reports),
            daemon=True,
        )
        child.start()
        pipes.append(here)
        children.append(child)
    records: list[Record] = []
    cpu_s: list[float] = []
    try:
        num_ready = 0
        while len(cpu_s) < processes:
            kind, content = _next_report(reports, children)
            if kind == "ready":
                num_ready += 1
                if num_ready == processes:
                    for pipe in pipes:
                        pipe.send(time.perf_counter() + START_IN_S)
            elif kind == "progress":
                on_progress(*content)
            elif kind == "done":
                records += content[0]
                cpu_s.append(content[1])
            else:
                raise RuntimeError(f"a client process failed:\n{content}")
    finally:
        for child in children:
            if len(cpu_s) < processes:
                child.terminate()
            child.join()
    return sorted(records, key=lambda record: record.sent), cpu_s


def _next_report(reports: Any, children: Sequence[Any]) -> tuple[str, Any]:
    while True:
        try:
            report: tuple[str, Any] = reports.get(timeout=1.0)
            return report
        except queue.Empty:
            dead = [child.exitcode for child in children if child.exitcode not in (None, 0)]
            if dead:
                return "failed", f"exit code {dead[0]}"


def _child(
    target: Target,
    sessions: list[tuple[int, Session]],
    concurrency: int | None,
    pipe: Any,
    reports: Any,
) -> None:
    pending = [0, 0]
    last = 0.0

    def on_progress(requests: int, tokens: int) -> None:
        nonlocal last
        pending[0] += requests
        pending[1] += tokens
        if time.perf_counter() - last > REPORT_EVERY_S:
            reports.put(("progress", tuple(pending)))
            pending[:] = [0, 0]
            last = time.perf_counter()

    try:
        reports.put(("ready", None))
        client = Client(target, pipe.recv(), on_progress)
        cpu = time.process_time()
        records = asyncio.run(client.run(sessions, concurrency))
        reports.put(("progress", tuple(pending)))
        reports.put(("done", (records, time.process_time() - cpu)))
    except BaseException:
        reports.put(("failed", traceback.format_exc()))
