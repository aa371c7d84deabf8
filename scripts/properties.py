"""Runs the random tests for minutes, with numbers that hypothesis draws.

    python scripts/properties.py [TARGET ...] [--seconds S] [--seed N] [--json FILE]

A target is a function of tests/ that takes a `random.Random`. Hypothesis decides the numbers that
this object returns, and can vary and shrink them. Rounds of `EXAMPLES` examples follow each other
until the time is over; round i has the seed N + i, and the same seed draws the same examples. A
finding is an exception: it ends its target, with the smallest case and the seed of its round.
"""

from __future__ import annotations

import random
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from fuzz import run_targets, targets_parser

ROOT: Final = Path(__file__).parents[1]
EXAMPLES: Final = 200
"""Examples of a round. Within a round hypothesis does not draw a case twice."""
WORDS: Final = ("f", "a", " ", "\n", "1", "true", '"', "{", "}", "[", ":", ",", "é", "<", "/", ">")

Target = Callable[[random.Random], Any]


def tree(rng: random.Random) -> None:
    """The prefix tree against a list of the inserted prompts."""
    from core.kvcache.test_radix_cache import run_operations

    run_operations(rng, page_size=rng.choice([1, 3]), num_operations=rng.randint(1, 60))


def groups(rng: random.Random) -> None:
    """Cache groups: window pages, states and rows against an oracle that knows their writers."""
    from zoo.cache_groups.test_groups import GROUPS, run_operations

    run_operations(rng, GROUPS[rng.choice(sorted(GROUPS))], num_operations=rng.randint(1, 60))


def broadcasts(rng: random.Random) -> None:
    """Three ranks plan the same steps."""
    from core.scheduler.test_step_broadcast import random_turns, run_ranks

    run_ranks(random_turns(rng, rng.randint(1, 20), has_shares=rng.random() < 0.5),
              overlap=rng.random() < 0.5)  # fmt: skip


def steps(rng: random.Random) -> None:
    """Whole runs of the scheduler give each request its tokens and one end."""
    from helpers.random_runs import run_once

    run_once(rng, fail=rng.random() < 0.3, grouped=rng.random() < 0.5)


def records(rng: random.Random) -> None:
    """A frame between processes in which values are changed is refused or read."""
    import fuzz_targets

    data = rng.choice(fuzz_targets.TARGETS["records"].seeds())
    found = msgspec.msgpack.decode(data[1:])
    for _ in range(rng.randint(0, 4)):
        found = _changed(found, rng)
    fuzz_targets.records(data[:1] + msgspec.msgpack.encode(found))


def _changed(value: Any, rng: random.Random) -> Any:
    """Return a copy in which one value, at any depth, is another one."""
    if isinstance(value, list) and value and rng.random() < 0.8:
        index = rng.randrange(len(value))
        return [*value[:index], _changed(value[index], rng), *value[index + 1 :]]
    if isinstance(value, dict) and value and rng.random() < 0.8:
        key = rng.choice(sorted(value, key=repr))
        name = _leaf(rng) if rng.random() < 0.1 else key
        return {k: v for k, v in value.items() if k != key} | {name: _changed(value[key], rng)}
    return [value] if rng.random() < 0.1 else _leaf(rng)


def _leaf(rng: random.Random) -> Any:
    return rng.choice(
        [None, True, -1, 0, 1, 2**31, -(2**31) - 1, 2**63, 2**64 - 1, 0.5, -0.0, float("nan"),
         float("inf"), "", "stop", "é\0", "x" * 300, b"", b"\1\0\0\0", b"\xff" * 5]
    )  # fmt: skip


def answers(rng: random.Random) -> None:
    """Answers made of the marks of tool calls and reasoning, whole and in pieces."""
    import fuzz_targets

    head = bytes(rng.randrange(256) for _ in range(3))
    texts = [data[3:].decode() for data in fuzz_targets.TARGETS["answers"].seeds()]
    marks = [*fuzz_targets.TARGETS["answers"].words, *WORDS]
    text = ""
    for _ in range(rng.randint(1, 12)):
        piece = rng.choice(marks if rng.random() < 0.6 else texts)
        start = rng.randrange(len(piece)) if rng.random() < 0.3 else 0
        text += piece[start:]
    fuzz_targets.answers(head + text.encode())


TARGETS: Final[dict[str, Target]] = {
    each.__name__: each for each in (records, tree, groups, broadcasts, steps, answers)
}


def explore(name: str, seconds: float, first_seed: int) -> dict[str, Any]:
    """Run one target. Returns how many examples it passed (an example whose draws are more than
    hypothesis keeps is dropped and does not count), and the finding if there is one."""
    num_examples, finding = 0, ""
    start, round_seed = time.monotonic(), first_seed

    @settings(
        max_examples=EXAMPLES, deadline=None, database=None, report_multiple_bugs=False,
        phases=[Phase.generate, Phase.shrink], suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(rng=st.randoms(use_true_random=False))
    def run(rng: random.Random) -> None:
        nonlocal num_examples
        TARGETS[name](rng)
        num_examples += 1

    while not finding and time.monotonic() - start < seconds:
        try:
            seed(round_seed)(run)()
        except Exception:
            finding = traceback.format_exc()
        else:
            round_seed += 1
    return {
        "target": name,
        "seconds": round(time.monotonic() - start),
        "examples": num_examples,
        "seeds": [first_seed, round_seed],
        "finding": finding[-4000:],
    }


def main(argv: list[str]) -> int:
    parser = targets_parser(__doc__ or "", TARGETS)
    parser.add_argument("--seed", type=int, default=1, help="first round's (default: %(default)s)")
    args = parser.parse_args(argv)
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]
    names = args.targets or TARGETS
    return run_targets(names, lambda name: explore(name, args.seconds, args.seed), args.json)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
