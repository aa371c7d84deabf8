"""The doors of this package: build a model on `meta`, load one, check a checkpoint."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from minisgl.layers import BuildContext
from minisgl.layers.shard import vocab_share
from minisgl.models.config import ModelConfig
from minisgl.models.decoder import EMBEDDING, LM_HEAD, BaseLLMModel, Decoder
from minisgl.models.weight import Checkpoint, Progress, check_weight, load_dummy, load_weight
from minisgl.quantization import Part
from minisgl.utils.logger import get_logger

if TYPE_CHECKING:
    from minisgl.core.args import Quantization
    from minisgl.distributed import DistributedCommunicator
    from minisgl.kernel.ops import Ops

logger = get_logger(__name__)


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
    `BuildContext`. Raises ConfigError where the family refuses the config or the ranks cannot share
    the model.
    """
    spec = config.family.spec(config)
    if expert_parallel:
        from minisgl.models.mixture import check_expert_parallel

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

    dummy: draw random weights from `seed`; no weight file is read. For the others see
    `build_model`. Raises UnsupportedModel, ConfigError and CheckpointError.
    """
    config = ModelConfig.from_folder(folder, quantization)

    def build() -> BaseLLMModel:
        return build_model(
            config,
            dtype=dtype,
            ops=ops,
            comm=comm,
            max_context=max_context,
            expert_parallel=expert_parallel,
        )

    if dummy:
        model = build()
        load_dummy(model, device=device, seed=seed, progress=progress)
        return _loaded(model, config, comm)
    checkpoint = _open(folder, config)
    if config.tie_word_embeddings and _heads_differ(checkpoint, config, comm):
        logger.warning(
            "%s ties the embeddings, but %s differs from %s in the checkpoint: using both, as "
            "Hugging Face does",
            config.fields.where,
            LM_HEAD,
            EMBEDDING,
        )
        config = dataclasses.replace(config, tie_word_embeddings=False)
    model = build()
    load_weight(model, checkpoint, device=device, progress=progress)
    return _loaded(model, config, comm)


def check_model(
    folder: Path,
    *,
    dtype: torch.dtype,
    ops: Ops,
    comm: DistributedCommunicator,
    expert_parallel: bool = False,
    quantization: Quantization | None = None,
) -> None:
    """Raise what `load_model` would raise before it reads a tensor.

    A folder without weights is only logged; one with weights in another format is an error.
    """
    from minisgl.utils.formats import other_format

    if not any(folder.glob("*.safetensors*")) and not other_format(folder):
        logger.warning("%s has no weights yet, which a start needs", folder)
        return
    config = ModelConfig.from_folder(folder, quantization)
    model = build_model(config, dtype=dtype, ops=ops, comm=comm, expert_parallel=expert_parallel)
    check_weight(model, _open(folder, config))


def _loaded(
    model: BaseLLMModel, config: ModelConfig, comm: DistributedCommunicator
) -> BaseLLMModel:
    """Log which weights are dequantised. Returns the model."""
    if config.formats.names and comm.rank == 0:
        from minisgl.quantization.panelled import log_kernels

        log_kernels(model, config.formats.names)
    return model


def _open(folder: Path, config: ModelConfig) -> Checkpoint:
    if (folder / "model.gguf").exists():
        from minisgl.models.gguf import GgufCheckpoint

        return GgufCheckpoint(folder, config)
    if config.family.view is None and not config.is_wrapped:
        return Checkpoint(folder)
    from minisgl.models.view import open_view

    return open_view(folder, config)


def _heads_differ(
    checkpoint: Checkpoint, config: ModelConfig, comm: DistributedCommunicator
) -> bool:
    """Whether embedding and LM head differ. Each rank compares its rows; all return the same."""
    names = (EMBEDDING, LM_HEAD)
    if not checkpoint.names.issuperset(names):
        return False
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
    return not comm.all_min(int(are_equal))
