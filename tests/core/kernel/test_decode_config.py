"""The configs of decode attention on several GPUs."""

from __future__ import annotations

import pytest
import torch

from minisgl.engine.cuda import WARM_UP_ROWS
from minisgl.kernel.triton.decode_config import (
    FEW_BELOW,
    MAX_SPLITS,
    decode_config,
    few_splits,
    latent_config,
    num_groups,
)


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("num_cores", [1, 46, 132])
def test_splits_of_few_rows_run_at_once(
    num_cores: int, head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    for pairs in range(1, FEW_BELOW):
        config = decode_config(pairs, num_cores, head_dim, dtype, kv_dtype)
        splits = few_splits(pairs, num_cores, config)
        most = max(num_cores * config.programs // pairs, 1)
        assert splits == MAX_SPLITS <= most or splits <= most < 2 * splits


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("rotates", [True, False])
@pytest.mark.parametrize("head_dim", [128, 256])
@pytest.mark.parametrize("num_cores", [58, 108, 114, 132, 144, 148, 160])
def test_a_first_start_meets_every_kind_of_decode(
    num_cores: int, head_dim: int, rotates: bool, kv_dtype: torch.dtype
) -> None:
    """Unpadded: whatever number of rows a step has, its kernel was compiled."""
    for num_kv_heads in (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32, 40):

        def kind(num_rows: int, heads: int = num_kv_heads) -> object:
            pairs = num_rows * heads
            config = decode_config(pairs, num_cores, head_dim, torch.bfloat16, kv_dtype)
            is_few = rotates and pairs < FEW_BELOW
            return config, few_splits(pairs, num_cores, config) if is_few else 0

        met = {kind(num_rows) for num_rows in WARM_UP_ROWS}
        missed = [rows for rows in range(1, 1025) if kind(rows) not in met]
        assert not missed, (num_kv_heads, missed)


@pytest.mark.parametrize("num_heads", [1, 3, 10, 16, 20, 64, 68, 96, 127, 128])
@pytest.mark.parametrize("num_rows", [1, 15, 16, 300])
@pytest.mark.parametrize("is_hopper", [False, True])
def test_heads_that_attend_to_latents_are_in_groups_of_one_size(
    is_hopper: bool, num_rows: int, num_heads: int
) -> None:
    config = latent_config(num_rows, num_heads, torch.bfloat16, is_hopper=is_hopper)
    assert config.heads == (64 if is_hopper and num_rows >= 16 and num_heads >= 64 else 16)
    group, rest = divmod(num_heads, num_groups(num_heads, config))
    assert rest == 0
    assert group <= config.heads
