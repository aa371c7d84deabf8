"""Packed weights: the CPU's linear layers against torch's. Other instruction sets: test_panels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen3Config

from helpers.gemms import draw, error, exact
from helpers.model_harness import make_reference
from minisgl.distributed import SingleRank
from minisgl.kernel.cpu import CpuOps
from minisgl.kernel.jit import load_library
from minisgl.kernel.ops import Activation, Ops
from minisgl.models.build import load_model
from minisgl.quantization.packed import PackedWeight

BF16 = torch.bfloat16
SHAPES = [(64, 256), (48, 32), (37, 64), (160, 34), (5, 16)]
"""Outputs and inputs: whole panels in pairs, an odd number of panels, panels and rows, an odd
number of steps, no panel."""
NUM_ROWS = (1, 2, 13, 100)


@pytest.fixture(scope="module")
def fast() -> CpuOps:
    return CpuOps(load_library())


@pytest.mark.parametrize("gate", [None, "silu", "gelu_tanh"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_no_less_exact_than_torch(
    fast: CpuOps, shape: tuple[int, int], gate: Activation | None
) -> None:
    """Both beside float64. torch rounds the gated parts to bfloat16, and so do we."""
    if gate and shape[0] % 2:
        pytest.skip("two halves")
    for rows in NUM_ROWS:
        weight, x, bias = draw(*shape, rows)
        packed = weight.clone()
        fast.pack(packed)
        for added in (None, bias):
            expected = exact(x, weight, added, gate)
            ours = error(fast.packed_linear(x, packed, added, gate), expected)
            theirs = error(Ops().linear(x, weight, added, gate), expected)
            assert ours <= 1.2 * theirs + 1e-6, f"{rows} rows: {ours:.2e}, torch {theirs:.2e}"


def test_threads_share_the_work(fast: CpuOps) -> None:
    weight, x, _ = draw(512, 256, 200)
    fast.pack(weight)
    alone = fast.packed_linear(x, weight, None, None)
    num_threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert torch.equal(fast.packed_linear(x, weight, None, None), alone)
    finally:
        torch.set_num_threads(num_threads)


def test_many_rows_are_torchs_where_it_has_tiles(
    fast: CpuOps, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, x, bias = draw(64, 256, 9)
    packed = weight.clone()
    fast.pack(packed)
    monkeypatch.setattr(fast, "most_packed_rows", 8)
    theirs = Ops().linear(x, weight, bias, "silu")
    assert torch.allclose(fast.packed_linear(x, packed, bias, "silu"), theirs, rtol=2**-6)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
def test_rows_of_a_packed_table(
    fast: CpuOps, shape: tuple[int, int], ids_dtype: torch.dtype
) -> None:
    weight, _, _ = draw(*shape, 1)
    packed = PackedWeight.of(fast, weight.clone())
    packed.init_buffers(torch.device("cpu"))
    assert torch.equal(packed.dense(), weight)
    ids = torch.randint(0, len(weight), (30,), dtype=ids_dtype)
    assert torch.equal(packed.rows(ids), weight[ids])
    all_ids = torch.arange(len(weight), dtype=ids.dtype)  # the first one behind the panels, too
    assert torch.equal(packed.rows(all_ids), weight)
    share = range(3, 3 + len(weight))
    ids = torch.randint(0, 2 * len(weight), (30,), dtype=ids_dtype)
    assert torch.equal(packed.rows(ids, share), Ops().embed_share(ids, weight, share))


def test_a_tied_model_holds_its_table_once(fast: CpuOps, tmp_path: Path) -> None:
    config = Qwen3Config(
        vocab_size=130, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, tie_word_embeddings=True,
    )  # fmt: skip
    make_reference(config).to(BF16).save_pretrained(tmp_path)

    def loaded(ops: Ops) -> Any:
        return load_model(
            tmp_path, dtype=BF16, device=torch.device("cpu"), ops=ops, comm=SingleRank()
        )

    packed, plain = loaded(fast), loaded(Ops())
    ids = torch.arange(130, dtype=torch.int32)
    assert torch.equal(packed.embed(ids), plain.embed(ids))
    x = torch.randn(3, 64).to(BF16)
    assert error(packed.logits(x), plain.logits(x).double()) < 2**-7
    assert packed.num_weight_bytes == plain.num_weight_bytes
    tensors = {
        tensor.data_ptr(): tensor.nbytes
        for node in packed.walk()
        for tensor in vars(node).values()
        if isinstance(tensor, Tensor)
    }
    assert sum(tensors.values()) == packed.num_weight_bytes
