"""Memory in huge pages: what a tensor is, and that it takes no more than its bytes."""

from __future__ import annotations

import re
from pathlib import Path

import psutil
import pytest
import torch

from minisgl.kernel.cpu import HUGE_BYTES
from minisgl.kernel.cpu import huge_empty as empty

SMAPS = Path("/proc/self/smaps")
ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(0, 8), (7,), (1500, 2000), (3, 1000, 1111)])
def test_it_is_a_tensor_like_any(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = empty(shape, dtype)
    assert (tensor.shape, tensor.dtype, tensor.is_contiguous()) == (shape, dtype, True)
    assert torch.equal(tensor.fill_(1).float(), torch.ones(shape))


def test_memory_returns_with_the_tensor() -> None:
    resident = psutil.Process().memory_info
    before = resident().rss
    tensor = empty((20, HUGE_BYTES), torch.int8).fill_(1)
    assert 0.9 * tensor.nbytes < resident().rss - before < 1.2 * tensor.nbytes
    del tensor
    assert resident().rss - before < 10 * HUGE_BYTES


HAS_NONE = not ENABLED.exists() or "[never]" in ENABLED.read_text()


@pytest.mark.skipif(HAS_NONE, reason="Linux gives no huge pages here")
def test_huge_pages_are_asked_for() -> None:
    tensor = empty((2, HUGE_BYTES + 1), torch.int8)
    asked = []
    for mapping in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", SMAPS.read_text(), flags=re.MULTILINE)[
        1:
    ]:
        start, end = (int(place, 16) for place in mapping.split(maxsplit=1)[0].split("-"))
        if start < tensor.data_ptr() + tensor.nbytes and tensor.data_ptr() < end:
            asked.append((" hg" in mapping, tensor.data_ptr() + 2 * HUGE_BYTES <= end))
    # The last bytes, which are less than a huge page, have small pages.
    assert asked[0] == (True, True)
    assert not asked[-1][0]
