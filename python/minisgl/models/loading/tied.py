"""Decides which LM head is used if config.json ties it and the checkpoint has one nevertheless."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from minisgl.layers.shard import vocab_share
from minisgl.models.spec import EMBEDDING, LM_HEAD
from minisgl.quantization import Part
from minisgl.utils.logger import get_logger

if TYPE_CHECKING:
    from minisgl.distributed import DistributedCommunicator
    from minisgl.models.config import ModelConfig
    from minisgl.models.loading.weight import Checkpoint

logger = get_logger(__name__)


def untied_if_different(
    checkpoint: Checkpoint, config: ModelConfig, comm: DistributedCommunicator
) -> ModelConfig:
    """Return `config`, with untied embeddings if the checkpoint's LM head differs from its
    embedding.

    Each rank compares its own rows, and all ranks return the same.
    """
    names = (EMBEDDING, LM_HEAD)
    if not checkpoint.names.issuperset(names):
        return config
    shape = (config.vocab_size, config.hidden_size)
    share = vocab_share(config.vocab_size, comm.size, comm.rank)
    shapes = {checkpoint.shape(name) for name in names}
    are_equal = len(shapes) == 1
    if shapes == {shape}:  # loading refuses any other
        tables = [
            checkpoint.share(name, Part(name=name, shape=shape, axis=0, share=share))
            for name in names
        ]
        are_equal = torch.equal(*tables)
    if comm.all_min(int(are_equal)):
        return config
    logger.warning(
        "%s ties the embeddings, but %s differs from %s in the checkpoint: using both, as "
        "Hugging Face does",
        config.fields.where,
        LM_HEAD,
        EMBEDDING,
    )
    return dataclasses.replace(config, tie_word_embeddings=False)
