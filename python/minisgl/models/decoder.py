"""One decoder for every family: pre-norm blocks of attention and gated MLP, built from a spec.

Norms are fused with what comes before them, the sum over the ranks and the residual addition, so a
block passes on two tensors: this rank's part of what the last step computed, and the residual that
the sum is still to be added to. Of a long prompt's tokens on many ranks it passes on two halves:
the sum of one runs beside the products of the other (`DistributedCommunicator.halves`). They meet
where tokens attend to each other.

Axes: T tokens of this step, S rows that sample, V vocabulary, D hidden size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minisgl.attention import AttnLayer
from minisgl.distributed import MadeSum, PendingSum
from minisgl.layers import (
    AttentionLayer,
    BaseOP,
    BuildContext,
    Identity,
    LinearColParallelMerged,
    LinearQKVMerged,
    LinearRowParallel,
    MoE,
    OPList,
    ParallelLMHead,
    RMSNorm,
    RMSNormFused,
    RotaryEmbedding,
    SharedExpert,
    VocabParallelEmbedding,
    get_rope,
)
from minisgl.models.spec import ModelSpec, MoeSpec
from minisgl.moe import BaseMoeBackend, create_moe_backend

if TYPE_CHECKING:
    from minisgl.core import Batch
    from minisgl.models.config import ModelConfig

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"

Half = tuple[Tensor | PendingSum, Tensor | None]
"""(x, residual) [T, D] of half of the tokens, or of all. x: this rank's part of a sum that the next
norm makes; where there are halves, that sum, already begun."""


class BaseLLMModel(BaseOP, ABC):
    """What the engine knows of a model."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec

    @property
    def config(self) -> ModelConfig:
        return self.spec.config

    @property
    @abstractmethod
    def num_kv_heads(self) -> int:
        """Key/value heads that this rank caches, in each layer."""

    @abstractmethod
    def forward(self, batch: Batch) -> Tensor:
        """What `logits` takes, [S, D], of `batch.sample_positions`; writes the step's KV."""

    @abstractmethod
    def logits(self, x_SD: Tensor, shared: bool = False) -> Tensor:
        """[S, V], as `Ops.logits` makes them; shared: of this rank's share of the rows alone, of a
        number that `DistributedCommunicator.shares_rows`."""


class Decoder(BaseLLMModel):
    """num_positions: how many positions the rotary table has."""

    def __init__(self, spec: ModelSpec, build: BuildContext, num_positions: int) -> None:
        super().__init__(spec)
        self.comm = build.comm
        config = spec.config
        vocab_size, hidden_size = config.vocab_size, config.hidden_size
        rope = get_rope(build, config.rope, num_positions)
        self.embedding = VocabParallelEmbedding(
            build,
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            name=EMBEDDING,
            alias=LM_HEAD if config.tie_word_embeddings else None,
        )
        moe = create_moe_backend(build.ops, build.dtype) if spec.moe else None
        self.blocks = OPList([Block(spec, build, rope, moe, i) for i in range(config.num_layers)])
        self.norm = RMSNormFused(
            build, size=hidden_size, eps=config.norm_eps, name="model.norm.weight"
        )
        if config.tie_word_embeddings:
            self.lm_head = ParallelLMHead(self.embedding)
        else:
            self.lm_head = ParallelLMHead.untied(
                build, vocab_size=vocab_size, hidden_size=hidden_size, name=LM_HEAD
            )

    @property
    def num_kv_heads(self) -> int:
        return self.blocks[0].attention.qkv.num_kv_heads

    def forward(self, batch: Batch) -> Tensor:
        x_TD = self.embedding.forward(batch.input_ids)
        halves: list[Half] = [(x_TD, None)]
        sizes = self.comm.halves(len(x_TD), x_TD.shape[1] * x_TD.itemsize)
        if len(sizes) > 1:
            total_TD = self.comm.all_reduce(x_TD)
            halves = [(MadeSum(x), None) for x in torch.split(total_TD, sizes)]
        *blocks, last = self.blocks
        for block in blocks:
            halves = block.forward(halves, batch)
        # After the last attention nobody asks for tokens that do not sample. As many as tokens:
        # every token samples, in order.
        rows = batch.sample_positions
        halves = last.forward(halves, batch, rows if len(rows) < len(x_TD) else None)
        outputs = [self.norm.forward(x, residual)[0] for x, residual in halves]
        return _join(outputs)

    def logits(self, x_SD: Tensor, shared: bool = False) -> Tensor:
        return self.lm_head.forward(x_SD, shared)


class Block(BaseOP):
    """norm, attention, norm, MLP or mixture of experts."""

    mlp: GatedMLP | MoE

    def __init__(
        self,
        spec: ModelSpec,
        build: BuildContext,
        rope: RotaryEmbedding,
        moe: BaseMoeBackend | None,
        index: int,
    ) -> None:
        super().__init__()
        self.comm = build.comm
        size, eps, prefix = spec.config.hidden_size, spec.config.norm_eps, f"model.layers.{index}"
        self.attention_norm = RMSNormFused(
            build, size=size, eps=eps, name=f"{prefix}.input_layernorm.weight"
        )
        self.attention = Attention(spec, build, rope, index)
        self.mlp_norm = RMSNormFused(
            build, size=size, eps=eps, name=f"{prefix}.post_attention_layernorm.weight"
        )
        if spec.moe and moe and spec.moe.is_sparse[index]:
            self.mlp = _mixture(spec.moe, build, moe, size, index)
        else:
            self.mlp = GatedMLP(spec, build, f"{prefix}.mlp")

    def forward(self, halves: list[Half], batch: Batch, rows_S: Tensor | None = None) -> list[Half]:
        """rows_S: which of the tokens are wanted, as one; all by default. All tokens' KV is
        stored."""
        attended = self.attention.forward(self.attention_norm, halves, batch, rows_S)
        halves = self._begin_sums(attended, len(halves) if rows_S is None else 1)
        outputs = (self.mlp.forward(self.mlp_norm, x, residual) for x, residual in halves)
        return self._begin_sums(outputs, len(halves))

    def _begin_sums(self, outputs: Iterator[tuple[Tensor, Tensor]], count: int) -> list[Half]:
        """Of halves, each before the next is computed; the sum of one alone is left to its norm."""
        if count == 1:
            return list(outputs)
        return [(self.comm.begin_sum(x), residual) for x, residual in outputs]


class Attention(BaseOP):
    """Project to heads, attend, project back."""

    def __init__(
        self, spec: ModelSpec, build: BuildContext, rope: RotaryEmbedding, index: int
    ) -> None:
        super().__init__()
        config, prefix = spec.config, f"model.layers.{index}.self_attn"
        self.qkv = LinearQKVMerged(
            build,
            in_size=config.hidden_size,
            num_q_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            bias=spec.qkv_bias,
            names=(f"{prefix}.q_proj", f"{prefix}.k_proj", f"{prefix}.v_proj"),
        )

        def head_norm(name: str) -> RMSNorm | Identity:
            if not spec.qk_norm:
                return Identity()
            return RMSNorm(
                build, size=config.head_dim, eps=config.norm_eps, name=f"{prefix}.{name}.weight"
            )

        self.attend = AttentionLayer(
            AttnLayer(
                layer_id=index,
                num_q_heads=self.qkv.num_q_heads,
                num_kv_heads=self.qkv.num_kv_heads,
                head_dim=config.head_dim,
                scale=config.head_dim**-0.5,
                window=spec.windows[index],
            ),
            rope=rope,
            q_norm=head_norm("q_norm"),
            k_norm=head_norm("k_norm"),
        )
        self.out = LinearRowParallel(
            build,
            in_size=config.num_heads * config.head_dim,
            share=self.qkv.q_columns,
            out_size=config.hidden_size,
            bias=spec.o_bias,
            name=f"{prefix}.o_proj",
        )

    def forward(
        self,
        norm: RMSNormFused,
        halves: list[Half],
        batch: Batch,
        rows_S: Tensor | None,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's part of the output for norm(sum(x) + residual); and that residual.

        Both of the tokens rows_S, as one, or of each half, which is computed when it is asked for.
        """
        projected, residuals = zip(
            *(self.qkv.forward_normed(norm, x, residual) for x, residual in halves), strict=True
        )
        attended = self.attend.forward(_join(projected), batch)
        if rows_S is not None:
            residual = norm.rows(_join(residuals), rows_S, len(attended))
            yield self.out.forward(attended[rows_S]), residual
            return
        parts = _split(attended, [len(qkv) for qkv in projected])
        for part, residual in zip(parts, residuals, strict=True):
            yield self.out.forward(part), residual


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
        self, norm: RMSNormFused, x_TD: Tensor | PendingSum, residual_TD: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """This rank's part of the output for norm(sum(x) + residual); and that residual."""
        x_TF, residual_TD = self.gate_up.forward_normed(norm, x_TD, residual_TD, self.activation)
        return self.down.forward(x_TF), residual_TD


def _join(parts: Sequence[Tensor]) -> Tensor:
    """One after another; of one itself."""
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts))


def _split(x: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
    """What `_join` has joined."""
    return (x,) if len(sizes) == 1 else torch.split(x, list(sizes))


def _mixture(
    spec: MoeSpec, build: BuildContext, backend: BaseMoeBackend, hidden_size: int, index: int
) -> MoE:
    shared = None
    if spec.shared_size:
        shared = SharedExpert(
            build,
            hidden_size=hidden_size,
            inner_size=spec.shared_size,
            prefix=f"model.layers.{index}.mlp",
        )
    return MoE(
        build,
        backend,
        hidden_size=hidden_size,
        inner_size=spec.inner_size,
        num_experts=spec.num_experts,
        top_k=spec.top_k,
        renormalise=spec.renormalise,
        names=spec.names(index),
        shared=shared,
    )
