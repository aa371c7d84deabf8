"""Which sums go through the GPUs' shared memory."""

from __future__ import annotations

import pytest
import torch

from minisgl.distributed import DistributedInfo
from minisgl_kernels.all_reduce import PACK_BYTES, ROW_ITEMS, ROW_THREADS
from minisgl_kernels.peer import (
    MAX_SHARE_BYTES,
    SECOND_TRIP_BYTES,
    PeerAllReduce,
    choose_algorithm,
)

ROW = 5120 * 2  # bytes of Qwen3-32B's


@pytest.mark.parametrize(
    ("num_bytes", "size", "expected"),
    [
        (ROW, 4, "one_shot"),
        (256 * ROW, 4, "two_shot"),
        (64 * ROW, 2, "one_shot"),  # two trips of two ranks carry as much as one
        (8192 * ROW, 4, None),
        (0, 4, None),
        (ROW + 2, 4, None),
        (MAX_SHARE_BYTES, 2, "one_shot"),
        (MAX_SHARE_BYTES + 16, 2, "two_shot"),
        (4 * MAX_SHARE_BYTES, 4, "two_shot"),
        (4 * MAX_SHARE_BYTES + 16, 4, None),
    ],
)
def test_where_a_sum_goes(num_bytes: int, size: int, expected: str | None) -> None:
    assert choose_algorithm(num_bytes, size, MAX_SHARE_BYTES) == expected


def test_one_trip_until_two_send_much_less() -> None:
    for size in (3, 4, 8):
        sizes = range(16, 4 << 20, 2 << 10)
        chosen = [choose_algorithm(num_bytes, size, MAX_SHARE_BYTES) for num_bytes in sizes]
        border = chosen.index("two_shot")
        assert set(chosen[:border]) == {"one_shot"}
        assert set(chosen[border:]) == {"two_shot"}
        one_trip, two_trips = (size - 1), 2 * (size - 1) / size
        assert sizes[border] * (one_trip - two_trips) == pytest.approx(SECOND_TRIP_BYTES, rel=0.2)


@pytest.mark.parametrize(("num_rows", "expected"), [(1, None), (2, "two_shot")])
def test_a_single_row_is_not_shared_among_ranks(num_rows: int, expected: str | None) -> None:
    """Rank 0's share would be taken for all rows."""
    peers = object.__new__(PeerAllReduce)
    peers._info, peers._row_packs = DistributedInfo(rank=0, size=16), 0
    peers._capacity = MAX_SHARE_BYTES // PACK_BYTES
    row_bytes = ROW_THREADS * ROW_ITEMS * PACK_BYTES
    assert choose_algorithm(row_bytes, 16, MAX_SHARE_BYTES) == "two_shot"
    assert peers.row_algorithm(torch.empty(num_rows, row_bytes // 4)) == expected
