"""An encoder: each token attends to its whole text, so a text has no cache.

A prompt is one chunk (`SchedulerConfig.is_encoder`), so all its keys are in the step: they are
attended to where the projection wrote them. There is no padding: the step's prompts are sorted by
length, and everything but attention runs over all tokens. Prompts of one length attend in one call;
a GPU has a kernel for all lengths, in 16 bits. What differs between families is a `Form`, and the
order of norms a class of blocks. Blocks of a decoder may attend in both directions, too
(`both_ways`).

Axes: T tokens of this step, S tokens to return, P prompts of one length L, D hidden size, F
intermediate size, N heads, K key/value heads, H head dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.attention import AttnLayer, BaseAttnBackend, BaseAttnMetadata
from minisgl.core import Batch, Context, Plan, PoolBatch
from minisgl.core.args import EngineConfig
from minisgl.core.groups import FULL, CacheGroup
from minisgl.errors import ConfigError
from minisgl.layers import (
    BaseOP,
    BuildContext,
    Identity,
    LinearColParallelMerged,
    LinearQKVMerged,
    LinearRowParallel,
    OPList,
    RotaryEmbedding,
    VocabParallelEmbedding,
    get_rope,
)
from minisgl.models.spec import (
    EMBEDDING,
    BaseLLMModel,
    LayerSpec,
    ModelSpec,
    PoolBuild,
    PoolSpec,
)
from minisgl.quantization import Part

Runs = Sequence[tuple[int, int]]
"""(number of rows, their length), ascending by length. The tokens of a step are in this order."""


NORMS = (
    ("post_attention_layernorm", "post_mlp_layernorm"),
    ("input_layernorm", "post_attention_layernorm"),
)
"""The names of a block's norms, behind the residual additions and before their halves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """How a family differs from others.

    offset: the row of the first position in the table of positions; None without a table. types:
    rows of the table of token types. buckets: of a bias by distance (`distance_buckets`). rotates:
    queries and keys. activation: of the MLP, whose first half it gates if `is_gated`. is_prenorm:
    norms go before attention and MLP, not behind the residual additions. norm_bias, head_bias:
    whether there are any. head_activation, head_norms: between the head's layers. head_means: it
    gets the mean of a prompt, not the first token.
    """

    offset: int | None = None
    types: int = 0
    buckets: int = 0
    rotates: bool = False
    activation: Callable[[Tensor], Tensor] = F.gelu
    is_gated: bool = False
    is_prenorm: bool = False
    norm_bias: bool = True
    head_activation: Callable[[Tensor], Tensor] = torch.tanh
    head_norms: bool = False
    head_bias: bool = True
    head_means: bool = False


class Encoder(BaseLLMModel):
    """Embeddings of words, positions and token types, then blocks, and for scores a head."""

    def __init__(
        self, spec: ModelSpec, build: BuildContext, num_positions: int, form: Form
    ) -> None:
        super().__init__(spec)
        config, self.form, size = spec.config, form, spec.config.hidden_size
        self.words = VocabParallelEmbedding(
            build, vocab_size=config.vocab_size, hidden_size=size, name=EMBEDDING
        )
        self.positions = self.types = self.distances = None
        if form.offset is not None:
            stored = config.max_context + form.offset
            self.positions = Table(build, "model.embed_positions.weight", stored, size)
        if form.types:
            self.types = Table(build, "model.embed_types.weight", form.types, size)
        if form.buckets:
            heads = config.num_heads
            self.distances = Table(build, "model.distances.weight", form.buckets, heads)
        self.norm = LayerNorm(build, spec, form, "model.embed_norm")
        ropes = {
            layer.rope: get_rope(build, layer.rope, num_positions)
            for layer in spec.layers
            if form.rotates
        }
        block = PreNormBlock if form.is_prenorm else EncoderBlock
        self.blocks = OPList(
            [block(build, spec, form, layer, ropes.get(layer.rope)) for layer in spec.layers]
        )
        self.last_norm = LayerNorm(build, spec, form, "model.norm") if form.is_prenorm else None
        self.head = Head(build, spec, form) if spec.num_labels else None

    @property
    def pools(self) -> tuple[PoolSpec, ...]:
        return self.layout.pools

    def forward(self, batch: Batch) -> Tensor:
        [view] = batch.pools
        rows: Rows = view.attn_metadata
        positions_T, ids_T = view.positions[rows.order_T], batch.input_ids[rows.order_T]
        x_TD = self.words.forward(ids_T)
        if self.types:
            has_pairs = self.head is not None and self.form.types > 1
            x_TD = x_TD + self.types.weight[token_types(ids_T, rows.runs) if has_pairs else 0]
        if self.positions:
            x_TD = x_TD + self.positions.weight[positions_T.long() + (self.form.offset or 0)]
        x_TD = self.norm.forward(x_TD)
        if self.distances:
            rows = replace(rows, varlen=None)
            rows.memo["masks of None"] = [self._distances(length) for _, length in rows.runs]
        for block in self.blocks:
            x_TD = block.forward(x_TD, positions_T, rows)
        if self.last_norm:
            x_TD = self.last_norm.forward(x_TD)
        if self.head and self.form.head_means:
            x_TD = torch.cat([_mean(part) for part in split(x_TD, rows.runs)])
        return x_TD[rows.places_T[batch.sample_positions]]

    def _distances(self, length: int) -> Tensor:
        """Return what attention adds to its scores, [1, N, L, L]."""
        assert self.distances
        weight = self.distances.weight
        buckets_LL = distance_buckets(_apart(length, weight.device), self.form.buckets)
        return weight[buckets_LL].permute(2, 0, 1)[None]

    def logits(self, x_SD: Tensor, own_rows: bool = False) -> Tensor:
        """Return the numbers of the head, [S, labels]. Without a head, only the steps that start-up
        measures sample, and nobody reads their ids."""
        return self.head.forward(x_SD) if self.head else x_SD.new_zeros(len(x_SD), 1)


def _apart(length: int, device: torch.device) -> Tensor:
    """Return the distance of each key from each query, [L, L]."""
    places_L = torch.arange(length, device=device)
    return places_L - places_L[:, None]


def window_mask(window: int | None, length: int, device: torch.device) -> Tensor | None:
    """Return which keys a query reads, [L, L]: half of the window on each side, and its own. None
    if it reads all."""
    if window is None or length <= window // 2 + 1:
        return None
    return _apart(length, device).abs() <= window // 2


def attend(
    qkv: Sequence[Tensor], rows: Rows, window: int | None, scale: float | None = None
) -> Tensor:
    """Return what each query reads of its own text, [T, N * H]. qkv: q [T, N, H], k and v
    [T, K, H], in the order of `rows`."""
    q_TNH, k_TKH, v_TKH = qkv
    if rows.varlen:
        group, longest = q_TNH.shape[1] // k_TKH.shape[1], rows.runs[-1][1]
        k_TNH, v_TNH = (x_TKH.repeat_interleave(group, 1) for x_TKH in (k_TKH, v_TKH))
        half = -1 if window is None else window // 2
        return rows.varlen(
            q_TNH, k_TNH, v_TNH, rows.firsts, rows.firsts, longest, longest, scale=scale,
            window_size=(half, half),
        ).flatten(1)  # fmt: skip
    device = q_TNH.device
    masks: list[Tensor | None] = rows.once(
        f"masks of {window}",
        lambda: [window_mask(window, length, device) for _, length in rows.runs],
    )
    attended = []
    for *parts, mask in zip(*(split(x_TNH, rows.runs) for x_TNH in qkv), masks, strict=True):
        q, k, v = (x_PLNH.transpose(1, 2) for x_PLNH in parts)
        read = F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=True)
        attended.append(read.transpose(1, 2).flatten(2).flatten(0, 1))
    return torch.cat(attended)


def split(x_T: Tensor, runs: Runs) -> list[Tensor]:
    """Return the rows of each run, [P, L, ...]."""
    parts = torch.split(x_T, [count * length for count, length in runs])
    return [part.view(*run, *part.shape[1:]) for part, run in zip(parts, runs, strict=True)]


def _mean(x_PLD: Tensor) -> Tensor:
    """Return the mean of each prompt at all its tokens, [P * L, D]."""
    return x_PLD.mean(1, keepdim=True).expand_as(x_PLD).flatten(0, 1)


def token_types(ids_T: Tensor, runs: Runs) -> Tensor:
    """Return the type of each token, int64 [T]: 1 for those behind the first separator of their
    row. It is the id that ends the row."""
    types = []
    for ids_PL in split(ids_T, runs):
        is_end = ids_PL == ids_PL[:, -1:]
        types.append((is_end.cumsum(1) - is_end.long() > 0).flatten().long())
    return torch.cat(types)


def distance_buckets(apart: Tensor, buckets: int, farthest: int = 128) -> Tensor:
    """Return the bucket of each distance, key minus query. Half of the buckets are for keys behind
    the query. Of a half, the first half are single distances, and the rest grow as logarithms up to
    `farthest` (T5, Raffel et al. 2020, section 2.1; MPNet)."""
    half = buckets // 2
    single, far = half // 2, apart.abs()
    grown = torch.log(far.clamp(min=1).float() / single) / math.log(farthest / single)
    large = (single + (grown * (half - single)).long()).clamp(max=half - 1)
    return (apart > 0) * half + torch.where(far < single, far, large)


class EncoderBlock(BaseOP):
    """Attention, norm, MLP, norm."""

    def __init__(
        self,
        build: BuildContext,
        spec: ModelSpec,
        form: Form,
        layer: LayerSpec,
        rope: RotaryEmbedding | None,
    ) -> None:
        super().__init__()
        size, wide = spec.config.hidden_size, spec.config.intermediate_size
        prefix, self.layer, self.form, self.rope = layer.prefix, layer, form, rope
        self.qkv = LinearQKVMerged(
            build,
            in_size=size,
            num_q_heads=layer.num_heads,
            num_kv_heads=layer.num_heads,
            head_dim=layer.head_dim,
            bias=spec.qkv_bias,
            names=(
                f"{prefix}.self_attn.q_proj",
                f"{prefix}.self_attn.k_proj",
                f"{prefix}.self_attn.v_proj",
            ),
        )
        self.out = _output(build, f"{prefix}.self_attn.o_proj", size, size, spec.o_bias)
        names = [f"{prefix}.mlp.gate_proj"] if form.is_gated else []
        self.up = LinearColParallelMerged(
            build,
            in_size=size,
            out_size=wide,
            bias=spec.mlp_bias,
            names=(*names, f"{prefix}.mlp.up_proj"),
        )
        self.down = _output(build, f"{prefix}.mlp.down_proj", wide, size, spec.mlp_bias)
        first, second = NORMS[form.is_prenorm]
        is_bare = form.is_prenorm and layer is spec.layers[0]
        self.attention_norm: LayerNorm | Identity = (
            Identity() if is_bare else LayerNorm(build, spec, form, f"{prefix}.{first}")
        )
        self.mlp_norm = LayerNorm(build, spec, form, f"{prefix}.{second}")

    def forward(self, x_TD: Tensor, positions_T: Tensor, rows: Rows) -> Tensor:
        x_TD = self.attention_norm.forward(self.attend(x_TD, positions_T, rows).add_(x_TD))
        return self.mlp_norm.forward(self.mlp(x_TD).add_(x_TD))

    def attend(self, x_TD: Tensor, positions_T: Tensor, rows: Rows) -> Tensor:
        q_TNH, k_TNH, v_TNH = (
            self.qkv.forward(x_TD).view(-1, 3, self.layer.num_heads, self.layer.head_dim).unbind(1)
        )
        if self.rope:
            q_TNH, k_TNH = self.rope.forward(q_TNH, k_TNH, positions_T)
        return self.out.forward(attend((q_TNH, k_TNH, v_TNH), rows, self.layer.window))

    def mlp(self, x_TD: Tensor) -> Tensor:
        wide = self.up.forward(x_TD)
        if not self.form.is_gated:
            return self.down.forward(self.form.activation(wide))
        gate_TF, up_TF = wide.chunk(2, -1)
        return self.down.forward(self.form.activation(gate_TF).mul_(up_TF))


class PreNormBlock(EncoderBlock):
    """Norm, attention, norm, MLP. The first block has no first norm."""

    def forward(self, x_TD: Tensor, positions_T: Tensor, rows: Rows) -> Tensor:
        x_TD = self.attend(self.attention_norm.forward(x_TD), positions_T, rows).add_(x_TD)
        return self.mlp(self.mlp_norm.forward(x_TD)).add_(x_TD)


def _output(
    build: BuildContext, name: str, in_size: int, out_size: int, bias: bool
) -> LinearRowParallel:
    return LinearRowParallel(
        build, in_size=in_size, share=range(in_size), out_size=out_size, bias=bias, name=name
    )


class Table(BaseOP):
    """A small matrix, [rows, columns], maybe with a bias; `--quantization` leaves it as it is."""

    weight: Tensor
    bias: Tensor | None = None

    def __init__(
        self, build: BuildContext, name: str, rows: int, columns: int, bias: bool = False
    ) -> None:
        super().__init__()
        self.declare("weight", build.dtype, Part.whole(name, rows, columns))
        if bias:
            self.declare("bias", build.dtype, Part.whole(name.replace("weight", "bias"), rows))


class Head(BaseOP):
    """Two layers, [S, D] -> [S, labels], from a prompt's hidden state."""

    def __init__(self, build: BuildContext, spec: ModelSpec, form: Form) -> None:
        super().__init__()
        size, self.activation = spec.config.hidden_size, form.head_activation
        self.dense = Table(build, "pooler.dense.weight", size, size, form.head_bias)
        self.norm = LayerNorm(build, spec, form, "pooler.norm") if form.head_norms else None
        self.out = Table(build, "classifier.weight", spec.num_labels, size, True)

    def forward(self, x_SD: Tensor) -> Tensor:
        x_SD = self.activation(F.linear(x_SD, self.dense.weight, self.dense.bias))
        x_SD = self.norm.forward(x_SD) if self.norm else x_SD
        return F.linear(x_SD, self.out.weight, self.out.bias)


class LayerNorm(BaseOP):
    """[T, D] -> the same shape, with a weight and maybe a bias (Ba et al. 2016)."""

    weight: Tensor
    bias: Tensor | None = None

    def __init__(self, build: BuildContext, spec: ModelSpec, form: Form, name: str) -> None:
        super().__init__()
        self.eps = spec.config.norm_eps
        for part in ("weight", "bias") if form.norm_bias else ("weight",):
            self.declare(part, build.dtype, Part.whole(f"{name}.{part}", spec.config.hidden_size))

    def forward(self, x_TD: Tensor) -> Tensor:
        return F.layer_norm(x_TD, x_TD.shape[-1:], self.weight, self.bias, self.eps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows(BaseAttnMetadata):
    """The rows of a step, by length.

    order_T: int64, the tokens of the shortest rows first. places_T: int64, where each token is in
    that order. varlen: the kernel that takes rows of any lengths, if there is one. firsts: int32
    [B + 1], where each row begins in that order, and the end, for this kernel.
    """

    order_T: Tensor
    places_T: Tensor
    runs: Runs
    varlen: Callable[..., Tensor] | None
    firsts: Tensor | None


class NoBackend(BaseAttnBackend):
    """Sorts the rows of a step. An encoder's blocks attend themselves, in that order."""

    name = "torch, in both directions"

    def __init__(self, device: torch.device, varlen: Callable[..., Tensor] | None) -> None:
        """varlen: see `Rows`."""
        self.device, self.varlen = device, varlen

    def prepare(self, plan: Plan) -> Rows:
        lengths = np.array(plan.ends) - np.array(plan.starts)
        order_T = np.argsort(lengths.repeat(lengths), kind="stable")
        sizes, counts = np.unique(lengths, return_counts=True)
        firsts = np.cumsum([0, *np.sort(lengths)], dtype=np.int32)
        return Rows(
            order_T=torch.from_numpy(order_T).to(self.device),
            places_T=torch.from_numpy(np.argsort(order_T)).to(self.device),
            runs=list(zip(counts.tolist(), sizes.tolist(), strict=True)),
            varlen=self.varlen,
            firsts=torch.from_numpy(firsts).to(self.device) if self.varlen else None,
        )

    def forward(
        self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, layer: AttnLayer, batch: PoolBatch
    ) -> Tensor:
        rows: Rows = batch.attn_metadata
        ordered = [x_TNH[rows.order_T] for x_TNH in (q_TNH, k_TKH, v_TKH)]
        return attend(ordered, rows, layer.window, layer.scale)[rows.places_T].view_as(q_TNH)


def _varlen(build: PoolBuild, head_dim: int) -> Callable[..., Any] | None:
    """Return torch's FlashAttention, if the device has it and it takes such queries."""
    takes = build.dtype.itemsize == 2 and head_dim % 8 == 0 and head_dim <= 256
    if build.device.type != "cuda" or not takes:
        return None
    has_it = torch.backends.cuda.is_flash_attention_available()
    if not has_it or torch.cuda.get_device_capability(build.device) < (8, 0):
        return None
    from torch.nn.attention.varlen import varlen_attn  # imports sympy, which takes a second

    return varlen_attn


class NoPool(PoolSpec):
    """A pool whose pages have no bytes."""

    is_recurrent: ClassVar[bool] = True

    def context(self, build: PoolBuild) -> Context:
        backend = NoBackend(build.device, _varlen(build, self.head_dim))
        return Context(kv_pool=self, page_table=build.page_table(self.group), attn=backend)

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


def check_options(config: EngineConfig) -> None:
    """Raise ConfigError for an option that an encoder does not have."""
    given = {
        "--tp": config.tp > 1,
        "--lora": config.num_slots,
        "--drafts": config.drafts not in ("off", "auto"),
        "--draft-model": config.draft_model,
        "--attn": config.attn != "auto",
        "--num-pages": config.num_pages is not None,
        "--kv-cache-dtype": config.kv_cache_dtype != "auto",
    }
    if names := [name for name, is_given in given.items() if is_given]:
        raise ConfigError(f"an encoder has no {', '.join(names)}; leave that out")


def both_ways(spec: ModelSpec) -> ModelSpec:
    """Return the spec of a decoder as one of an encoder with the same blocks: a window's keys are
    half before the query and half behind it."""
    layers = tuple(replace(layer, recurrent=Uncached()) for layer in spec.layers)
    return replace(spec, layers=layers, is_encoder=True)
