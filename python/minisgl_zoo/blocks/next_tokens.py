"""A decoder with a layer of multi-token prediction (DeepSeek-V3, 2024, section 2.2).

At position i the layer takes the model's hidden state h_i and the next token::

    x_i = W [norm_e(embedding of t_(i+1)); norm_h(h_i)]       W: eh_proj
    logits of t_(i+2) = LM head(norm(block(x)_i))             norm: shared_head.norm

The embedding and the LM head are the model's own, as DeepSeek's README_WEIGHTS says. Neither that
nor the report says whether h_i is taken before or after the model's final norm. It is taken after
it, as vLLM and SGLang do for DeepSeek-V3 and GLM.

Axes: T tokens of this step, S rows that sample, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minisgl.core import Batch
from minisgl.layers import (
    BaseOP,
    BuildContext,
    LinearRowParallel,
    RMSNorm,
    RMSNormFused,
    VocabParallelEmbedding,
    get_rope,
)
from minisgl.layers.shard import split_columns
from minisgl.models.blocks.decoder import Block, Decoder, LayerBuild
from minisgl.models.blocks.mixture import mixture_builder
from minisgl.models.config import ModelConfig
from minisgl.models.spec import CacheLayout, ModelSpec
from minisgl_zoo.drafts.guesser import LayerGuesser

if TYPE_CHECKING:
    from minisgl.distributed import DistributedCommunicator
    from minisgl.engine.inputs import StepInputs
    from minisgl.kernel.ops import Ops
    from minisgl.models import BaseLLMModel


class NextTokenLayer(BaseOP):
    """`minisgl.models.spec.NextTokens`."""

    def __init__(self, at: LayerBuild, embedding: VocabParallelEmbedding) -> None:
        super().__init__()
        size, build, prefix = at.spec.config.hidden_size, at.build, at.layer.prefix
        self.embedding = embedding
        self.token_norm = at.norm(RMSNormFused, "enorm")  # it adds up the ranks' embeddings
        self.state_norm = at.norm(RMSNorm, "hnorm")
        name = f"{prefix}.eh_proj"
        unit = build.formats.of([name], "Linear").unit
        self.columns = split_columns(2 * size, build.comm.size, unit)[build.comm.rank]
        self.project = LinearRowParallel(
            build, in_size=2 * size, share=self.columns, out_size=size, bias=False, name=name
        )
        self.block = (at.layer.block or Block)(at)
        self.norm = at.norm(RMSNormFused, "shared_head.norm")

    def forward(self, x_TD: Tensor, batch: Batch) -> Tensor:
        """Store the KV. Returns hidden states [S, D] for the LM head, at `batch.sample_positions`.

        x_TD: the model's final hidden states of all tokens. batch: the model's, in which each input
        id is the next token's.
        """
        embedded_TD = self.embedding.forward(batch.input_ids)
        token_TD, _ = self.token_norm.forward(embedded_TD, None)
        both = torch.cat((token_TD, self.state_norm.forward(x_TD)), dim=-1)
        columns = slice(self.columns.start, self.columns.stop)
        x_TD = self.project.forward(both[:, columns].contiguous())
        rows_S = batch.sample_positions
        x_SD, residual_SD = self.block.forward(
            x_TD, None, batch, rows_S if len(rows_S) < len(x_TD) else None
        )
        normed_SD: Tensor = self.norm.forward(x_SD, residual_SD)[0]
        return normed_SD

    def guesser(
        self,
        model: BaseLLMModel,
        comm: DistributedCommunicator,
        ops: Ops,
        batch: Callable[[StepInputs, Tensor, Tensor], Batch],
    ) -> LayerGuesser:
        return LayerGuesser(layer=self.forward, model=model, comm=comm, ops=ops, batch=batch)


class NextTokenDecoder(Decoder):
    """The layer has the sizes of the model's last one."""

    def __init__(self, spec: ModelSpec, build: BuildContext, num_positions: int) -> None:
        super().__init__(spec, build, num_positions)
        index = len(spec.layers)
        layer = replace(spec.layers[-1], prefix=f"model.layers.{index}")
        moe = spec.moe
        if moe:
            moe = replace(moe, is_sparse=(*moe.is_sparse, moe.is_sparse[-1]))
        self.layout = CacheLayout.of((*spec.layers, layer))  # it comes last in its pool
        at = LayerBuild(
            spec=replace(spec, moe=moe),
            layer=layer,
            build=build,
            rope=get_rope(build, layer.rope, num_positions),
            mixture=mixture_builder(moe, build, spec.config.hidden_size) if moe else None,
            index=index,
            place=self.layout.places[-1],
        )
        self.mtp = NextTokenLayer(at, self.embedding)


def predicting(spec: Callable[[ModelConfig], ModelSpec]) -> Callable[[ModelConfig], ModelSpec]:
    """Return `spec` of a family whose files may have a layer of multi-token prediction behind the
    last one: with it if config.json says so and it is asked for (`ModelConfig.mtp`)."""

    def made(config: ModelConfig) -> ModelSpec:
        made = spec(config)
        return replace(made, decoder=NextTokenDecoder) if config.mtp and _count(config) else made

    return made


def _count(config: ModelConfig) -> int:
    values = config.fields.values
    if values.get("num_nextn_predict_layers") is None:
        return 0
    return config.fields.integer("num_nextn_predict_layers", minimum=0)
