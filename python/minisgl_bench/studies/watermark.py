"""The room that an admission leaves: retractions and cost by the scheduler's watermark.

A simulation with the real scheduler and no model. 200 requests of 100 to 1,024 prompt and output
tokens share a pool of 16,384 tokens. A step costs one unit (reading the weights), or its tokens /
256 if that is more (computing them), which is the shape of a GPU's cost. The seeds are fixed.
"""

from __future__ import annotations

import random
import statistics

from minisgl.core import Plan, SamplingParams, StepResult
from minisgl.message import UserMsg, ids_to_bytes
from minisgl.scheduler import Scheduler, SchedulerConfig
from minisgl_bench.arguments import add_json, benchmark_parser, integer
from minisgl_bench.report import write_json

NUM_REQUESTS = 200
POOL_TOKENS = 16_384
FREE_TOKENS = 256  # tokens of a step from which on computing takes longer than reading the weights
SEEDS = (0, 1, 2)


def main(argv: list[str]) -> None:
    parser = benchmark_parser(__name__, __doc__)
    parser.add_argument("--page-size", type=integer(1, POOL_TOKENS), default=16, help="tokens")
    add_json(parser)
    args = parser.parse_args(argv)
    rows = []
    print("watermark  retractions  prefilled tokens  cost")
    for watermark in (0, 8, 16, 32, 64, 128, 256):
        runs = [_simulate(watermark, args.page_size, seed) for seed in SEEDS]
        retractions, prefilled, cost = (
            statistics.mean(values) for values in zip(*runs, strict=True)
        )
        print(f"{watermark:9}  {retractions:11.0f}  {prefilled:16,.0f}  {cost:,.0f}")
        rows.append(
            {
                "watermark_tokens": watermark,
                "retractions": retractions,
                "prefilled_tokens": prefilled,
                "cost": cost,
            }
        )
    if args.json:
        write_json(args.json, {"page_size": args.page_size, "seeds": SEEDS, "rows": rows})


def _simulate(watermark: int, page_size: int, seed: int) -> tuple[int, int, float]:
    """Return retractions, computed prompt tokens, and the cost until all requests have finished."""
    rng = random.Random(seed)
    scheduler = Scheduler(
        SchedulerConfig(
            num_pages=POOL_TOKENS // page_size,
            page_size=page_size,
            max_seq_len=4096,
            vocab_size=1000,
            eos_ids=frozenset(),
            max_prefill_tokens=2048,
            watermark_tokens=watermark,
        )
    )
    for uid in range(NUM_REQUESTS):
        prompt = [rng.randrange(1000) for _ in range(rng.randint(100, 1024))]
        sampling = SamplingParams(max_tokens=rng.randint(100, 1024))
        scheduler.add(UserMsg(uid=uid, ids=ids_to_bytes(prompt), sampling=sampling))
    cost, prefilled = 0.0, 0
    in_flight: Plan | None = None
    while scheduler.runnable:
        plan = scheduler.plan()
        if plan:
            cost += max(1.0, plan.num_tokens / FREE_TOKENS)
            prefilled += plan.num_tokens - plan.num_decodes
        if in_flight:
            scheduler.commit(in_flight, StepResult(next_ids=[7] * len(in_flight.sample_rows)))
        in_flight = plan
    return scheduler.stats.num_retractions, prefilled, cost
