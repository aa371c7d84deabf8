"""Gaps between a stream's tokens in a recording, beside the stall bound and the predicted times.

`gaps RECORDING` (a file of `--record`) plans the recorded steps again, so it knows each step's
predicted time. A gap is the time between the ends of two successive steps that both have decode
rows; it counts once for each of these rows. It should be at most the stall bound and one decode
step, whose time is the median of the 30 steps without prompts that have the most similar contexts.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import nsmallest
from pathlib import Path
from typing import Any, Final

import numpy as np

from minisgl.core.plan import Plan
from minisgl.errors import ConfigError
from minisgl.scheduler.loop import Meter
from minisgl_bench.arguments import add_json, benchmark_parser
from minisgl_bench.recording import records_of
from minisgl_bench.replay_plans import Recording, plan_again
from minisgl_bench.report import write_json
from minisgl_gateway.watch.xray import Step

NUM_SIMILAR: Final = 30
LONGEST_S: Final = 0.3  # a longer time is a pause in which no request ran
NUM_SHOWN: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Two successive steps with decode rows. context: the tokens of the later step's decode
    rows."""

    step: int
    seconds: float
    predicted_s: float
    decodes: int
    context: int
    prompt_tokens: int
    launch_us: float


def main(argv: Sequence[str]) -> None:
    parser = benchmark_parser(__name__, __doc__)
    parser.add_argument("recording", type=Path, help="a file of --record")
    add_json(parser)
    args = parser.parse_args(argv)
    recording = Recording(args.recording)
    gaps = gaps_of(recording, args.recording)
    result = summary(gaps, recording.config.max_stall_s)
    for name, value in result.items():
        if name != "rows":
            print(f"{name:34}{value}")
    print("the longest gaps beside their bounds:")
    for row in result["rows"]:
        print("  " + ", ".join(f"{name} {value}" for name, value in row.items()))
    if args.json:
        write_json(args.json, result)


def gaps_of(recording: Recording, path: Path) -> list[Gap]:
    """Return the gaps in order. Raises ConfigError if the recording has no stall bound."""
    times = recording.config.step_times
    if times is None or recording.config.max_stall_s is None:
        raise ConfigError(f"{path} is not a server's: it has no stall bound")
    predict_s = times.plan_s
    plans: dict[int, tuple[int, float]] = {}

    class Predicting(Meter):
        def launched(self, plan: Plan) -> None:
            plans[plan.step] = sum(plan.ends[: plan.num_decodes]), predict_s(plan)

    plan_again(recording, Predicting())
    frames = (record["frame"] for record in records_of(path) if "frame" in record)
    steps = {step.step: step for frame in frames for step in map(Step._make, frame["steps"])}
    gaps = []
    for number, step in sorted(steps.items()):
        before = steps.get(number - 1)
        if before is None or number not in plans or not (step.decodes and before.decodes):
            continue
        seconds = _end_s(step) - _end_s(before)
        if seconds <= LONGEST_S:
            context, predicted_s = plans[number]
            gaps.append(
                Gap(
                    step=number, seconds=seconds, predicted_s=predicted_s, decodes=step.decodes,
                    context=context, prompt_tokens=step.prompt_tokens, launch_us=step.launch_us,
                )
            )  # fmt: skip
    return gaps


def summary(gaps: Sequence[Gap], bound_s: float | None) -> dict[str, Any]:
    """Return the bound, the share of gaps above bound and decode step, and the worst of them.

    Raises ConfigError if there is no gap, or no decode step to compare with.
    """
    plain = [gap for gap in gaps if not gap.prompt_tokens]
    if not plain or bound_s is None:
        raise ConfigError("no two successive steps decode without prompts")

    def over_s(gap: Gap) -> float:
        similar = nsmallest(NUM_SIMILAR, plain, key=lambda other: abs(other.context - gap.context))
        decode_s = statistics.median(other.seconds for other in similar)
        return gap.seconds - bound_s - decode_s

    over = [over_s(gap) for gap in gaps]
    weights = np.array([gap.decodes for gap in gaps])
    shares = {
        f"share_{slack_ms}_ms_above": round(
            float(weights[np.array(over) > slack_ms / 1e3].sum() / weights.sum()), 5
        )
        for slack_ms in (0, 0.5, 1, 2)
    }
    mixed = [gap.seconds / gap.predicted_s for gap in gaps if gap.prompt_tokens]
    worst = sorted(zip(over, gaps, strict=True), key=lambda pair: -pair[0])[:NUM_SHOWN]
    return {
        "bound_ms": round(bound_s * 1e3, 2),
        "gaps": int(weights.sum()),
        "longest_ms": round(max(gap.seconds for gap in gaps) * 1e3, 2),
        **shares,
        "actual_over_predicted_p50": round(statistics.median(mixed), 3) if mixed else None,
        "actual_over_predicted_max": round(max(mixed), 3) if mixed else None,
        "rows": [
            {
                "step": gap.step,
                "gap_ms": round(gap.seconds * 1e3, 2),
                "over_ms": round(seconds * 1e3, 2),
                "predicted_ms": round(gap.predicted_s * 1e3, 2),
                "decodes": gap.decodes,
                "prompt_tokens": gap.prompt_tokens,
                "launch_us": gap.launch_us,
            }
            for seconds, gap in worst
        ],
    }


def _end_s(step: Step) -> float:
    """Return when the loop had the step's result: its wait begins at settle_s."""
    return step.settle_s + step.wait_us * 1e-6
