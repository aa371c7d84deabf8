"""The differences between decoders, as data.

A value that differs between families is a field of `ModelSpec`. A value that differs between the
layers of a model is a field of `LayerSpec`. The decoder reads them and never asks for the family.

A `Family` says how to make the spec from config.json. The rest derives from the spec which layers
share caches, and is for layers whose cache is not keys and values.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from minisgl import plugins
from minisgl.core.groups import FULL, CacheGroup
from minisgl.layers.base import BaseOP

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from minisgl.core import Batch, Context
    from minisgl.kernel.ops import Activation, Ops
    from minisgl.layers import BuildContext, RMSNormFused
    from minisgl.layers.rotary import RotaryConfig
    from minisgl.layers.shard import HeadShare
    from minisgl.models.blocks.mixture import MoeSpec
    from minisgl.models.config import ModelConfig

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One block of the decoder.

    prefix: begins its tensors' names in the checkpoint. window: the number of keys that a query
    sees, the token's own included; None is all. num_heads, num_kv_heads: those of all ranks
    together. rope: the rotation of queries and keys. scale: multiplies q @ k; None is head_dim **
    -0.5. block: the class to build; None is `decoder.Block`. shares: the index of the layer whose
    keys and values this layer reads; None if it has its own. latent: the dims of a key that are its
    value, so that only keys are cached; None if values are cached, too. recurrent: further sizes of
    a layer without attention; its class says what num_heads, num_kv_heads and head_dim mean then.
    """

    prefix: str
    window: int | None
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RotaryConfig
    scale: float | None = None
    block: BlockType | None = None
    recurrent: RecurrentSpec | None = None
    shares: int | None = None
    latent: int | None = None

    @property
    def groups(self) -> tuple[CacheGroup, ...]:
        if self.recurrent:
            return self.recurrent.groups
        if self.window is None:
            return (FULL,)
        return (plugins.need("cache_groups", "window", "a model with windows")(window=self.window),)

    @property
    def width(self) -> int:
        """The number of elements that the first projection computes for a token."""
        if self.recurrent:
            return self.recurrent.width(self)
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    def pool(self, groups: Sequence[CacheGroup]) -> PoolSpec:
        """Return the pool for layers like this one, with num_layers = 0."""
        if self.recurrent:
            return self.recurrent.pool(self, groups)
        group = groups.index(self.groups[0])
        return PoolSpec(
            group=group,
            num_layers=0,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            latent=self.latent,
        )


def layers_of(
    config: ModelConfig, windows: Sequence[int | None] | None = None, **fields: Any
) -> tuple[LayerSpec, ...]:
    """Return the layers of a model, which differ at most in their windows. windows: each layer's;
    None if no layer has one. fields: further fields of all layers; they go before those of
    config.json."""
    common = {
        "num_heads": config.num_heads,
        "num_kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rope": config.rope,
        **fields,
    }
    return tuple(
        LayerSpec(prefix=f"model.layers.{index}", window=window, **common)
        for index, window in enumerate(windows or (None,) * config.num_layers)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A decoder to build: the sizes in `config`, and its family's choices.

    qk_norm: queries and keys are normed per head before they are rotated. attention: what the
    layers need of an attention backend that not every backend has (`minisgl.attention.base`).
    decoder: the class to build; None is `decoder.Decoder`. is_encoder: each token attends to all of
    its prompt, so a prompt is computed in one step, nothing is cached, and nothing is sampled.
    num_labels: the numbers that an encoder's head gives for a prompt, instead of logits.
    """

    config: ModelConfig
    layers: tuple[LayerSpec, ...]
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    attention: tuple[str, ...] = ()
    moe: MoeSpec | None = None
    decoder: Callable[[ModelSpec, BuildContext, int], BaseLLMModel] | None = None
    is_encoder: bool = False
    num_labels: int = 0

    @property
    def mlp_width(self) -> int:
        """The largest number of elements that an MLP or a mixture holds for a token at one time."""
        widths = [3 * self.config.intermediate_size]
        if self.moe:
            pair = 2 * self.moe.inner_size + max(self.moe.inner_size, self.config.hidden_size)
            widths.append(self.moe.top_k * pair + 3 * self.moe.shared_size)
        return max(widths)


class NextTokens(Protocol):
    """A layer of multi-token prediction: at each position it takes the model's hidden state and the
    next token, and predicts the token after that. Its KV is a layer of the model's pools, so every
    step that stores the model's KV computes this layer, too."""

    def guesser(self, *step: Any) -> Any:
        """Return what guesses with it (`minisgl.engine.extras.Guesser`). step: what an engine
        guesses with: the model, the communicator, the ops, and how a batch is made."""


class BaseLLMModel(BaseOP, ABC):
    """The interface of a model to the engine. mtp: its layer of multi-token prediction, if it was
    asked for (`ModelConfig.mtp`)."""

    mtp: NextTokens | None = None

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        self.layout = CacheLayout.of(spec.layers)

    @property
    def config(self) -> ModelConfig:
        return self.spec.config

    @property
    @abstractmethod
    def pools(self) -> tuple[PoolSpec, ...]:
        """The pools of `layout`, with the number of key/value heads that this rank caches."""

    @abstractmethod
    def forward(self, batch: Batch) -> Tensor:
        """Compute the step and store its KV. Returns the final hidden states [S, D] at
        `batch.sample_positions`."""

    @abstractmethod
    def logits(self, x_SD: Tensor, own_rows: bool = False) -> Tensor:
        """Return the logits [S, V] (see `Ops.logits`) of hidden states x_SD.

        own_rows: return only this rank's share of the rows. Requires
        `DistributedCommunicator.shares_rows(S)`.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How to read the checkpoints of an architecture, whose name the manifest has.

    spec: makes the decoder's spec from the values of config.json.
    defaults: the values of fields that are not in the file, as in Hugging Face's config class.
    renames: the family's own name of a field -> the name here.
    activations: a `hidden_act` -> what it means, if this family's files mean another activation by
    the name than others do.
    activation: the only `hidden_act` that is accepted, if the family's blocks build MLPs of their
    own, which do not read `ModelConfig.activation`; else "".
    layer_ropes: `rope_parameters` may have one object for each type of layer; `ModelConfig.rope` is
    then that of full attention.
    names: parts of tensors' names in the files -> as the layers declare them, applied one after
    another.
    view: turns the files' tensors into those that the layers declare; None if they are the same.
    """

    spec: Callable[[ModelConfig], ModelSpec]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    renames: Mapping[str, str] = field(default_factory=dict)
    activations: Mapping[str, Activation] = field(default_factory=dict)
    activation: str = ""
    layer_ropes: bool = False
    names: Mapping[str, str] = field(default_factory=dict)
    view: Callable[[Any, ModelConfig], Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSpec:
    """Layers of one cache group whose caches have the same shape. They share a pool of tensors and
    an attention backend.

    group: the group's index. num_kv_heads: in a `CacheLayout` the heads of all ranks, in
    `BaseLLMModel.pools` those of this rank. latent: see `LayerSpec`.
    """

    group: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    latent: int | None = None

    is_recurrent: ClassVar[bool] = False

    def of_rank(self, heads: HeadShare) -> PoolSpec:
        return replace(self, num_kv_heads=len(heads.kv))

    def with_drafts(self) -> PoolSpec:
        """Return the pool of an engine with drafts: wrong ones are taken back."""
        return self

    def context(self, build: PoolBuild) -> Context:
        """Allocate a pool that is recurrent, and choose the backend of its layers."""
        raise AssertionError("the engine builds the pools of keys and values")

    def guarded(self, layer: Any, groups: Sequence[CacheGroup]) -> list[tuple[int, Tensor]]:
        """Return what the page guard fills with NaN: the tensors [pages, ...] of a layer of a
        recurrent pool, each with its cache group. A token that reads such a page must be NaN."""
        raise AssertionError("the guard knows the pools of keys and values")

    def page_bytes(self, group: int, page_size: int, dtype: torch.dtype) -> int:
        """Return the bytes that one page of a cache group takes in this pool, all layers together.
        dtype: see `minisgl.kvcache.pool.MHAKVCache`."""
        # An integer's scale is a float32 for each token and head.
        head_bytes = self.head_dim * dtype.itemsize + 4 * (not dtype.is_floating_point)
        num_vectors = self.num_kv_heads * (1 if self.latent else 2)
        per_token = self.num_layers * num_vectors * head_bytes
        return per_token * page_size if group == self.group else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLayout:
    """Where each layer caches. groups: the full group comes first. places: each layer's (index of
    its pool in `pools`, index of the layer in that pool)."""

    groups: tuple[CacheGroup, ...]
    pools: tuple[PoolSpec, ...]
    places: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, layers: Sequence[LayerSpec]) -> CacheLayout:
        found = dict.fromkeys(group for layer in layers for group in layer.groups)
        groups = sorted(found, key=lambda group: group.kind != "full")
        kinds = [layer.pool(groups) if layer.shares is None else None for layer in layers]
        unique = sorted(dict.fromkeys(filter(None, kinds)), key=lambda kind: kind.group)
        places: list[tuple[int, int]] = []
        for index, (layer, kind) in enumerate(zip(layers, kinds, strict=True)):
            own = (unique.index(kind), kinds[:index].count(kind)) if kind else None
            places.append(own or places[layer.shares or 0])
        return cls(
            groups=tuple(groups),
            pools=tuple(replace(kind, num_layers=kinds.count(kind)) for kind in unique),
            places=tuple(places),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolBuild:
    """What a pool and its backend are built from.

    page_table: from a group's index to its page table. dtype: of activations. attn: the value of
    `--attn`.
    """

    ops: Ops
    groups: Sequence[CacheGroup]
    page_table: Callable[[int], Tensor]
    page_size: int
    dtype: torch.dtype
    device: torch.device
    attn: str


class RecurrentSpec(Protocol):
    """Further sizes of a layer whose cache is not keys and values."""

    @property
    def groups(self) -> tuple[CacheGroup, ...]:
        """The cache groups that the layer needs."""

    def width(self, layer: LayerSpec) -> int:
        """See `LayerSpec.width`."""

    def pool(self, layer: LayerSpec, groups: Sequence[CacheGroup]) -> PoolSpec:
        """See `LayerSpec.pool`."""


class BlockType(Protocol):
    """A class of blocks, see `minisgl.models.blocks.decoder.Block`."""

    def __call__(self, at: Any) -> Any:
        """Build the layer of a `LayerBuild`."""

    def final_norm(self, spec: ModelSpec, build: BuildContext) -> RMSNormFused:
        """Return the norm that follows the model's last block, if that block is of this class."""
