"""Build a model on `meta`, or load one from a checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from minisgl import plugins
from minisgl.layers import BuildContext
from minisgl.models.blocks.decoder import EMBEDDING, LM_HEAD, BaseLLMModel, Decoder
from minisgl.models.config import ModelConfig
from minisgl.models.loading.weight import Checkpoint, Progress, load_weight
from minisgl.utils.hf import GGUF_WEIGHTS

if TYPE_CHECKING:
    from minisgl.core.args import Quantization
    from minisgl.distributed import DistributedCommunicator
    from minisgl.kernel.ops import Ops


def build_model(
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    ops: Ops,
    comm: DistributedCommunicator,
    max_context: int | None = None,
    expert_parallel: bool = False,
) -> BaseLLMModel:
    """Build this rank's part of the model on `meta`, where it has sizes and no memory.

    max_context: positions to serve, `config.max_context` by default. expert_parallel: see
    `BuildContext`. Raises ConfigError if the family refuses the config or the model cannot be split
    over the ranks.
    """
    spec = config.family.spec(config)
    if expert_parallel:
        from minisgl.models.blocks.mixture import check_expert_parallel

        check_expert_parallel(spec, comm)
    build = BuildContext(
        ops=ops,
        comm=comm,
        dtype=dtype,
        formats=config.formats,
        expert_parallel=expert_parallel,
    )
    return (spec.decoder or Decoder)(spec, build, max_context or config.max_context)


def load_model(
    folder: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    ops: Ops,
    comm: DistributedCommunicator,
    max_context: int | None = None,
    expert_parallel: bool = False,
    quantization: Quantization | None = None,
    dummy: bool = False,
    seed: int = 0,
    progress: Progress | None = None,
) -> BaseLLMModel:
    """Load the model of a checkpoint folder, ready to run on `device`.

    quantization: see `ModelConfig.from_folder`. dummy: draw random weights from `seed`; no weight
    file is read. For the others see `build_model`. Raises UnsupportedModel, ConfigError and
    CheckpointError.
    """
    config = ModelConfig.from_folder(folder, quantization)

    checkpoint = None if dummy else open_checkpoint(folder, config)
    if checkpoint:
        config = replace(config, formats=config.formats.of_files(checkpoint.names))
    names = {EMBEDDING, LM_HEAD}
    if checkpoint and config.tie_word_embeddings and checkpoint.names.issuperset(names):
        from minisgl.models.loading.tied import untied_if_different

        config = untied_if_different(checkpoint, config, comm)
    model = build_model(
        config,
        dtype=dtype,
        ops=ops,
        comm=comm,
        max_context=max_context,
        expert_parallel=expert_parallel,
    )
    if checkpoint:
        load_weight(model, checkpoint, device=device, ops=ops, progress=progress)
    else:
        from minisgl.models.loading.dummy import load_dummy

        load_dummy(model, device=device, ops=ops, seed=seed, progress=progress)
    if config.formats.names and comm.rank == 0:
        config.formats.log(model)
    return model


def open_checkpoint(folder: Path, config: ModelConfig) -> Checkpoint:
    """Return the tensors of the folder by the names that the layers declare."""
    if (folder / GGUF_WEIGHTS).exists():
        opened: Checkpoint = plugins.need("gguf", "checkpoint", f"{folder}, a GGUF file,")(
            folder, config
        )
        return opened
    if not (config.family.view or config.family.names or config.is_wrapped):
        return Checkpoint(folder)
    from minisgl_zoo.view import open_view

    return open_view(folder, config)
