"""Prompt tokens that the prefix cache serves for a hybrid model, beside an oracle of equal bytes.

A trace goes through the real scheduler and prefix tree, without a model. The sizes are those of
Qwen3.5-35B-A3B in bfloat16. Three caches have the same bytes:

- hybrid: KV, states and rows in the pools that the engine would plan;
- dense: KV alone, with the hybrid's bytes per token;
- oracle: KV in blocks, and states exactly where a later request resumes. It knows the future, keeps
  only what is needed again, and gives up first what is needed last (Belady 1966).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from minisgl.benchmark.arguments import add_json, benchmark_parser, natural, naturals
from minisgl.benchmark.report import write_json
from minisgl.core import SamplingParams
from minisgl.core.groups import FULL, CacheGroup
from minisgl.core.req import IdArray
from minisgl.engine.memory import plan_memory
from minisgl.message import UserMsg, ids_to_bytes
from minisgl.models.recurrent import GROUPS
from minisgl.scheduler import Scheduler, SchedulerConfig
from minisgl.testing import InstantExecutor

VOCAB_SIZE = 32_000
KV_BYTES = 10 * 2 * 2 * 256 * 2  # of a token: layers, keys and values, heads, dims, bytes
STATE_BYTES = 30 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)  # layers, matrices, inputs before
ROW_BYTES = 30 * (32 * 129 * 4 + (8192 + 2048) * 2)
BLOCK = 512  # tokens of the oracle's blocks, as in the trace
PAGE_SIZE, CHUNK, MAX_RUNNING, OUTPUT_TOKENS = 64, 8192, 16, 16
MAX_SEQ_LEN = 262_144


def main(argv: list[str]) -> None:
    parser = benchmark_parser(__name__, __doc__)
    parser.add_argument("--trace", type=Path, required=True, metavar="FILE", help="Mooncake's")
    parser.add_argument("--count", type=natural, default=2000, help="requests")
    parser.add_argument("--gb", type=naturals, default=[20, 60, 120], help="budgets, 10**9 bytes")
    add_json(parser)
    args = parser.parse_args(argv)
    prompts = read_prompts(args.trace, args.count)
    rows = []
    print("budget    hybrid    dense   oracle   hybrid / oracle")
    for gb in args.gb:
        budget = gb * 10**9
        hybrid = served(prompts, budget, (FULL, *GROUPS))
        dense = served(prompts, budget, (FULL,))
        oracle = Oracle(prompts, budget).served()
        print(f"{gb:4} GB  {hybrid:8.4f} {dense:8.4f} {oracle:8.4f}   {hybrid / oracle:8.3f}")
        rows.append({"gb": gb, "hybrid": hybrid, "dense": dense, "oracle": oracle})
    if args.json:
        write_json(args.json, {"count": len(prompts), "rows": rows})


def read_prompts(path: Path, count: int) -> list[IdArray]:
    """Equal blocks of the trace get equal ids. A prompt's last block, which is not whole, is left
    out but for a token: the trace gives it another name where a later prompt continues it."""
    prompts = []
    for line in path.read_text().splitlines()[:count]:
        row = json.loads(line)
        blocks = [
            np.random.default_rng(key).integers(0, VOCAB_SIZE, BLOCK, dtype=np.int32)
            for key in row["hash_ids"]
        ]
        prompts.append(np.concatenate(blocks)[: row["input_length"] // BLOCK * BLOCK + 1])
    return prompts


def served(prompts: Sequence[IdArray], budget: int, groups: tuple[CacheGroup, ...]) -> float:
    """The share of prompt tokens that are not computed. Requests start in order, at most
    `MAX_RUNNING` at a time."""
    sizes = {"full": KV_BYTES * PAGE_SIZE, "rows": ROW_BYTES * PAGE_SIZE, "state": STATE_BYTES}
    memory = plan_memory(
        free_bytes=budget,
        memory_ratio=1.0,
        weight_bytes=0,
        activation_bytes=0,
        groups=groups,
        group_page_bytes=[sizes[group.kind] for group in groups],
        page_size=PAGE_SIZE,
        chunk=CHUNK,
        max_seq_len=MAX_SEQ_LEN,
        max_running=MAX_RUNNING,
        num_pages=None,
    )
    scheduler = Scheduler(
        SchedulerConfig(
            groups=memory.groups,
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
        while waiting and len(scheduler._requests) < MAX_RUNNING:
            uid, ids = waiting.pop()
            scheduler.add(UserMsg(uid=uid, ids=ids_to_bytes(ids), sampling=sampling))
        plan = scheduler.plan()
        assert plan is not None
        scheduler.commit(plan, executor.launch(plan).wait())
    return scheduler.stats.num_cached_tokens / scheduler.stats.num_prompt_tokens


class Oracle:
    """Mutable: what it holds, and for everything the numbers of the requests that will use it."""

    def __init__(self, prompts: Sequence[IdArray], budget: int) -> None:
        self._budget = budget
        self._num_tokens = sum(map(len, prompts))
        self._paths = [_prefixes(ids) for ids in prompts]
        self._uses: dict[tuple[str, int], list[int]] = {}  # of blocks and states, the last first
        seen: set[int] = set()
        for number, path in enumerate(self._paths):
            depth = next((i for i, key in enumerate(path) if key not in seen), len(path))
            for key in path[:depth]:
                self._uses.setdefault(("block", key), []).append(number)
            if depth:
                self._uses.setdefault(("state", path[depth - 1]), []).append(number)
            seen.update(path)
        for uses in self._uses.values():
            uses.reverse()

    def served(self) -> float:
        held: dict[tuple[str, int], int] = {}  # bytes
        num_served = 0
        for number, path in enumerate(self._paths):
            depth = next((i for i, k in enumerate(path) if ("block", k) not in held), len(path))
            while depth and ("state", path[depth - 1]) not in held:
                depth -= 1
            num_served += depth * BLOCK
            for key in path:
                for kind in ("block", "state"):
                    item = (kind, key)
                    uses = self._uses.get(item, [])
                    while uses and uses[-1] <= number:
                        uses.pop()
                    if uses:
                        held[item] = STATE_BYTES if kind == "state" else BLOCK * KV_BYTES
                    else:
                        held.pop(item, None)
            excess = sum(held.values()) - self._budget
            for item in sorted(held, key=lambda item: -self._uses[item][-1]) if excess > 0 else ():
                if excess <= 0:
                    break
                excess -= held.pop(item)
        return num_served / self._num_tokens


def _prefixes(ids: IdArray) -> list[int]:
    """For each whole block before the last token, what identifies the prompt up to its end."""
    keys, key = [], 0
    for end in range(BLOCK, len(ids), BLOCK):
        key = hash((key, ids[end - BLOCK : end].tobytes()))
        keys.append(key)
    return keys
