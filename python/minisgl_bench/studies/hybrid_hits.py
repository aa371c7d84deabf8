"""Prompt tokens that the prefix cache serves for a hybrid model, beside bounds of equal bytes.

Prompts go through the real scheduler and prefix tree, without a model. The sizes are those of
Qwen3.5-35B-A3B in bfloat16. All caches have the same bytes, which the running requests share:

- hybrid: KV, states and rows in the pools that the engine would plan, and an oracle for them;
- dense: KV alone, with the hybrid's bytes per token, an oracle for it, and a bound for caches that
  do not know the future.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from minisgl.core import SamplingParams
from minisgl.core.groups import FULL, CacheGroup
from minisgl.core.req import IdArray
from minisgl.engine.memory import MemoryPlan, plan_memory
from minisgl.message import UserMsg, ids_to_bytes
from minisgl.scheduler import Scheduler, SchedulerConfig
from minisgl_bench.arguments import add_json, benchmark_parser, natural, naturals
from minisgl_bench.fakes import InstantExecutor
from minisgl_bench.report import write_json
from minisgl_bench.studies.hit_bounds import Oracle, without_future
from minisgl_bench.studies.prompt_traces import (
    BLOCK,
    MADE_UP,
    RECORDED_BLOCK,
    VOCAB_SIZE,
    made_up,
    recorded,
)
from minisgl_zoo.recurrent.spec import GROUPS

KV_BYTES = 10 * 2 * 2 * 256 * 2  # a token: layers, keys and values, heads, dims, bytes
STATE_BYTES = 30 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)  # layers, matrices, inputs before
PAGE_SIZE, CHUNK, MAX_RUNNING, OUTPUT_TOKENS = 64, 8192, 16, 16
# A page of rows: keys, updates and decays of each token, and the last inputs.
ROWS_BYTES = 30 * (PAGE_SIZE * (32 * 129 * 4 + 2048 * 2) + 4 * 8192 * 2)
MAX_SEQ_LEN = 1 << 20  # so that the pool may exceed the tokens of the running requests
COLUMNS = ("hybrid", "its oracle", "dense", "its oracle", "no future")


def main(argv: list[str]) -> None:
    parser = benchmark_parser(__name__, __doc__)
    parser.add_argument("--trace", type=Path, metavar="FILE", help="Mooncake's")
    parser.add_argument(
        "--made-up", choices=MADE_UP, action="append", default=[], help="prompts made up here"
    )
    parser.add_argument("--count", type=natural, default=2000, help="requests")
    parser.add_argument("--gb", type=naturals, default=[20, 60, 120], help="budgets, 10**9 bytes")
    add_json(parser)
    args = parser.parse_args(argv)
    traces = {name: (made_up(name, args.count), BLOCK) for name in args.made_up}
    if args.trace:
        traces = {args.trace.stem: (recorded(args.trace, args.count), RECORDED_BLOCK), **traces}
    if not traces:
        parser.error("name prompts with --trace FILE or --made-up NAME")
    rows = []
    for name, (prompts, block) in traces.items():
        print(f"{name:26}" + "".join(f"{column:>12}" for column in COLUMNS))
        for gb in args.gb:
            shares = measure(prompts, block, gb * 10**9)
            print(f"{gb:23} GB" + "".join(f"{share:12.4f}" for share in shares))
            row = {"name": f"{name}, {gb} GB", "trace": name, "gb": gb}
            rows.append({**row, "shares": [round(x, 4) for x in shares]})
    if args.json:
        write_json(args.json, {"count": args.count, "columns": COLUMNS, "rows": rows})


def measure(prompts: Sequence[IdArray], block: int, budget: int) -> list[float]:
    """Return the shares of `COLUMNS`."""

    def oracle(state_bytes: int) -> float:
        return Oracle(
            prompts,
            block=block,
            kv_bytes=KV_BYTES,
            state_bytes=state_bytes,
            running=MAX_RUNNING,
        ).served(budget)

    return [
        served(prompts, budget, (FULL, *GROUPS)),
        oracle(STATE_BYTES),
        served(prompts, budget, (FULL,)),
        oracle(0),
        without_future(prompts, block=block, kv_bytes=KV_BYTES, budget=budget),
    ]


def served(prompts: Sequence[IdArray], budget: int, groups: tuple[CacheGroup, ...]) -> float:
    """Return the share of prompt tokens that are not computed. Requests start in order, at most
    `MAX_RUNNING` at a time."""
    sizes = {"full": KV_BYTES * PAGE_SIZE, "rows": ROWS_BYTES, "state": STATE_BYTES}
    memory = MemoryPlan(
        free_bytes=budget,
        memory_ratio=1.0,
        weight_bytes=0,
        activation_bytes=0,
        groups=groups,
        group_page_bytes=tuple(sizes[group.kind] for group in groups),
        page_size=PAGE_SIZE,
        chunk=CHUNK,
        max_seq_len=MAX_SEQ_LEN,
        max_running=MAX_RUNNING,
    )
    scheduler = Scheduler(
        SchedulerConfig(
            groups=plan_memory(memory, None).groups,
            page_size=PAGE_SIZE,
            max_seq_len=MAX_SEQ_LEN,
            vocab_size=VOCAB_SIZE,
            eos_ids=frozenset(),
            max_prefill_tokens=CHUNK,
            max_running=MAX_RUNNING,
        )
    )
    executor, sampling = InstantExecutor(), SamplingParams(max_tokens=OUTPUT_TOKENS)
    waiting = list(enumerate(prompts))[::-1]
    while waiting or scheduler.runnable:
        while waiting and len(scheduler.requests.by_uid) < MAX_RUNNING:
            uid, ids = waiting.pop()
            scheduler.add(UserMsg(uid=uid, ids=ids_to_bytes(ids), sampling=sampling))
        plan = scheduler.plan()
        assert plan is not None
        scheduler.commit(plan, executor.launch(plan).wait())
    return scheduler.stats.num_cached_tokens / scheduler.stats.num_prompt_tokens
