"""How long a light key waits beside a heavy key's flood, in simulated time.

Each step takes one unit, so times are numbers of steps. A request to an idle server has its first
token after 1. Beside a flood it may take twice that plus one step.
"""

from __future__ import annotations

import numpy as np
import pytest

from helpers.fair_waits import Load, World, serve, simulate
from minisgl.scheduler import SchedulerConfig

CONFIG = SchedulerConfig(
    num_pages=4096,
    page_size=4,
    max_seq_len=512,
    vocab_size=30_000,
    eos_ids=frozenset([99]),
    max_prefill_tokens=128,
    max_running=16,
)


@pytest.mark.parametrize(
    ("num_flood", "options", "most"),
    [
        (0, {}, 1),
        (500, {}, 2.1),
        (500, {"late": False}, 3),
        (500, {"overlap": False}, 2),
    ],
)
def test_the_first_token_comes_after_so_many_steps(
    num_flood: int, options: dict[str, bool], most: float
) -> None:
    rng = np.random.default_rng(1)
    gaps = [20.0, *rng.uniform(4, 8, 59)]
    load = Load(
        num_flood=num_flood,
        prompts=(20, 100),
        outputs=(50, 200),
        light_prompt=16,
        light_output=4,
        gaps=gaps,
    )
    world = World(load=load, rng=rng, step_s=lambda plan: 1.0)
    scheduler = serve(world, CONFIG, **options)
    assert max(world.waits.values()) <= most
    assert scheduler.stats.num_retractions <= 60
    assert not num_flood or scheduler.requests.waiting, "the flood was not over"


@pytest.mark.parametrize("pages_share", [1.0, 0.3])
def test_it_waits_at_most_twice_as_long_as_alone_plus_one_step(pages_share: float) -> None:
    """With a GPU's step times and a stall bound. Either places are short or pages are."""
    alone_s, _ = simulate(0)
    p99_s, longest_step_s = simulate(150, pages_share=pages_share)
    assert p99_s <= 2 * alone_s + longest_step_s
