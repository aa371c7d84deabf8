"""The host side of few decode rows, the delta rule, and heads of 512 dims, with a mock driver."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from helpers.hopper_kernels import addresses, delta_step, structs_of_launches, uncompiled
from minisgl.attention import AttnLayer
from minisgl.attention.paged import SHORT_CONTEXT
from minisgl_kernels import CSRC, delta_decode, few_attention, wide_attention
from minisgl_kernels.delta_decode import DeltaDecode
from minisgl_kernels.few_attention import FewAttention
from minisgl_kernels.hopper import SHARED_BYTES
from minisgl_kernels.wide_attention import WideAttention

CORES = 132


def without_a_gpu(kind: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the object as on Hopper."""
    made = kind.__new__(kind)
    driver = Mock(cubin_kernel=Mock(return_value=7), tensor_map=Mock(return_value=bytes(128)))
    made._kernels = uncompiled("left to Triton", driver)
    made._kernels._cubin = lambda kind: b"cubin"
    made._kernels.num_cores = CORES
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    return made


@pytest.mark.parametrize(
    ("file", "fields"),
    [
        ("delta_decode", delta_decode._Task._fields_),
        ("wide_attention", wide_attention._Task._fields_),
        ("few_attention", few_attention._Task._fields_),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_arguments_are_the_kernels(file: str, fields: Any) -> None:
    source = (CSRC / f"{file}.cu").read_text()
    struct = re.search(r"struct Task \{(.*?)\n\};", source, re.DOTALL)
    assert struct
    names = re.findall(r"(\w+)(?=[,;])", re.sub(r"//.*", "", struct[1]))
    assert names == [name for name, _ in fields]


def test_few_states_are_split_among_more_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = without_a_gpu(DeltaDecode, monkeypatch)
    assert [kernels._values(rows * 48) for rows in (1, 4, 16, 64, 128, 256)] == [
        *(32, 32, 64, 64, 128, 128)
    ]


def test_decode_rows_that_a_kernel_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, step = without_a_gpu(DeltaDecode, monkeypatch), delta_step(torch.bfloat16)
    assert kernels.takes(step)
    assert kernels.takes(delta_step(torch.float16, interval=16))
    assert not kernels.takes(delta_step(torch.float32))
    assert not kernels.takes(replace(step, interval=128))
    assert not kernels.takes(replace(step, states=step.states[..., :64]))
    assert not kernels.takes(replace(step, states=step.states[:, :, :64]))
    assert not kernels.takes(replace(step, skip_N=torch.zeros(6)))  # Mamba2


def test_each_tensor_of_decode_rows_is_its_field(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, step = without_a_gpu(DeltaDecode, monkeypatch), delta_step(torch.bfloat16)
    structs = structs_of_launches(kernels._kernels, delta_decode._Task)
    kernels.decode(step, 2)
    (task,) = structs
    tensors = addresses(step)
    assert len(tensors) == 12
    assert {name: getattr(task, name) for name in tensors} == tensors
    assert (task.heads, task.key_heads, task.interval, task.page_size) == (6, 6, 64, 16)


def pool_of(page_size: int, dtype: torch.dtype = torch.bfloat16) -> Any:
    k, v = torch.zeros(2, 5, page_size, 2, 512, dtype=dtype)
    return SimpleNamespace(k=k, v=v)


def test_heads_of_512_dims_that_a_kernel_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = without_a_gpu(WideAttention, monkeypatch)
    q = torch.zeros(130, 6, 512, dtype=torch.bfloat16)
    sizes = (1, 4, 7, 8, 16, 24, 32, 64, 96, 128)
    assert [s for s in sizes if kernels.takes(q, pool_of(s), q)] == [8, 16, 32, 64, 128]
    assert not kernels.takes(q[..., :256], pool_of(16), q[..., :256])
    assert not kernels.takes(q, pool_of(16), q[..., :448])  # keys of 512 dims with latents of 448
    assert not kernels.takes(q.float(), pool_of(16, torch.float32), q.float())
    assert not kernels.takes(q, pool_of(16, torch.int8), q)
    assert wide_attention.SHARED_BYTES <= SHARED_BYTES


@pytest.mark.parametrize(("page_size", "box"), [(16, 16), (128, 64)])
def test_each_tile_of_a_head_has_a_block(
    page_size: int, box: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = without_a_gpu(WideAttention, monkeypatch)
    q, table = torch.zeros(130, 6, 512, dtype=torch.bfloat16), torch.zeros(3, 9, dtype=torch.int32)
    rows = torch.zeros(4, 3, dtype=torch.int32)
    pool, out = pool_of(page_size), torch.empty_like(q)
    kernels.extend(q, pool, table, rows, scale=1.0, num_tokens=130, out_TNH=out)
    library = kernels._kernels.library
    assert library.kernel_launch.call_args.args[1] == (130 // 64 + 3) * 6
    assert [call.args for call in library.tensor_map.call_args_list] == [
        (q.data_ptr(), 130, 6 * 512, 64, 2, 64),
        *((kv.data_ptr(), 5 * page_size, 2 * 512, box, 2, 64) for kv in (pool.k, pool.v)),
    ]  # fmt: skip


def steps_of(weight_dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Any:
    fields = {"head_dim": 128, "num_q_heads": 16, "num_kv_heads": 8, "scale": 0.1, **changes}
    weights = torch.ones(2, 128, dtype=weight_dtype)
    return SimpleNamespace(
        layer=AttnLayer(layer_id=0, **fields), q_norm_weight=weights[0], k_norm_weight=weights[1],
        norm_eps=1e-6, cos_sin=torch.zeros(9, 128), norms_values=changes == {"norms_values": True},
    )  # fmt: skip


def few_pool(page_size: int = 16, dtype: torch.dtype = torch.bfloat16) -> Any:
    k, v = torch.zeros(2, 5, page_size, 8, 128, dtype=dtype)
    return SimpleNamespace(k=k, v=v)


def test_few_rows_that_a_kernel_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = without_a_gpu(FewAttention, monkeypatch)

    def takes(
        steps: Any = None, pool: Any = None, rows: int = 1, is_short: bool = True,
        dtype: torch.dtype = torch.bfloat16,
    ) -> bool:  # fmt: skip
        qkv = torch.zeros(rows, 32 * 128, dtype=dtype)
        return kernels.takes(qkv, steps or steps_of(), pool or few_pool(), is_short=is_short)

    assert takes()
    assert [rows for rows in range(1, 12) if takes(rows=rows)] == list(range(1, 9))
    assert not takes(is_short=False)
    assert takes(steps_of(window=SHORT_CONTEXT), is_short=False)
    assert not takes(steps_of(window=SHORT_CONTEXT + 1), is_short=False)
    assert not takes(steps_of(head_dim=256))
    assert not takes(steps_of(softcap=30.0))
    assert not takes(steps_of(torch.float32))
    assert not takes(steps_of(num_q_heads=136))  # 17 for a key
    assert not takes(pool=few_pool(12))
    assert not takes(pool=few_pool(dtype=torch.int8))
    assert not takes(dtype=torch.float32, pool=few_pool(dtype=torch.float32))


@pytest.mark.parametrize(
    ("rows", "blocks", "size", "threads"),
    [(1, 64, 8, 256), (2, 128, 8, 128), (3, 96, 4, 128), (8, 256, 4, 128)],
)
def test_blocks_of_few_rows_run_at_once(
    rows: int, blocks: int, size: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels, steps, pool = without_a_gpu(FewAttention, monkeypatch), steps_of(), few_pool()
    qkv = torch.zeros(rows, 32 * 128, dtype=torch.bfloat16)
    assert kernels.takes(qkv, steps, pool, is_short=True)
    launch = kernels._kernels.library.kernel_launch
    table, rows_4B, slots = (torch.zeros(4, n, dtype=torch.int32) for n in (9, rows, 1))
    kernels.decode(qkv, steps, pool, table, rows_4B, slots, torch.empty(rows, 16, 128))
    assert launch.call_args.args[1:3] == (blocks, threads)
    assert launch.call_args.args[3] <= SHARED_BYTES
    assert launch.call_args.args[4] == size
