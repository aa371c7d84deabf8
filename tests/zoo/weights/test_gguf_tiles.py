"""GGUF's matrices in a GPU's tiles: layout and weights, without a GPU.

tests/gpu/test_gpu_tiles.py has the kernels.

Planted once, and noticed: nibbles exchanged, a factor's sign, rows g and g + 8 exchanged, steps of
another block.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from helpers.gguf_blocks import draw
from helpers.tile_values import values_of
from minisgl import plugins
from minisgl.kernel.ops import Activation, Ops
from minisgl.quantization.parameter import Part
from minisgl.quantization.weight import PlainWeight, Weight, WeightBuild
from minisgl_zoo.gguf import tiles as tiles_module
from minisgl_zoo.gguf.header import TYPE_OF
from minisgl_zoo.gguf.tile_weight import BLOCKS, TileWeight
from minisgl_zoo.gguf.tiles import TILE_FORMS, Pairs, Tiles, pack_tiles
from minisgl_zoo.gguf.weight import FileTypes, MergedWeight

BF16 = torch.bfloat16
MOST_MORE = {"Q3_K": 0.037}
"""How much larger tiles may be than the file's blocks, if not 3 %: factors of 6 bits take 8."""


@pytest.mark.parametrize("kind", TILE_FORMS)
def test_tiles_have_the_values_of_the_file(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles_module, "PIECE_NUMBERS", 16 * 512)  # two pieces
    blocks, values = draw(kind, 3, (32, 512))
    tiles = pack_tiles(kind, blocks)
    for outputs, columns in ((range(16), range(64)), (range(9, 32, 11), range(250, 512, 3))):
        want = values[outputs.start : outputs.stop : outputs.step]
        want = want[:, columns.start : columns.stop : columns.step]
        assert torch.equal(values_of(tiles, outputs, columns), want)


@pytest.mark.parametrize("kind", TILE_FORMS)
def test_tiles_take_what_the_file_takes(kind: str) -> None:
    blocks, _ = draw(kind, 3, (32, 768))
    tiles = pack_tiles(kind, blocks)
    size = tiles.numbers.nbytes + tiles.factors.nbytes + tiles.scales.nbytes
    assert size == tiles.form.num_bytes(32, 768)
    assert size <= blocks.nbytes * (1 + MOST_MORE.get(kind, 0.03))


class Products:
    """`TileProducts` in torch, with the values of some tiles."""

    values: dict[int, Tensor]

    def __init__(self, ops: Ops, tiles: Tiles) -> None:
        self._values = self.values[tiles.outputs, tiles.form.bits]

    @staticmethod
    def why_not(dtype: torch.dtype) -> str | None:
        return None if dtype == BF16 else "only in bfloat16"

    def dense(self) -> Tensor:
        return self._values.to(BF16)

    def rows(self, ids_T: Tensor) -> Tensor:
        return self.dense()[ids_T]

    def linear(self, x_MD: Tensor, bias: Tensor | None, gate: Activation | None) -> Tensor:
        assert x_MD.dim() == 2
        y = F.linear(x_MD, self.dense(), bias)
        return Ops().gated(y, gate) if gate else y

    def linear_into(self, x_MD: Tensor, bias: Tensor | None, out_MF: Tensor) -> None:
        out_MF.copy_(self.linear(x_MD, bias, None))

    def logits(self, x_SD: Tensor) -> Tensor:
        return F.linear(x_SD.float(), self._values)

    def dense_rows(self, rows: range) -> Tensor:
        return self.dense()[rows.start : rows.stop]

    def experts(
        self, x: Tensor, pairs: Pairs, scales: Tensor | None, out: Tensor, gate: Activation | None
    ) -> bool:
        return False


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> type[Products]:
    """Ops of a GPU have these products."""
    found = plugins.find

    def find(table: str, name: str, **facts: str) -> Any:
        return Products if (table, name) == ("ops", "tiles") else found(table, name, **facts)

    monkeypatch.setattr(plugins, "find", find)
    return Products


def fill(weight: Weight, blocks: dict[str, Tensor]) -> None:
    """As the loader does."""
    for parameter in weight.parameters():
        shares = []
        for part in parameter.parts:
            index = [slice(None), slice(None)]
            index[part.axis] = slice(part.share.start, part.share.stop)
            shares.append(blocks[part.name.removesuffix(BLOCKS)][tuple(index)])
        rows = torch.cat(shares)
        parameter.set(F.pad(rows, (0, 0, 0, parameter.shape[0] - len(rows))))
    for node in weight.walk():
        node.init_buffers(torch.device("cpu"))


def test_a_weight(gpu: type[Products]) -> None:
    drawn = {f"{i}.weight": draw("Q4_K", i, (32, 512)) for i in range(2)}
    types = FileTypes(types={"0": "Q4_K", "1": "Q4_K"})
    parts = [Part.whole(name, 32, 512) for name in drawn]
    weight = types(WeightBuild(ops=Ops(), dtype=BF16, parts=parts, rows=80))
    assert isinstance(weight, TileWeight)
    assert weight.num_weight_bytes == TILE_FORMS["Q4_K"].num_bytes(80, 512)
    values = F.pad(torch.cat([each for _, each in drawn.values()]), (0, 0, 0, 16))
    gpu.values = {(80, 4): values}
    fill(weight, {name: blocks for name, (blocks, _) in drawn.items()})
    assert not weight.blocks.numel()
    x = torch.randn(2, 3, 512).to(BF16)
    assert torch.equal(weight.linear(x), F.linear(x, values.to(BF16)))
    assert torch.equal(weight.logits(x[0]), F.linear(x[0].float(), values))
    ids = torch.tensor([70, 3, 101])
    assert torch.equal(weight.rows(ids, range(64, 144))[0], values[6].to(BF16))
    assert not weight.rows(ids, range(64, 144))[1].any()
    row, norm = x[0], torch.rand(512).to(BF16)
    normed, total = weight.norm_linear(row, None, norm, 1e-6, None)
    assert torch.equal(normed, weight.linear(Ops().rms_norm(row, norm, 1e-6)))
    assert total is row


def test_matrices_of_several_formats(gpu: type[Products]) -> None:
    kinds = ("Q4_K", "Q4_K", "Q6_K")
    drawn = {f"{i}.weight": draw(kind, i, (16, 512)) for i, kind in enumerate(kinds)}
    types = FileTypes(types={str(i): kind for i, kind in enumerate(kinds)})
    parts = [Part.whole(name, 16, 512) for name in drawn]
    weight = types(WeightBuild(ops=Ops(), dtype=BF16, parts=parts))
    assert isinstance(weight, MergedWeight)
    values = torch.cat([each for _, each in drawn.values()])
    gpu.values = {(32, 4): values[:32], (16, 6): values[32:]}
    fill(weight, {name: blocks for name, (blocks, _) in drawn.items()})
    assert torch.equal(weight.dense(), values.to(BF16))
    x, bias = torch.randn(3, 512).to(BF16), torch.randn(48).to(BF16)
    assert torch.equal(weight.linear(x, bias), F.linear(x, values.to(BF16), bias))


def test_a_share_of_the_inputs(gpu: type[Products]) -> None:
    blocks, values = draw("Q6_K", 3, (16, 1024))
    types = FileTypes(types={"0": "Q6_K", "1": "Q8_0"})
    part = Part(name="0.weight", shape=(16, 1024), axis=1, share=range(256, 768))
    weight = types(WeightBuild(ops=Ops(), dtype=BF16, parts=[part]))
    assert isinstance(weight, TileWeight)
    size = TYPE_OF["Q6_K"].num_bytes
    assert weight.blocks.shape == (16, 2 * size)
    gpu.values = {(16, 6): values[:, 256:768]}
    share = next(weight.parameters()).parts[0].share
    assert share == range(size, 3 * size)
    fill(weight, {"0.weight": blocks})
    tiles = pack_tiles("Q6_K", blocks[:, share.start : share.stop])
    assert torch.equal(values_of(tiles, range(3), range(90)), values[:3, 256:346])


def test_a_stack_of_experts(gpu: type[Products]) -> None:
    drawn = {f"m.experts.{i}.{j}.weight": draw("Q4_K", 2 * i + j, (16, 512))
             for i in range(3) for j in range(2)}  # fmt: skip
    types = FileTypes(types={"m.experts.0": "Q4_K", "m.experts.1": "Q4_K"})
    parts = [Part.whole(name, 16, 512) for name in drawn]
    build = WeightBuild(ops=Ops(), dtype=BF16, parts=parts, stacked=3)
    weight = types(build)
    assert isinstance(weight, TileWeight)
    assert weight.blocks.shape == (3, 32, 2 * TYPE_OF["Q4_K"].num_bytes)
    assert weight.num_weight_bytes == TILE_FORMS["Q4_K"].num_bytes(96, 512)
    values = torch.cat([each for _, each in drawn.values()])
    gpu.values = {(96, 4): values}
    next(weight.parameters()).set(torch.cat([each for each, _ in drawn.values()]).view(3, 32, -1))
    weight.init_buffers(torch.device("cpu"))
    assert torch.equal(weight.dense(), values.to(BF16).view(3, 32, 512))
    several = FileTypes(types={"m.experts.0": "Q4_K", "m.experts.1": "Q6_K"})
    assert several.why_dequantised(build) == "experts of several forms"


@pytest.mark.parametrize(
    ("gate", "up", "stays"),
    [("Q4_K", "Q4_K", True), ("Q4_K", "Q6_K", False), ("IQ3_XXS", "IQ3_XXS", False)],
)
def test_down_is_dequantised_if_gate_and_up_are(
    gpu: type[Products], gate: str, up: str, stays: bool
) -> None:
    """Else each step would dequantise all of it."""
    kinds = {"gate_proj": gate, "up_proj": up, "down_proj": "Q6_K"}
    types = {f"model.layers.0.mlp.experts.{name}": kind for name, kind in kinds.items()}
    types["model.layers.1.mlp.experts.gate_proj"] = "IQ1_S"

    def why(names: tuple[str, ...], types: dict[str, str]) -> str | None:
        parts = [
            Part.whole(f"model.layers.0.mlp.experts.{index}.{name}.weight", 32, 512)
            for index in range(2)
            for name in names
        ]
        build = WeightBuild(ops=Ops(), dtype=BF16, parts=parts, stacked=2)
        return FileTypes(types=types).why_dequantised(build)

    assert (why(("gate_proj", "up_proj"), types) is None) == stays
    assert (why(("down_proj",), types) is None) == stays
    assert why(("down_proj",), {"model.layers.0.mlp.experts.down_proj": "Q6_K"})


@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_parts_of_pairs(tokens: int) -> None:
    """At least as many as experts need, however tokens choose; a token has an expert once."""
    ids = torch.stack([torch.randperm(16)[:4] for _ in range(tokens)]).int()
    for chosen in (ids, ids[:1].expand(tokens, 4)):
        counts = torch.bincount(chosen.flatten(), minlength=16)[2:12]
        needed = int((-(-counts // 8)).sum())
        most = Pairs(chosen, range(2, 12), counts.int(), chosen).most_parts(8)
        assert needed <= most <= min(tokens * 4, 10 * -(-tokens // 8))
    assert Pairs(ids, range(2, 12)).most_parts(8) == tokens * 4


def test_what_is_dequantised(gpu: type[Products]) -> None:
    types = FileTypes(types={"0": "Q4_K", "1": "Q8_0", "2": "IQ2_XS"})

    def why(name: str, shape: tuple[int, int], **changes: Any) -> str | None:
        part = changes.pop("part", None) or Part.whole(f"{name}.weight", *shape)
        build = WeightBuild(ops=Ops(), dtype=BF16, parts=[part], **changes)
        assert isinstance(types(build), PlainWeight) == (types.why_dequantised(build) is not None)
        return types.why_dequantised(build)

    assert why("0", (32, 512)) is None
    assert why("0", (48, 512), stacked=2) == "no multiple of 16 outputs"
    assert why("0", (24, 512)) == "no multiple of 16 outputs"
    assert why("1", (32, 96)) == "no multiple of 64 inputs"
    assert why("2", (32, 512)) == "IQ2_XS has no packed form"
    cut = Part(name="1.weight", shape=(32, 192), axis=1, share=range(96, 192))
    assert why("1", (32, 192), part=cut) == "a rank's share cuts a block of 64"
    build = WeightBuild(ops=Ops(), dtype=torch.float16, parts=[Part.whole("0.weight", 32, 512)])
    assert types.why_dequantised(build) == "only in bfloat16"
