"""What drafts bring at a stated acceptance: an oracle guesses, each guess right by a coin.

One engine computes all sides: no drafts, the rule (`minisgl_zoo.drafts.rule`), and fixed numbers of
drafts. Each side has a scheduler of its own, without a prefix cache, and they answer the same
prompts in turn; odd rounds swap the order. The ratio of a round is the seconds of `off` over those
of the side (above 1 the side is faster); the median of all rounds counts, with a bootstrap interval
of 95 %. The time is that of the scheduler's loop, without texts.

The weights are random, but those that write into the residual stream are 0. So the answer depends
on the last token alone, by a wide margin, and another number of rows rounds no near tie in another
way. The steps read and multiply as much as with real weights.

The exit status is 1 if an answer differs from that of `off`.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from minisgl.core import SamplingParams
from minisgl.core.args import EngineConfig
from minisgl.core.event import Token
from minisgl.core.req import Req
from minisgl.engine import Engine
from minisgl.engine.startup import start_engine
from minisgl.message import UserMsg, ids_to_bytes
from minisgl.scheduler import Scheduler, SchedulerConfig, run
from minisgl.scheduler.drafting import CreateDrafts, Draft
from minisgl.scheduler.requests import Requests
from minisgl_bench.arguments import add_json, benchmark_parser, natural, naturals
from minisgl_bench.checkpoint import write_checkpoint
from minisgl_bench.fakes import ListInbox, ListOutbox
from minisgl_bench.lengths import ordinary_ids
from minisgl_bench.report import machine_load, write_json
from minisgl_bench.shapes import SHAPES
from minisgl_bench.studies.paired import NUM_RESAMPLES
from minisgl_zoo.drafts.rule import DraftRule

Ids = list[list[int]]
OUTPUT_PROJECTIONS: Final = ("o_proj.weight", "down_proj.weight")


class Oracle:
    """A drafter whose guesses are right at a stated rate. Mutable: it follows a request."""

    name: Final = "oracle"
    is_over: Final = False
    is_fresh: Final = False

    def __init__(self, answer: Sequence[int], rate: float, seed: int) -> None:
        coins = random.Random(seed)
        self._tokens = [token if coins.random() < rate else token + 1 for token in answer]
        self._at = 0

    def next(self, count: int) -> Sequence[int]:
        return self._tokens[self._at : self._at + count]

    def add(self, token: int) -> None:
        self._at += 1


class FixedDrafts:
    """`Drafts` of the same number for each request in each step, whether they pay or not."""

    def __init__(self, answers: Ids, rate: float, count: int) -> None:
        self._count = count
        self._oracles = [Oracle(answer, rate, uid) for uid, answer in enumerate(answers)]

    def pays(self, running: Sequence[Req], num_rows: int) -> bool:
        return True

    def propose(self, reqs: Sequence[Req], num_rows: int, room: int) -> list[Draft]:
        proposed = []
        for req in reqs:
            oracle = self._oracles[req.uid]
            oracle._at = len(req.output)
            tokens = list(oracle.next(min(self._count, room)))
            room -= len(tokens)
            proposed.append(Draft(req, tokens, oracle.name))
        return proposed


def main(argv: list[str]) -> int:
    parser = benchmark_parser(__name__, __doc__)
    add = parser.add_argument
    add("--shape", choices=SHAPES, default="qwen3-0.6b", help="shape of the model")
    add("--device", default="auto", help="as the server's flag")
    add("--streams", type=naturals, default=[1, 4, 16, 64, 256], help="with commas")
    add("--rates", default="0,0.3,0.6,0.8,0.9", help="acceptances, with commas")
    add("--fixed", type=naturals, default=[1, 3, 7, 15], help="numbers of drafts, with commas")
    add("--most-fixed", type=natural, default=16, help="streams up to which these are measured")
    add("--prompt", type=natural, default=128, help="tokens")
    add("--output", type=natural, default=128, help="tokens")
    add("--rounds", type=natural, default=20, help="counted rounds, after one to warm up")
    add("--fixed-rounds", type=natural, default=5, help="rounds of the fixed numbers")
    add_json(parser)
    args = parser.parse_args(argv)
    load, rows, all_equal = machine_load(), [], True
    most = max(args.streams)
    pages = most * (args.prompt + args.output + 32) // 16 + 64
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), SHAPES[args.shape], weights=False)
        config = EngineConfig(
            model=folder, dummy_weight=True, device=args.device, num_pages=pages, page_size=16
        )
        engine = start_engine(config, measure_steps=True)
    try:
        for parameter in engine.model.parameters():
            if any(part.name.endswith(OUTPUT_PROJECTIONS) for part in parameter.parts):
                getattr(parameter.owner, parameter.attr).zero_()
        print(engine.tuning.step_times, flush=True)
        for streams in args.streams:
            for rate in map(float, args.rates.split(",")):
                row, is_equal = _compare(engine, streams, rate, args)
                all_equal &= is_equal
                rows.append(row)
    finally:
        engine.close()
    if args.json:
        times = engine.tuning.step_times
        result = {"load_before": load, "shape": args.shape, "step_times": str(times)}
        write_json(args.json, {**result, "rows": rows})
    return 0 if all_equal else 1


def _compare(engine: Engine, streams: int, rate: float, args: Any) -> tuple[dict[str, Any], bool]:
    """Return the row of a number of streams and an acceptance, and whether all ids are equal."""
    vocab_size = engine.model_config.vocab_size
    fixed = [str(count) for count in args.fixed] if streams <= args.most_fixed and rate else []
    ratios: dict[str, list[float]] = {}
    off_s: list[float] = []
    counts: dict[str, tuple[int, int]] = {}
    is_equal = True
    rates: dict[str, Any] = {}
    for round_ in range(-1, args.rounds):
        rng = np.random.default_rng([streams, round_ + 1])
        prompts = rng.integers(*ordinary_ids(vocab_size), (streams, args.prompt)).tolist()
        seconds, answers, _ = _answer(engine, prompts, args.output, lambda *_: None)
        names = ["rule", *(fixed if round_ < args.fixed_rounds else [])]
        for name in names if round_ % 2 else reversed(names):
            if name == "rule":
                create = _rule(answers, rate, round_, rates)
            else:
                create = _fixed(answers, rate, int(name))
            if round_ % 2:  # the time before and the time after, in turn
                seconds, again, _ = _answer(engine, prompts, args.output, lambda *_: None)
                is_equal &= again == answers
            took, got, counted = _answer(engine, prompts, args.output, create)
            is_equal &= got == answers
            if round_ >= 0:
                ratios.setdefault(name, []).append(seconds / took)
                drafted, accepted = counts.get(name, (0, 0))
                counts[name] = drafted + counted[0], accepted + counted[1]
        off_s.append(seconds)
    row: dict[str, Any] = {"streams": streams, "acceptance": rate}
    row["off_tokens_per_s"] = round(streams * args.output / float(np.median(off_s[1:])), 1)
    for name, values in ratios.items():
        median, low, high = _median(values)
        row[name] = {"ratio": median, "interval": [low, high], "drafted": counts[name][0]}
        row[name] |= {"accepted": counts[name][1], "ratios": [round(v, 4) for v in values]}
    shown = ", ".join(
        f"{name} {row[name]['ratio']:.3f} [{row[name]['interval'][0]:.3f}, "
        f"{row[name]['interval'][1]:.3f}]"
        for name in ratios
    )
    print(
        f"{streams:4} streams, acceptance {rate}: off {row['off_tokens_per_s']:.0f} tokens/s; "
        f"off over {shown}; rule drafted {row['rule']['drafted']}, accepted "
        f"{row['rule']['accepted']}; answers {'equal' if is_equal else 'DIFFER'}",
        flush=True,
    )
    return row, is_equal


def _rule(answers: Ids, rate: float, round_: int, rates: dict[str, Any]) -> CreateDrafts:
    """Return what makes the rule. rates: measured so far; kept from round to round, as a server
    keeps them."""

    def create(config: SchedulerConfig, requests: Requests) -> DraftRule:
        def oracle(req: Req, _: Requests) -> Oracle:
            return Oracle(answers[req.uid], rate, 1_000 * round_ + req.uid)

        rule = DraftRule([oracle], config, requests)
        rule._rates = rates
        return rule

    return create


def _fixed(answers: Ids, rate: float, count: int) -> CreateDrafts:
    return lambda *_: FixedDrafts(answers, rate, count)


def _answer(
    engine: Engine, prompts: Ids, num_output: int, create: CreateDrafts
) -> tuple[float, Ids, tuple[int, int]]:
    """Return the seconds, the ids of each answer, and the numbers of drafts and accepted drafts."""
    config = SchedulerConfig(
        groups=engine.memory.groups,
        page_size=engine.page_size,
        max_seq_len=engine.max_seq_len,
        vocab_size=engine.model_config.vocab_size,
        eos_ids=frozenset(),
        max_prefill_tokens=engine.max_prefill_tokens,
        step_times=engine.tuning.step_times,
        max_running=engine.max_running,
        cache="naive",
    )
    scheduler = Scheduler(config, create_drafts=create)
    sampling = SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True)
    messages = [
        UserMsg(uid=uid, ids=ids_to_bytes(prompt), sampling=sampling)
        for uid, prompt in enumerate(prompts)
    ]
    outbox = ListOutbox()
    inbox = ListInbox([messages], more=lambda: [] if scheduler.runnable else None)
    start = time.perf_counter()
    run(scheduler, engine, inbox, outbox)
    seconds = time.perf_counter() - start
    answers: Ids = [[] for _ in prompts]
    for event in outbox.events:
        if isinstance(event, Token):
            answers[event.uid].append(event.id)
    return seconds, answers, (scheduler.stats.num_drafted, scheduler.stats.num_accepted)


def _median(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the median and the ends of its 95 % bootstrap interval. Deterministic."""
    picks = np.random.default_rng(0).integers(0, len(values), (NUM_RESAMPLES, len(values)))
    low, high = np.percentile(np.median(np.asarray(values)[picks], axis=1), (2.5, 97.5))
    return round(float(np.median(values)), 4), round(float(low), 4), round(float(high), 4)
