"""common_prefix_length against a loop."""

from __future__ import annotations

import numpy as np
import pytest

from minisgl.kernel.radix import common_prefix_length, load_common_prefix

TWINS = pytest.mark.parametrize("common_prefix", [common_prefix_length, load_common_prefix()])


@TWINS
def test_against_a_loop(common_prefix) -> None:
    rng = np.random.default_rng(0)
    for _ in range(500):
        lengths = rng.integers(0, 80, 2)
        a, b = (rng.integers(0, 2, n).astype(np.int32) for n in lengths)
        shared = int(rng.integers(0, min(lengths) + 1))
        b[:shared] = a[:shared]
        want = 0
        while want < min(lengths) and a[want] == b[want]:
            want += 1
        got = common_prefix(a, b)
        assert got == want
        assert isinstance(got, int)


@TWINS
def test_every_position_of_the_difference(common_prefix) -> None:
    a = np.arange(70, dtype=np.int32)
    for at in range(70):
        b = a.copy()
        b[at] ^= -(2**31)
        assert common_prefix(a, b) == at
    assert common_prefix(a, a) == 70
    assert common_prefix(a[3:], a[3:50]) == 47


@TWINS
def test_read_only_ids(common_prefix) -> None:
    a = np.arange(20, dtype=np.int32)
    assert common_prefix(a, np.frombuffer(a.tobytes(), "<i4")) == 20


def test_arrays_that_are_no_run_of_ids_are_refused() -> None:
    common_prefix, a = load_common_prefix(), np.arange(20, dtype=np.int32)
    for wrong in (a.astype(np.int64), a[::2], a.reshape(4, 5)):
        with pytest.raises(ValueError, match="contiguous int32 arrays"):
            common_prefix(a, wrong)
