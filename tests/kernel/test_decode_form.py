"""How decode attention is cut, for GPUs that are not here."""

from __future__ import annotations

import pytest
import torch

from minisgl.engine.cuda import WARM_UP_ROWS
from minisgl.kernel.decode_form import decode_form, num_counters, slot_constants


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("num_cores", [1, 46, 132])
def test_pieces_run_at_once_and_have_counters(
    num_cores: int, head_dim: int, dtype: torch.dtype
) -> None:
    counters = num_counters(num_cores)
    for pairs in range(1, 3000):
        form, pieces = decode_form(pairs, num_cores, head_dim, dtype)
        assert pieces >= 1
        if pieces > 1:
            assert pairs * pieces <= num_cores * form.programs
            assert pairs <= counters


@pytest.mark.parametrize("rotates", [True, False])
@pytest.mark.parametrize("head_dim", [128, 256])
@pytest.mark.parametrize("num_cores", [58, 108, 114, 132, 144, 148, 160])
def test_a_first_start_meets_every_kind_of_decode(
    num_cores: int, head_dim: int, rotates: bool
) -> None:
    """Unpadded: whatever number of rows a step has, its kernel was compiled."""
    for num_kv_heads in (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32, 40):

        def kind(num_rows: int, heads: int = num_kv_heads) -> object:
            pairs = num_rows * heads
            form, pieces = decode_form(pairs, num_cores, head_dim, torch.bfloat16)
            return form, slot_constants(pairs, pieces, False, rotates)

        met = {kind(num_rows) for num_rows in WARM_UP_ROWS}
        missed = [rows for rows in range(1, 1025) if kind(rows) not in met]
        assert not missed, (num_kv_heads, missed)
