"""Attention to latents compiles for GPUs that are not here, and fits their shared memory.

As `test_gpu_targets`, with no engine. fp8 needs compute capability 8.9.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.gpu_targets import TARGETS, compiled_bytes, shared_bytes_of, type_of

pytest.importorskip("triton", reason="a CPU build of torch brings none")

STEPS = (
    (20, 4, torch.bfloat16, torch.bfloat16),
    (128, 64, torch.bfloat16, torch.bfloat16),
    (20, 64, torch.float16, torch.float8_e4m3fn),
    (16, 64, torch.bfloat16, torch.int8),
    (16, 64, torch.float32, torch.float32),
)
"""Heads, decode rows, and the dtypes of queries and cache."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("target", TARGETS)
def test_attention_to_latents_compiles_and_fits(target: int, tmp_path: Path) -> None:
    shared_bytes = shared_bytes_of(__file__, target, tmp_path)
    assert set(shared_bytes) == {"_split", "_decode", "_decode_prefix", "_extend"}


def main(target: int) -> None:
    """Print the shared memory of each kernel, the most of its forms."""
    from minisgl.kernel.triton import decode_attention, extend_attention, kv_split, launch
    from minisgl.kvcache.pool import MHAKVCache

    has_pdl, launched = target >= 90, set()

    def note(
        launcher: Any, grid: object, args: Any, constants: Any, *, dtype: object,
        num_warps: int, num_stages: int = 3,
    ) -> None:  # fmt: skip
        types = tuple(map(type_of, args))
        launched.add((launcher._kernel, types, (*constants, has_pdl), num_warps, num_stages))

    patched: tuple[tuple[Any, str, Any], ...] = (
        (launch.Launcher, "__call__", note),
        (decode_attention, "has_pdl", lambda: has_pdl),
        (extend_attention, "shared_kib", lambda: TARGETS[target]),
        (kv_split, "is_hopper", lambda: target == 90),
    )
    for owner, name, value in patched:  # for as long as the process lives
        setattr(owner, name, value)
    meta = torch.device("meta")
    prefix = torch.empty(1, dtype=torch.int32, device=meta)
    for heads, count, dtype, kv_dtype in STEPS:
        if kv_dtype == torch.float8_e4m3fn and target < 89:
            continue
        pool = MHAKVCache(
            num_layers=1, num_pages=8, page_size=16, num_kv_heads=1, head_dim=576, dtype=kv_dtype,
            device=meta, values_are_keys=True,
        ).layer(0)  # fmt: skip
        rows, table = (torch.empty(size, 64, dtype=torch.int32, device=meta) for size in (4, 64))
        q, out = (torch.empty(count, heads, dim, dtype=dtype, device=meta) for dim in (576, 512))
        given: dict[str, Any] = {"scale": 0.1, "window": None, "softcap": None, "sinks": None}
        splits = kv_split.split_contexts(
            rows, q.shape, dtype, kv_dtype=kv_dtype, num_kv_heads=1, value_dim=512, window=None,
            common_prefix=prefix, rotates=False, num_cores=132, done_of_few=prefix,
        )  # fmt: skip
        decode_attention.decode(
            q, pool, table, rows, splits, common_prefix=prefix, out_BNV=out, **given
        )
        for longest in (20, 4096):
            extend_attention.extend(
                q, pool, table, rows, num_tokens=4096, longest=longest, out_TNV=out, **given
            )
    shared_bytes: Counter[str] = Counter()
    for kernel, *form in launched:
        size = compiled_bytes(kernel, target, *form)
        shared_bytes[kernel.__name__] = max(shared_bytes[kernel.__name__], size)
    print(json.dumps(shared_bytes))


if __name__ == "__main__":
    main(int(sys.argv[1]))
