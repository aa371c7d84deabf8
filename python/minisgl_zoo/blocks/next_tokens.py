"""A decoder with a layer of multi-token prediction (DeepSeek-V3, 2024, section 2.2).

At position i the layer takes the model's hidden state h_i and the next token::

    x_i = W [norm_e(embedding of t_(i+1)); norm_h(h_i)]       W: eh_proj
    logits of t_(i+2) = LM head(norm(block(x)_i))             norm: shared_head.norm

The embedding and the LM head are the model's own, as DeepSeek's README_WEIGHTS says. Neither that
nor the report says whether h_i is taken before or after the model's final norm. It is taken after
it, as vLLM and SGLang do for DeepSeek-V3 and GLM. For Qwen3.5 more guesses were right so
(llama.cpp's pull request 24025).

Axes: T tokens of this step, S rows that sample, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from minisgl.core.batch import Batch, ImageRows, PoolBatch
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
from minisgl.models.blocks.mixture import expert_names, mixture_builder
from minisgl.models.config import ModelConfig
from minisgl.models.spec import CacheLayout, ModelSpec
from minisgl_zoo.drafts.guesser import LayerGuesser

if TYPE_CHECKING:
    from minisgl.distributed import DistributedCommunicator
    from minisgl.engine.inputs import StepInputs
    from minisgl.kernel.ops import Ops
    from minisgl.models import BaseLLMModel


class NextTokenLayer(BaseOP):
    """`minisgl.models.spec.NextTokens`. names: of norm_e, norm_h, W and the last norm, each below
    `prefix`. block_prefix: begins the names of the block. {} is the index behind the last layer."""

    norm_type: ClassVar[type[RMSNormFused]] = RMSNormFused
    state_norm_type: ClassVar[type[RMSNorm]] = RMSNorm
    prefix: ClassVar[str] = "model.layers.{}"
    block_prefix: ClassVar[str] = "model.layers.{}"
    names: ClassVar[tuple[str, str, str, str]] = "enorm", "hnorm", "eh_proj", "shared_head.norm"

    def __init__(self, at: LayerBuild, embedding: VocabParallelEmbedding) -> None:
        super().__init__()
        size, build, prefix = at.spec.config.hidden_size, at.build, self.prefix.format(at.index)
        outer = replace(at, layer=replace(at.layer, prefix=prefix))
        token_norm, state_norm, project, norm = self.names
        self.embedding = embedding
        self.token_norm = outer.norm(self.norm_type, token_norm)  # it adds up ranks' embeddings
        self.state_norm = outer.norm(self.state_norm_type, state_norm)
        name = f"{prefix}.{project}"
        unit = build.formats.of([name], "Linear").unit
        self.columns = split_columns(2 * size, build.comm.size, unit)[build.comm.rank]
        self.project = LinearRowParallel(
            build, in_size=2 * size, share=self.columns, out_size=size, bias=False, name=name
        )
        self.block = (at.layer.block or Block)(at)
        self.norm = outer.norm(self.norm_type, norm)

    def forward(self, x_TD: Tensor, batch: Batch) -> Tensor:
        """Store the KV. Returns hidden states [S, D] for the LM head, at `batch.sample_positions`.

        x_TD: the model's final hidden states of all tokens. batch: the model's, in which each input
        id is the next token's.
        """
        embedded_TD = self.embedding.forward(batch.input_ids)
        if batch.images:
            embedded_TD = _next_rows(batch.images, batch.pools[0]).put(embedded_TD)
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


def _next_rows(images: ImageRows, step: PoolBatch) -> ImageRows:
    """Return the rows of images at the tokens before their places, whose next tokens they are. A
    place that begins a chunk is left out: the token before it was in an earlier step, and got the
    placeholder's embedding."""
    assert step.rows is not None
    kept = torch.isin(images.tokens, step.rows[1], invert=True)
    rows = None if images.rows is None else images.rows[kept]
    return ImageRows(tokens=images.tokens[kept] - 1, rows=rows)


class NextTokenDecoder(Decoder):
    """kind: the class of the layer. It has the sizes of the model's last layer of attention, and
    experts if the model's last layer has."""

    def __init__(
        self,
        spec: ModelSpec,
        build: BuildContext,
        num_positions: int,
        kind: type[NextTokenLayer] = NextTokenLayer,
    ) -> None:
        super().__init__(spec, build, num_positions)
        index = len(spec.layers)
        last = next(layer for layer in reversed(spec.layers) if not layer.recurrent)
        layer = replace(last, prefix=kind.block_prefix.format(index))
        moe = spec.moe
        if moe:
            mlp = f"{layer.prefix}.mlp"
            moe = replace(
                moe,
                is_sparse=(*moe.is_sparse, moe.is_sparse[-1]),
                names=lambda _: expert_names(mlp),
                prefix=lambda _: mlp,
            )
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
        self.mtp = kind(at, self.embedding)


def predicting(
    spec: Callable[[ModelConfig], ModelSpec],
    kind: type[NextTokenLayer] = NextTokenLayer,
    count: str = "num_nextn_predict_layers",
    default: int = 0,
) -> Callable[[ModelConfig], ModelSpec]:
    """Return `spec` of a family whose files may have layers of multi-token prediction: with the
    first one if it is asked for (`ModelConfig.mtp`) and config.json's field `count` is not 0.
    default: without the field. kind: the layer's class."""

    def made(config: ModelConfig) -> ModelSpec:
        made = spec(config)
        has_layer = config.mtp and config.fields.integer(count, default, minimum=0)
        if not has_layer or all(layer.recurrent for layer in made.layers):
            return made
        return replace(made, decoder=partial(NextTokenDecoder, kind=kind))

    return made
