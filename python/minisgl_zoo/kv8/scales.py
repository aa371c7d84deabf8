"""Loads the scales of keys and values that a checkpoint has for a KV cache in fp8.

A checkpoint has one number for each layer, or one for each head. A number of the cache times the
scale is the value (compressed-tensors and ModelOpt; `minisgl_zoo.kv8.pool`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from minisgl.core import Context
from minisgl.distributed import DistributedCommunicator
from minisgl.errors import CheckpointError
from minisgl.layers.shard import split_heads
from minisgl.models.build import open_checkpoint
from minisgl.models.loading.weight import Checkpoint
from minisgl.models.spec import BaseLLMModel
from minisgl.quantization import Part
from minisgl.utils.logger import get_logger

logger = get_logger(__name__)

SPELLINGS = ("{x}_scale", "{x}_proj.{x}_scale", "{x}_proj.output_scale")
"""Below `self_attn`, with k or v for x: compressed-tensors, ModelOpt, older compressed-tensors."""


def load_kv_scales(
    model: BaseLLMModel,
    folder: Path,
    contexts: Sequence[Context],
    comm: DistributedCommunicator,
) -> None:
    """Give the pools in fp8 the checkpoint's scales. Layers for which it has none keep a scale of
    1.

    contexts: of the model's pools, in their order. Raises CheckpointError for a layer with only one
    of the two scales, and for scales that are not positive or do not fit the layer's heads.
    """
    checkpoint = open_checkpoint(folder, model.spec.config)
    num_found, num_layers = 0, 0
    for layer, (pool, index) in zip(model.spec.layers, model.layout.places, strict=True):
        if layer.recurrent or layer.shares is not None or layer.latent:
            continue  # the last have scales of keys and values that are not cached
        heads = split_heads(layer.num_heads, layer.num_kv_heads, comm.size)[comm.rank].kv
        stored = contexts[pool].kv_pool.layer(index)
        assert stored.k_scale is not None
        assert stored.v_scale is not None
        num_layers += 1
        found = [_name(checkpoint, f"{layer.prefix}.self_attn", x) for x in "kv"]
        if not any(found):
            continue
        for name, scale in zip(found, (stored.k_scale, stored.v_scale), strict=True):
            if name is None:
                other = next(filter(None, found))
                raise CheckpointError(
                    f"{folder} has {other}, but of keys and values the layer's other part has "
                    "no scale; expected scales of both, or of neither"
                )
            scale.copy_(
                _head_scales(checkpoint, name, layer.num_kv_heads)[heads.start : heads.stop]
            )
        num_found += 1
    if comm.rank == 0:
        logger.info(
            "KV cache in fp8: scales of %d of %d layers are the checkpoint's, the others are 1",
            num_found,
            num_layers,
        )


def _name(checkpoint: Checkpoint, prefix: str, x: str) -> str | None:
    names = (f"{prefix}.{spelling.format(x=x)}" for spelling in SPELLINGS)
    return next((name for name in names if name in checkpoint.names), None)


def _head_scales(checkpoint: Checkpoint, name: str, num_heads: int) -> Tensor:
    shape = checkpoint.shape(name)
    scale = checkpoint.share(name, Part.whole(name, *shape)).float().flatten()
    if len(scale) not in (1, num_heads):
        raise CheckpointError(
            f"{name} in {checkpoint.folder} has shape {list(shape)}; expected one scale, or one "
            f"for each of {num_heads} heads"
        )
    if len(wrong := scale[~(scale.isfinite() & (scale > 0))]):
        raise CheckpointError(
            f"{name} in {checkpoint.folder} has a scale of {wrong[0]:g}; expected positive numbers"
        )
    return scale.expand(num_heads)
