"""Measures decode steps whose rows have masks, against plain overlapped steps.

The first `--masked` requests of a masked round (default: all) have masks, so each step is sampled
after the step before is settled. `--masker even` allows the even ids; `grammar` follows a JSON
schema, as a user's grammar does. Plain and masked rounds alternate on one engine, odd rounds in the
other order. A step's time is the median time between the tokens of two steps, on a CPU in CPU
seconds of the process with its compute threads, because wall seconds change with other load. The
result is the geometric mean of the rounds' ratios with a bootstrap confidence interval of 95 %.
Greedy, random weights, no early end. The parts are the host's mean time per step in each part of a
turn; in `wait` it waits for the device.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from minisgl.core import Event, Plan, SamplingParams, Token
from minisgl.core.req import Mask, Masker
from minisgl.engine import Engine, EngineConfig
from minisgl.engine.startup import start_engine
from minisgl.message import ExitMsg, SchedulerMsg, UserMsg, ids_to_bytes
from minisgl.runtime.scheduler_config import scheduler_config
from minisgl.scheduler import Scheduler, run
from minisgl.scheduler.loop import PARTS, Meter
from minisgl_bench.arguments import add_json, benchmark_parser, natural
from minisgl_bench.checkpoint import write_checkpoint
from minisgl_bench.report import machine_load, write_json
from minisgl_bench.shapes import SHAPES
from minisgl_bench.studies.paired import interval

KINDS = ("plain", "masked")
PAGE_SIZE = 16
WARM_UP_STEPS = 8  # steps with prompts, and steps that capture graphs
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "groups": {"type": "array", "items": {"enum": ["staff", "guest", "admin"]}},
    },
    "required": ["name", "age", "groups"],
}
MIN_ITEMS = 1000
"""Persons in an answer: so many that it never ends early."""


class EvenMasker:
    """Allows the even ids. The masks are packed beforehand, so the making of a mask is not
    measured."""

    def __init__(self, vocab_size: int) -> None:
        allowed = np.zeros(-(-vocab_size // 32) * 32, np.bool_)
        allowed[:vocab_size:2] = True
        self._mask = np.packbits(allowed, bitorder="little").view(np.uint32)

    def mask(self, output: Sequence[int]) -> Mask:
        return self._mask


def maskers(kind: str, folder: Path, vocab_size: int) -> Callable[[], Masker]:
    """Return a function that makes a request's masker."""
    if kind == "even":
        return lambda: EvenMasker(vocab_size)
    from minisgl_zoo.grammar.compile import json_grammar
    from minisgl_zoo.grammar.maskers import Maskers

    text = (folder / "tokenizer.json").read_text(encoding="utf-8")
    source = Maskers(lambda: text, vocab_size, {vocab_size - 1})
    schema = {"type": "array", "items": PERSON, "minItems": MIN_ITEMS}
    grammar = json.dumps({"grammars": [json_grammar(schema)]})
    return lambda: source.create(grammar)


class Recorder:
    """The inbox and outbox of one round. Mutable: it records the time of each step's tokens."""

    def __init__(self, requests: list[SchedulerMsg], clock: Callable[[], float]) -> None:
        self._requests, self._clock = requests, clock
        self.times: list[float] = []
        self.ids: list[int] = []

    def take(self, timeout_s: float) -> Sequence[SchedulerMsg]:
        requests, self._requests = self._requests, []
        return requests or ([ExitMsg()] if timeout_s else [])

    def send(self, events: list[Event]) -> None:
        tokens = [event.id for event in events if isinstance(event, Token)]
        if tokens:
            self.times.append(self._clock())
            self.ids += tokens

    def pong(self, seq: int) -> None:
        raise AssertionError("this benchmark sends no pings")


class PartTimes(Meter):
    """Sums the host's time in each part of the turns. Mutable."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self._seconds = [0.0] * len(PARTS)
        self._last = 0.0
        self._steps = 0

    def begin(self, *, asleep: bool) -> None:
        self._last = time.perf_counter()

    def lap(self, part: int) -> None:
        now = time.perf_counter()
        self._seconds[part] += now - self._last
        self._last = now

    def settled(self, plan: Plan, scheduler: Scheduler) -> None:
        self._steps += 1

    def us(self) -> dict[str, float]:
        return {
            part: round(seconds * 1e6 / self._steps, 1)
            for part, seconds in zip(PARTS, self._seconds, strict=True)
        }


def main(argv: list[str]) -> int:
    parser = benchmark_parser(__name__, __doc__)
    add = parser.add_argument
    add("--shape", choices=SHAPES, default="qwen3-0.6b", help="shape of the model")
    add("--batch", type=natural, default=8, help="requests that decode together")
    add("--masked", type=natural, help="requests with a mask (default: all)")
    add("--prompt", type=natural, default=64, help="prompt tokens of a request")
    add("--steps", type=natural, default=64, help="decode steps of a round")
    add("--rounds", type=natural, default=5, help="rounds of each kind, after one to warm up")
    add("--masker", choices=("even", "grammar"), default="even", help="the kind of masks")
    add("--clock", choices=("auto", "wall", "cpu"), default="auto", help="auto: cpu on a CPU")
    add("--device", default="auto", help="as the server's flag")
    add("--dtype", default="auto", help="as the server's flag")
    add_json(parser)
    args = parser.parse_args(argv)
    load = machine_load()
    parts = {kind: PartTimes() for kind in KINDS}
    args.masked = min(args.masked or args.batch, args.batch)
    length = args.prompt + args.steps + WARM_UP_STEPS
    with tempfile.TemporaryDirectory() as name:
        write_checkpoint(Path(name), SHAPES[args.shape], weights=False)
        config = EngineConfig(
            folder=Path(name), device=args.device, dtype=args.dtype, dummy_weight=True,
            page_size=PAGE_SIZE, num_pages=2 * args.batch * (length // PAGE_SIZE + 1),
            cache="naive",
        )  # fmt: skip
        engine = start_engine(config)
        is_cpu = engine.device.torch_device.type == "cpu"
        args.clock = ("cpu" if is_cpu else "wall") if args.clock == "auto" else args.clock
        create = maskers(args.masker, config.folder, engine.model_config.vocab_size)
        try:
            rounds: list[dict[str, float]] = []
            for number in range(args.rounds + 1):
                if number == 1:  # the first round compiles and captures
                    rounds.clear()
                    for part_times in parts.values():
                        part_times.restart()
                rounds.append(
                    {
                        kind: _step_s(
                            engine, config, create if kind == "masked" else None, args, parts[kind]
                        )
                        for kind in (KINDS if number % 2 else KINDS[::-1])
                    }
                )
                print(f"{number:>3}  {rounds[-1]['masked'] / rounds[-1]['plain']:.4f}", flush=True)
        finally:
            engine.close()
    ratio, low, high = interval([pair["masked"] / pair["plain"] for pair in rounds])
    medians = {kind: statistics.median(pair[kind] for pair in rounds) * 1e3 for kind in KINDS}
    print(
        f"{args.shape}, {args.masked} of {args.batch} rows with {args.masker} masks: "
        f"plain {medians['plain']:.3f} ms a step, masked {medians['masked']:.3f} ms, "
        f"{args.clock} seconds; ratio of {len(rounds)} paired rounds {ratio:.3f} "
        f"[{low:.3f}, {high:.3f}]"
    )
    parts_us = {kind: times.us() for kind, times in parts.items()}
    for kind, times in parts_us.items():
        print(f"{kind:7s} us a step: {', '.join(f'{part} {us}' for part, us in times.items())}")
    if args.json:
        result = {
            "shape": args.shape, "batch": args.batch, "masked": args.masked, "masker": args.masker,
            "clock": args.clock, "rounds_s": rounds, "ratio": ratio, "low": low, "high": high,
            "parts_us": parts_us,
        }  # fmt: skip
        write_json(args.json, {"load_before": load, **result})
    return 0


def _step_s(
    engine: Engine,
    config: EngineConfig,
    create: Callable[[], Masker] | None,
    args: argparse.Namespace,
    meter: Meter,
) -> float:
    """Run one round. Returns the median seconds of a decode step."""
    batch, prompt, steps = args.batch, args.prompt, args.steps
    vocab_size = engine.model_config.vocab_size
    rng = np.random.default_rng(0)
    sampling = SamplingParams(temperature=0.0, max_tokens=steps + WARM_UP_STEPS, ignore_eos=True)
    prompts = [ids_to_bytes(rng.integers(vocab_size, size=prompt)) for _ in range(batch)]
    requests: list[SchedulerMsg] = [
        UserMsg(uid=uid, ids=ids, sampling=sampling) for uid, ids in enumerate(prompts)
    ]
    clock = time.process_time if args.clock == "cpu" else time.perf_counter
    recorder = Recorder(requests, clock)
    scheduler = Scheduler(
        scheduler_config(config, engine, frozenset()),
        create_masker=lambda message: create() if create and message.uid < args.masked else None,
    )
    run(scheduler, engine, recorder, recorder, meter=meter)
    assert len(recorder.ids) == batch * (steps + WARM_UP_STEPS)
    if create and args.masker == "even" and args.masked == batch:
        assert not any(token % 2 for token in recorder.ids)
    times = recorder.times[WARM_UP_STEPS:]
    return statistics.median(end - start for start, end in pairwise(times))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
