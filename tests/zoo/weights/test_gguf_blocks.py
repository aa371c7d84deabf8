"""GGUF's matrices that stay packed: products beside the values that the package gguf dequantises.

Planted once, and noticed: nibbles exchanged, a minimum of the next group, transposed blocks, the
factors of one matrix for all of a stack.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from helpers.gguf_blocks import draw
from helpers.gguf_files import write
from helpers.model_harness import Runner, Sequence, load, random_ids
from minisgl import env
from minisgl.kernel.cpu import CpuOps
from minisgl.kernel.jit import load_library
from minisgl.kernel.ops import Ops
from minisgl.models import BaseLLMModel
from minisgl.quantization.parameter import Part, TensorOwner
from minisgl.quantization.weight import PlainWeight, Weight, WeightBuild
from minisgl_zoo.gguf.blocks import DTYPES, FORMS
from minisgl_zoo.gguf.folder import gguf_folder
from minisgl_zoo.gguf.header import TYPE_OF
from minisgl_zoo.gguf.tile_weight import BLOCKS
from minisgl_zoo.gguf.weight import BlockWeight, FileTypes, MergedWeight

BF16, CPU = torch.bfloat16, torch.device("cpu")
OUT, IN = 48, 512
MIXED = ("Q4_K", "Q4_K", "Q6_K")
LOSS = 0.04
"""Of the largest logit, between bfloat16 and float32."""


@pytest.fixture(scope="module")
def fast() -> CpuOps:
    return CpuOps(load_library())


@pytest.mark.parametrize("kind", FORMS)
def test_the_kernel_reads_parts_of_rows(kind: str, fast: CpuOps) -> None:
    """`test_products` compares what it reads with the values of the package gguf."""
    form, (blocks, _) = FORMS[kind], draw(kind, 3, (48, 768))
    number, each = list(FORMS).index(kind), TYPE_OF[kind].num_bytes * (256 // form.block)

    def read(rows: Tensor, field: Any, inputs: int) -> Tensor:
        made = torch.empty(len(rows), form.width(field, inputs), dtype=DTYPES[field])
        fast.calls.read_blocks(rows, number, list(DTYPES).index(field), made)
        return made.view(torch.uint8)

    for field in form.fields:
        whole = read(blocks, field, 768)
        assert torch.equal(read(blocks[1::2], field, 768), whole[1::2]), field
        assert torch.equal(read(blocks[:, each:], field, 512), whole[:, -(-len(whole[0]) // 3) :])
    with pytest.raises(ValueError, match="another size than the field"):
        fast.calls.read_blocks(blocks[:, 1:], number, 0, torch.empty(48, 384, dtype=torch.uint8))


def fill(weight: Weight, blocks: dict[str, Tensor]) -> None:
    """As the loader does. blocks: by the names of the tensors."""
    for parameter in weight.parameters():
        parts = [part for part in parameter.parts if part.share]
        rows = []
        for part in parts:
            assert part.rearrange
            index = [slice(None), slice(None)]
            index[part.axis] = slice(part.share.start, part.share.stop)
            share = blocks[part.name.removesuffix(BLOCKS)][tuple(index)]
            rows.append(part.rearrange(share))
            if part.fills:
                rows[-1].zero_()
                part.fills(share, rows[-1])
        parameter.set(torch.cat(rows).reshape(parameter.shape))
    for node in weight.walk():
        node.init_buffers(CPU)


def make(
    ops: Ops, *kinds: str, stacked: int | None = None, share: range | None = None
) -> tuple[Any, Tensor]:
    """A weight of a matrix of each kind, and its values in float32. share: of the columns."""
    drawn = {f"{index}.weight": draw(kind, index, (OUT, IN)) for index, kind in enumerate(kinds)}
    types = FileTypes(types={str(index): kind for index, kind in enumerate(kinds)})
    parts = [
        Part(name=name, shape=(OUT, IN), axis=1, share=share) if share else
        Part.whole(name, OUT, IN)
        for name in drawn
    ]  # fmt: skip
    weight = types(WeightBuild(ops=ops, dtype=BF16, parts=parts, stacked=stacked))
    fill(weight, {name: blocks for name, (blocks, _) in drawn.items()})
    values = torch.cat([values for _, values in drawn.values()])
    values = values[:, share.start : share.stop] if share else values
    return weight, values.view(stacked, -1, IN) if stacked else values


def check(weight: Weight, dense: Tensor, rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, dense.shape[1], generator=generator).to(BF16)
    x[:, 7] *= 300  # what models' activations have
    bias = torch.randn(len(dense), generator=generator).to(BF16)
    y = weight.linear(x, bias)
    exact = F.linear(x.double(), dense.double())
    # Inputs are rounded to int16, whose scale is a power of two: off by 2**-15 of the largest.
    off = x.double().abs().amax(1, keepdim=True) * 2**-15 * dense.double().abs().sum(1)
    expected = exact + bias.double()
    bound = off + 2**-8 * expected.abs()
    assert ((y.double() - expected).abs() / bound).max() <= 1, f"{rows} rows"
    gated = weight.linear(x, gate="silu")
    gate, up = exact.bfloat16().double().chunk(2, -1)
    expected = F.silu(gate) * up
    # Each half may round to the other side, too. The slope of silu is below 1.1.
    off_gate, off_up = (off + 2**-7 * exact.abs()).chunk(2, -1)
    bound = 1.1 * off_gate * (up.abs() + off_up) + F.silu(gate).abs() * off_up
    bound += 2**-7 * expected.abs()  # rounded twice
    assert ((gated.double() - expected).abs() / bound).max() <= 1, f"{rows} rows, gated"


@pytest.mark.parametrize("kind", FORMS)
def test_products(fast: CpuOps, kind: str) -> None:
    weight, dense = make(fast, kind, kind)
    assert isinstance(weight, BlockWeight)
    assert torch.equal(weight.dense(), dense.to(BF16))
    ids = torch.tensor([5, 0, 95, 40, 16])
    assert torch.equal(weight.rows(ids), dense[ids].to(BF16))
    for rows in (1, 5, 13, 100):
        check(weight, dense, rows)


def test_the_largest_sums_of_products(fast: CpuOps) -> None:
    """All numbers are -32, and the low digits of all inputs -128: eight products make 2**15."""
    blocks = torch.zeros(OUT, IN // 256, 210, dtype=torch.uint8)
    blocks[..., 192:208], blocks[..., 209] = 1, 0x3C  # factors; the scale is 1
    types = FileTypes(types={"0": "Q6_K"})
    part = Part.whole("0.weight", OUT, IN)
    weight = types(WeightBuild(ops=fast, dtype=BF16, parts=[part]))
    fill(weight, {"0.weight": blocks.view(OUT, -1)})
    y = weight.linear(torch.full((1, IN), 1 + 2**-7, dtype=BF16))
    assert torch.equal(y, torch.full((1, OUT), -32 * IN * (1 + 2**-7), dtype=BF16))


def test_matrices_of_several_forms(fast: CpuOps) -> None:
    weight, dense = make(fast, *MIXED, "Q5_0")
    assert isinstance(weight, MergedWeight)
    assert torch.equal(weight.dense(), dense.to(BF16))
    for rows in (1, 13):
        check(weight, dense, rows)


def test_a_share_of_the_columns(fast: CpuOps) -> None:
    weight, dense = make(fast, "Q4_K", "Q4_K", share=range(256, 512))
    assert isinstance(weight, BlockWeight)
    check(weight, dense, 3)
    part = Part(name="0.weight", shape=(OUT, IN), axis=1, share=range(128, 256))
    types = FileTypes(types={"0": "Q4_K"})
    assert (
        types.why_dequantised(WeightBuild(ops=fast, dtype=BF16, parts=[part]))
        == "a rank's share cuts a block of 256"
    )


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "Q8_0"])
def test_a_stack_of_experts(fast: CpuOps, kind: str) -> None:
    weight, dense = make(fast, *[kind] * 4, stacked=2)
    for index in range(2):
        check(weight[index], dense[index], 3)


def test_what_is_dequantised(fast: CpuOps) -> None:
    parts = [Part.whole(f"{index}.weight", OUT, IN) for index in range(2)]
    odd = [Part.whole("0.weight", 24, IN)]
    types = FileTypes(types={"0": "Q4_0", "1": "IQ2_XS", "2": "Q8_0"})
    assert type(types(WeightBuild(ops=Ops(), dtype=BF16, parts=parts[:1]))) is PlainWeight
    assert type(types(WeightBuild(ops=fast, dtype=torch.float32, parts=parts[:1]))) is PlainWeight
    for held, stacked, why in (
        (parts, None, "IQ2_XS has no packed form"),
        (odd, None, "no multiple of 16 outputs"),
        ([parts[0], Part.whole("2.weight", OUT, IN)], 1, "experts of several forms"),
        ([parts[0], Part.whole("3.weight", OUT, IN)], None, "merged with a matrix that is not"),
    ):
        assert why in (
            types.why_dequantised(WeightBuild(ops=fast, dtype=BF16, parts=held, stacked=stacked))
            or ""
        )
        assert isinstance(
            types(WeightBuild(ops=fast, dtype=BF16, parts=held, stacked=stacked)), PlainWeight
        )


# --- whole files ------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_library()  # compiled kernels are in the cache
    monkeypatch.setattr(env, "cache_dir", lambda: tmp_path / "cache")


def logits(model: BaseLLMModel, ops: Ops) -> Tensor:
    sequence = Sequence(random_ids(19, 3), 1)
    with torch.inference_mode():
        Runner(model, page_size=4, ops=ops).generate([sequence], chunk=32)
    return torch.cat(sequence.logits).float()


def weights(node: TensorOwner) -> Iterator[Tensor]:
    """All of a model, merged ones as one, as values."""
    if isinstance(node, Weight):
        yield node.dense()
        return
    for child in node.children():
        yield from weights(child)


@pytest.mark.parametrize(
    ("arch", "kind"),
    [
        ("llama", "Q4_K"), ("llama", "Q4_0"), ("qwen2", "Q6_K"), ("qwen3", "Q8_0"),
        ("qwen3moe", "Q4_K"), ("qwen35", "Q8_0"), ("gemma3", "Q5_K"),
    ],
)  # fmt: skip
def test_a_file(
    arch: str, kind: str, tmp_path: Path, fast: CpuOps, caplog: pytest.LogCaptureFixture
) -> None:
    """Each weight has the values of the file. The logits differ by bfloat16's rounding, where no
    router makes another choice."""
    write(tmp_path / "m.gguf", arch, Kind[kind])
    folder = gguf_folder(tmp_path / "m.gguf")
    with caplog.at_level(logging.INFO):
        model = load(folder, BF16, ops=fast)
    assert f"{kind} in {FORMS[kind].bits_in_memory:.2f} bits a weight" in caplog.text
    plain = load(folder)
    for ours, exact in zip(weights(model), weights(plain), strict=True):
        assert torch.equal(ours, exact.to(BF16))
    assert model.num_weight_bytes < 0.4 * plain.num_weight_bytes
    if arch != "qwen3moe":
        exact = logits(plain, Ops())
        assert (logits(model, fast) - exact).abs().max() <= LOSS * exact.abs().max()
