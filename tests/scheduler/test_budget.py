"""How often large chunks hold up requests; what becomes of that is in test_scheduler.py."""

from __future__ import annotations

import pytest

from minisgl.scheduler.budget import large_chunks


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ([5], (1, 3)),
        ([5, 5], (2, 3)),  # one chunk
        ([5, 5, 1], (2, 3 + 5)),  # the second chunk holds up the two that the first has started
        ([8, 4], (1, 3 + 4)),
        ([25], (0, 3 + 3 + 3)),
        ([10, 10], (1, 3 + 4)),
    ],
)
def test_what_large_chunks_hold_up(prompts: list[int], expected: tuple[int, int]) -> None:
    """Three decode, and a chunk has ten tokens."""
    assert large_chunks(prompts, 10, 3) == expected
