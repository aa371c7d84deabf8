"""An encoder: absolute positions, attention in both directions, norms after the residual additions.

A prompt is one chunk (`SchedulerConfig.is_encoder`), so all its keys are in the step: they are
attended to where the projection wrote them, and nothing is cached. There is no padding: the step's
prompts are sorted by length, those of one length attend in one call, and everything else runs over
all tokens.

Axes: T tokens of this step, S tokens to return, P prompts of one length L, D hidden size, F
intermediate size, N heads, H head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.attention import AttnLayer, BaseAttnBackend, BaseAttnMetadata
from minisgl.core import Batch, Context, Plan, PoolBatch
from minisgl.core.groups import FULL, CacheGroup
from minisgl.layers import (
    BaseOP,
    BuildContext,
    LinearColParallelMerged,
    LinearQKVMerged,
    LinearRowParallel,
    OPList,
    VocabParallelEmbedding,
)
from minisgl.models.spec import BaseLLMModel, LayerSpec, ModelSpec, PoolBuild, PoolSpec
from minisgl.quantization import Part


class Encoder(BaseLLMModel):
    """Embeddings of words, positions and token types, then blocks, and for scores a head."""

    def __init__(self, spec: ModelSpec, build: BuildContext, num_positions: int) -> None:
        super().__init__(spec)
        config = spec.config
        stored = config.fields.integer("max_position_embeddings")
        self.offset = stored - config.max_context
        self.words = VocabParallelEmbedding(
            build,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            name="embeddings.word_embeddings.weight",
        )
        types = config.fields.integer("type_vocab_size")
        self.positions = Table(build, spec, "position", stored)
        self.types = Table(build, spec, "token_type", types)
        self.norm = LayerNorm(build, spec, "embeddings.LayerNorm")
        self.blocks = OPList([EncoderBlock(build, spec, layer) for layer in spec.layers])
        self.head = Head(build, spec) if spec.num_labels else None

    @property
    def pools(self) -> tuple[PoolSpec, ...]:
        return self.layout.pools

    def forward(self, batch: Batch) -> Tensor:
        [view] = batch.pools
        rows: Rows = view.attn_metadata
        positions_T = view.positions[rows.order_T].long() + self.offset
        ids_T = batch.input_ids[rows.order_T]
        has_types = self.head is not None and len(self.types.weight) > 1
        types_T = token_types(ids_T, rows.runs) if has_types else 0
        x_TD = self.words.forward(ids_T) + self.types.weight[types_T]
        x_TD = self.norm.forward(x_TD.add_(self.positions.weight[positions_T]))
        for block in self.blocks:
            x_TD = block.forward(x_TD, rows.runs)
        return x_TD[rows.places_T[batch.sample_positions]]

    def logits(self, x_SD: Tensor, own_rows: bool = False) -> Tensor:
        """Return the numbers of the head, [S, labels]. Without a head, only the steps that start-up
        measures sample, and nobody reads their ids."""
        return self.head.forward(x_SD) if self.head else torch.zeros(len(x_SD), 1)


def token_types(ids_T: Tensor, runs: Sequence[tuple[int, int]]) -> Tensor:
    """Return the type of each token, int64 [T]: 1 for those behind the first separator of their
    row. It is the id that ends the row."""
    types, sizes = [], [count * length for count, length in runs]
    for part, run in zip(torch.split(ids_T, sizes), runs, strict=True):
        is_end = part.view(run) == part.view(run)[:, -1:]
        types.append((is_end.cumsum(1) - is_end.long() > 0).flatten().long())
    return torch.cat(types)


class Head(BaseOP):
    """Two layers, [S, D] -> [S, labels], from the first token's hidden states. Families give their
    tensors BERT's names."""

    pool: Tensor
    pool_bias: Tensor
    out: Tensor
    out_bias: Tensor

    def __init__(self, build: BuildContext, spec: ModelSpec) -> None:
        super().__init__()
        size = spec.config.hidden_size
        for own, name, rows in (
            ("pool", "pooler.dense", size),
            ("out", "classifier", spec.num_labels),
        ):
            self.declare(own, build.dtype, Part.whole(f"{name}.weight", rows, size))
            self.declare(f"{own}_bias", build.dtype, Part.whole(f"{name}.bias", rows))

    def forward(self, x_SD: Tensor) -> Tensor:
        pooled_SD = torch.tanh(F.linear(x_SD, self.pool, self.pool_bias))
        return F.linear(pooled_SD, self.out, self.out_bias)


class EncoderBlock(BaseOP):
    """Attention, norm, MLP, norm."""

    def __init__(self, build: BuildContext, spec: ModelSpec, layer: LayerSpec) -> None:
        super().__init__()
        size, wide = spec.config.hidden_size, spec.config.intermediate_size
        prefix = "encoder.layer." + layer.prefix.rpartition(".")[2]
        attention = f"{prefix}.attention.self"
        self.layer = layer
        self.qkv = LinearQKVMerged(
            build,
            in_size=size,
            num_q_heads=layer.num_heads,
            num_kv_heads=layer.num_heads,
            head_dim=layer.head_dim,
            bias=True,
            names=(f"{attention}.query", f"{attention}.key", f"{attention}.value"),
        )
        self.out = _output(build, f"{prefix}.attention.output.dense", size, size)
        self.attention_norm = LayerNorm(build, spec, f"{prefix}.attention.output.LayerNorm")
        self.up = LinearColParallelMerged(
            build,
            in_size=size,
            out_size=wide,
            bias=True,
            names=(f"{prefix}.intermediate.dense",),
        )
        self.down = _output(build, f"{prefix}.output.dense", wide, size)
        self.mlp_norm = LayerNorm(build, spec, f"{prefix}.output.LayerNorm")

    def forward(self, x_TD: Tensor, runs: Sequence[tuple[int, int]]) -> Tensor:
        """Return the output of the tokens, which are sorted by `Rows`. runs: see there."""
        heads, attended = (3, self.layer.num_heads, self.layer.head_dim), []
        sizes = [count * length for count, length in runs]
        parts = torch.split(self.qkv.forward(x_TD), sizes)
        for part, run in zip(parts, runs, strict=True):
            q, k, v = part.view(*run, *heads).permute(2, 0, 3, 1, 4)  # each [P, N, L, H]
            attended.append(F.scaled_dot_product_attention(q, k, v).transpose(1, 2))
        attended_TD = torch.cat([each.reshape(-1, x_TD.shape[1]) for each in attended])
        x_TD = self.attention_norm.forward(self.out.forward(attended_TD).add_(x_TD))
        wide_TF = F.gelu(self.up.forward(x_TD))
        return self.mlp_norm.forward(self.down.forward(wide_TF).add_(x_TD))


def _output(build: BuildContext, name: str, in_size: int, out_size: int) -> LinearRowParallel:
    return LinearRowParallel(
        build, in_size=in_size, share=range(in_size), out_size=out_size, bias=True, name=name
    )


class Table(BaseOP):
    """The embedding of small numbers, [rows, D]."""

    weight: Tensor

    def __init__(self, build: BuildContext, spec: ModelSpec, name: str, rows: int) -> None:
        super().__init__()
        part = Part.whole(f"embeddings.{name}_embeddings.weight", rows, spec.config.hidden_size)
        self.declare("weight", build.dtype, part)


class LayerNorm(BaseOP):
    """[T, D] -> the same shape, with a weight and a bias (Ba et al. 2016)."""

    weight: Tensor
    bias: Tensor

    def __init__(self, build: BuildContext, spec: ModelSpec, name: str) -> None:
        super().__init__()
        self.eps = spec.config.norm_eps
        for part in ("weight", "bias"):
            self.declare(part, build.dtype, Part.whole(f"{name}.{part}", spec.config.hidden_size))

    def forward(self, x_TD: Tensor) -> Tensor:
        return F.layer_norm(x_TD, x_TD.shape[-1:], self.weight, self.bias, self.eps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows(BaseAttnMetadata):
    """The rows of a step, by length.

    order_T: int64, the tokens of the shortest rows first. places_T: int64, where each token is in
    that order. runs: (number of rows, their length), ascending by length.
    """

    order_T: Tensor
    places_T: Tensor
    runs: Sequence[tuple[int, int]]


class NoBackend(BaseAttnBackend):
    """Sorts the rows of a step. The blocks attend themselves, because they need no cache."""

    name = "torch, in both directions"

    def prepare(self, plan: Plan) -> Rows:
        lengths = np.array(plan.ends) - np.array(plan.starts)
        order_T = np.argsort(lengths.repeat(lengths), kind="stable")
        sizes, counts = np.unique(lengths, return_counts=True)
        return Rows(
            order_T=torch.from_numpy(order_T),
            places_T=torch.from_numpy(np.argsort(order_T)),
            runs=list(zip(counts.tolist(), sizes.tolist(), strict=True)),
        )

    def forward(
        self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, layer: AttnLayer, batch: PoolBatch
    ) -> Tensor:
        raise AssertionError("an encoder attends without a cache")


class NoPool(PoolSpec):
    """A pool whose pages have no bytes."""

    is_recurrent: ClassVar[bool] = True

    def context(self, build: PoolBuild) -> Context:
        return Context(kv_pool=self, page_table=build.page_table(self.group), attn=NoBackend())

    def layer(self, index: int) -> None:
        """Return the cache of a layer."""

    def guarded(self, layer: object, groups: Sequence[CacheGroup]) -> list[tuple[int, Tensor]]:
        return []

    def page_bytes(self, group: int, page_size: int, dtype: torch.dtype) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class Uncached:
    """Layers that cache nothing (`minisgl.models.spec.RecurrentSpec`)."""

    groups: tuple[CacheGroup, ...] = (FULL,)

    def width(self, layer: LayerSpec) -> int:
        return 4 * layer.num_heads * layer.head_dim

    def pool(self, layer: LayerSpec, groups: Sequence[CacheGroup]) -> PoolSpec:
        return NoPool(
            group=groups.index(FULL),
            num_layers=0,
            num_kv_heads=layer.num_heads,
            head_dim=layer.head_dim,
        )
