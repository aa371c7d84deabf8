"""One decoder for every family: pre-norm blocks of attention and gated MLP, built from a spec.

A norm also does the all-reduce and the residual addition before it, so that a kernel can fuse the
three. A block therefore returns two tensors: x, this rank's partial sum of its last layer's output,
and the residual, to which x is not added yet.

Axes: T tokens of this step, S rows that sample, V vocabulary, D hidden size, F intermediate size,
G = 2F, gate then up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from torch import Tensor

from minisgl.attention import AttnLayer
from minisgl.layers import (
    AttentionLayer,
    BaseOP,
    BuildContext,
    Identity,
    LinearColParallelMerged,
    LinearQKVMerged,
    LinearRowParallel,
    OPList,
    ParallelLMHead,
    RMSNorm,
    RMSNormFused,
    RotaryEmbedding,
    VocabParallelEmbedding,
    get_rope,
)
from minisgl.layers.shard import split_heads
from minisgl.models.blocks.mixture import mixture_builder
from minisgl.models.spec import EMBEDDING, LM_HEAD, BaseLLMModel, LayerSpec, ModelSpec, PoolSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    from minisgl.core import Batch
    from minisgl.layers.moe import MoELayer

Norm = TypeVar("Norm")


class Decoder(BaseLLMModel):
    """Embedding, blocks, final norm and LM head.

    num_positions: rows of the rotary table.
    """

    def __init__(self, spec: ModelSpec, build: BuildContext, num_positions: int) -> None:
        super().__init__(spec)
        self.comm = build.comm
        config = spec.config
        vocab_size, hidden_size = config.vocab_size, config.hidden_size
        ropes = {
            rope: get_rope(build, rope, num_positions)
            for rope in dict.fromkeys(layer.rope for layer in spec.layers)
        }
        self.embedding = VocabParallelEmbedding(
            build,
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            name=EMBEDDING,
            alias=LM_HEAD if config.tie_word_embeddings else None,
        )
        mixture = None
        if spec.moe:
            mixture = mixture_builder(spec.moe, build, hidden_size)
        self.blocks = OPList(
            [
                (layer.block or Block)(
                    LayerBuild(
                        spec=spec,
                        layer=layer,
                        build=build,
                        rope=ropes[layer.rope],
                        mixture=mixture,
                        index=index,
                        place=place,
                    )
                )
                for index, (layer, place) in enumerate(
                    zip(spec.layers, self.layout.places, strict=True)
                )
            ]
        )
        self.norm = type(self.blocks[-1]).final_norm(spec, build)
        if config.tie_word_embeddings:
            self.lm_head = ParallelLMHead(self.embedding)
        else:
            self.lm_head = ParallelLMHead.untied(
                build, vocab_size=vocab_size, hidden_size=hidden_size, name=LM_HEAD
            )

    @property
    def pools(self) -> tuple[PoolSpec, ...]:
        local = list(self.layout.pools)
        # A layer of multi-token prediction has the last place, in a pool of these layers.
        for (pool, _), layer in zip(self.layout.places, self.spec.layers, strict=False):
            heads = split_heads(layer.num_heads, layer.num_kv_heads, self.comm.size)
            local[pool] = self.layout.pools[pool].of_rank(heads[self.comm.rank])
        return tuple(local)

    def forward(self, batch: Batch) -> Tensor:
        x_TD = self.embed(batch.input_ids)
        images, deep = batch.images, list[Tensor]()
        if images:
            x_TD, deep = images.put(x_TD), list(images.deep)
        residual_TD: Tensor | None = None
        *blocks, last = self.blocks
        for block in blocks:
            x_TD, residual_TD = block.forward(x_TD, residual_TD, batch)
            if images and deep:
                x_TD[images.tokens] += deep.pop(0)
        # After the last attention only the tokens that sample are needed. If there are as many of
        # them as tokens, they are all tokens in order, and nothing has to be selected.
        rows_S = batch.sample_positions
        x_SD, residual_SD = last.forward(
            x_TD, residual_TD, batch, rows_S if len(rows_S) < len(x_TD) else None
        )
        return self.norm.forward(x_SD, residual_SD)[0]

    def embed(self, ids_T: Tensor) -> Tensor:
        """Return the input of the first block, [T, D]."""
        return self.embedding.forward(ids_T)

    def logits(self, x_SD: Tensor, own_rows: bool = False) -> Tensor:
        return self.lm_head.forward(x_SD, own_rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBuild:
    """The arguments of a layer's constructor.

    mixture: builds the experts of the layer with the given index; None if no layer has experts.
    index: the layer's index in the model. place: (its pool, its index in that pool).
    """

    spec: ModelSpec
    layer: LayerSpec
    build: BuildContext
    rope: RotaryEmbedding
    mixture: Callable[[int], MoELayer] | None
    index: int
    place: tuple[int, int]

    def norm(self, kind: Callable[..., Norm], name: str, size: int = 0) -> Norm:
        """Return a norm of the layer. size: 0 is the hidden size."""
        config = self.spec.config
        name = f"{self.layer.prefix}.{name}.weight"
        return kind(self.build, size=size or config.hidden_size, eps=config.norm_eps, name=name)

    def head_norm(self, kind: Callable[..., Norm], name: str) -> Norm:
        """Return a norm of the layer's queries or keys, per head."""
        return self.norm(kind, f"self_attn.{name}", self.layer.head_dim)

    def back(
        self, name: str, *, in_size: int, share: range, bias: bool = False
    ) -> LinearRowParallel:
        """Return a projection of the layer back to the hidden size."""
        out_size, name = self.spec.config.hidden_size, f"{self.layer.prefix}.{name}"
        return LinearRowParallel(
            self.build, in_size=in_size, share=share, out_size=out_size, bias=bias, name=name
        )


class Block(BaseOP):
    """norm, attention, norm, MLP or mixture of experts.

    norm_type, attention_type: the classes of its parts. Other classes have the same constructor and
    the same `forward`.
    """

    norm_type: ClassVar[type[RMSNormFused]] = RMSNormFused
    attention_type: ClassVar[Callable[..., Any]]
    attention: Attention
    mlp: GatedMLP | MoELayer

    def __init__(self, at: LayerBuild) -> None:
        super().__init__()
        self.attention_norm = at.norm(self.norm_type, "input_layernorm")
        self.attention = self.attention_type(at)
        self.mlp_norm = at.norm(self.norm_type, "post_attention_layernorm")
        moe = at.spec.moe
        if moe and at.mixture and moe.is_sparse[at.index]:
            self.mlp = at.mixture(at.index)
        else:
            self.mlp = GatedMLP(at.spec, at.build, f"{at.layer.prefix}.mlp")

    @classmethod
    def final_norm(cls, spec: ModelSpec, build: BuildContext) -> RMSNormFused:
        """Return the norm that follows the model's last block, if that block is of this class."""
        return cls.norm_type(
            build, size=spec.config.hidden_size, eps=spec.config.norm_eps, name="model.norm.weight"
        )

    def forward(
        self,
        x_TD: Tensor,
        residual_TD: Tensor | None,
        batch: Batch,
        rows_S: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Apply norm, attention, norm, MLP. Returns (output, residual).

        rows_S: the tokens to return, in this order; None for all. The KV of all tokens is stored.
        """
        x_TD, residual_TD = self.attention.forward(
            self.attention_norm, x_TD, residual_TD, batch, rows_S
        )
        return self.mlp.forward(self.mlp_norm, x_TD, residual_TD)


class Attention(BaseOP):
    """Query/key/value projection, attention, output projection."""

    head_norm_type: ClassVar[type[RMSNorm]] = RMSNorm

    def __init__(self, at: LayerBuild) -> None:
        super().__init__()
        spec, layer, build = at.spec, at.layer, at.build
        config, prefix = spec.config, f"{layer.prefix}.self_attn"
        self.qkv = LinearQKVMerged(
            build,
            in_size=config.hidden_size,
            num_q_heads=layer.num_heads,
            num_kv_heads=layer.num_kv_heads,
            head_dim=layer.head_dim,
            bias=spec.qkv_bias,
            names=(f"{prefix}.q_proj", f"{prefix}.k_proj", f"{prefix}.v_proj"),
        )

        def head_norm(name: str) -> RMSNorm | Identity:
            return at.head_norm(self.head_norm_type, name) if spec.qk_norm else Identity()

        self.attend = AttentionLayer(
            AttnLayer(
                pool=at.place[0],
                layer_id=at.place[1],
                num_q_heads=self.qkv.num_q_heads,
                num_kv_heads=self.qkv.num_kv_heads,
                head_dim=layer.head_dim,
                scale=layer.scale or layer.head_dim**-0.5,
                window=layer.window,
            ),
            rope=at.rope,
            q_norm=head_norm("q_norm"),
            k_norm=head_norm("k_norm"),
        )
        in_size, share = layer.num_heads * layer.head_dim, self.qkv.q_columns
        self.out = at.back("self_attn.o_proj", in_size=in_size, share=share, bias=spec.o_bias)

    def forward(
        self,
        norm: RMSNormFused,
        x_TD: Tensor,
        residual_TD: Tensor | None,
        batch: Batch,
        rows_S: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Apply norm, q/k/v projection, attention and output projection.

        Returns (output, residual) of the tokens rows_S; None for all tokens.
        """
        qkv, residual_TD = self.qkv.forward_normed(norm, x_TD, residual_TD)
        attended = self.attend.forward(qkv, batch)
        residual_TD, attended = norm.select(rows_S, residual_TD, attended)
        return self.out.forward(attended), residual_TD


Block.attention_type = Attention


class GatedMLP(BaseOP):
    """down(activation(gate(x)) * up(x))."""

    def __init__(self, spec: ModelSpec, build: BuildContext, prefix: str) -> None:
        super().__init__()
        config = spec.config
        self.gate_up = LinearColParallelMerged(
            build,
            in_size=config.hidden_size,
            out_size=config.intermediate_size,
            bias=spec.mlp_bias,
            names=(f"{prefix}.gate_proj", f"{prefix}.up_proj"),
        )
        self.activation = config.activation
        self.down = LinearRowParallel(
            build,
            in_size=config.intermediate_size,
            share=self.gate_up.columns,
            out_size=config.hidden_size,
            bias=spec.mlp_bias,
            name=f"{prefix}.down_proj",
        )

    def forward(
        self, norm: RMSNormFused, x_TD: Tensor, residual_TD: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Apply norm, then the gated MLP. Returns (output, residual)."""
        if self.down.weight.gates_input(len(x_TD)):
            x_TG, residual_TD = self.gate_up.forward_normed(norm, x_TD, residual_TD)
            return self.down.forward(x_TG, self.activation), residual_TD
        x_TF, residual_TD = self.gate_up.forward_normed(norm, x_TD, residual_TD, self.activation)
        return self.down.forward(x_TF), residual_TD
