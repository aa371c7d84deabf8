"""Build a model on `meta`, or load one from a checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from minisgl import plugins
from minisgl.errors import ConfigError
from minisgl.layers import BuildContext
from minisgl.layers.base import Adapt
from minisgl.layers.shard import vocab_share
from minisgl.models.blocks.decoder import Decoder
from minisgl.models.config import ModelConfig
from minisgl.models.loading.reading import read_config
from minisgl.models.loading.weight import Checkpoint, Progress, load_weight
from minisgl.models.registry import get_model_class, spec_of
from minisgl.models.spec import EMBEDDING, LM_HEAD, BaseLLMModel, ModelSpec
from minisgl.quantization import Part
from minisgl.utils.hf import GGUF_WEIGHTS
from minisgl.utils.logger import get_logger
from minisgl.utils.text import counted

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
    adapt: Adapt | None = None,
) -> BaseLLMModel:
    """Build this rank's part of the model on `meta`, where it has sizes and no memory.

    max_context: positions to serve, `config.max_context` by default. expert_parallel, adapt: see
    `BuildContext`. Raises ConfigError if the family refuses the config or the model cannot be split
    over the ranks.
    """
    spec = spec_of(config)
    if expert_parallel:
        _check_expert_parallel(spec, comm)
    build = BuildContext(
        ops=ops,
        comm=comm,
        dtype=dtype,
        formats=config.formats,
        expert_parallel=expert_parallel,
        adapt=adapt,
    )
    model = (spec.decoder or Decoder)(spec, build, max_context or config.max_context)
    if config.mtp and model.mtp is None:
        raise ConfigError(
            f"--drafts mtp needs a layer of multi-token prediction, and {config.architecture} has "
            "none that is served; leave mtp out"
        )
    return model


def load_model(
    folder: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    ops: Ops,
    comm: DistributedCommunicator,
    max_context: int | None = None,
    expert_parallel: bool = False,
    adapt: Adapt | None = None,
    quantization: Quantization | None = None,
    dummy: bool = False,
    seed: int = 0,
    progress: Progress | None = None,
    mtp: bool = False,
) -> BaseLLMModel:
    """Load the model of a checkpoint folder, ready to run on `device`.

    quantization, mtp: see `read_config`. dummy: draw random weights from `seed`; no weight file is
    read. For the others see `build_model`. Raises UnsupportedModel, ConfigError and
    CheckpointError.
    """
    config = read_config(folder, quantization, mtp=mtp)
    checkpoint = None if dummy else open_checkpoint(folder, config)
    if checkpoint:
        config = replace(config, formats=config.formats.of_files(checkpoint.names))
        config = headed(config, checkpoint)
    if checkpoint and config.tie_word_embeddings:
        config = _untied_if_different(checkpoint, config, comm)
    model = build_model(
        config,
        dtype=dtype,
        ops=ops,
        comm=comm,
        max_context=max_context,
        expert_parallel=expert_parallel,
        adapt=adapt,
    )
    if checkpoint:
        load_weight(model, checkpoint, device=device, ops=ops, progress=progress)
    else:
        load_dummy = plugins.need("weights", "dummy", "--dummy-weight")
        load_dummy(model, device=device, ops=ops, seed=seed, progress=progress)
    if config.formats.names and comm.rank == 0:
        config.formats.log(model)
    return model


def headed(config: ModelConfig, checkpoint: Checkpoint) -> ModelConfig:
    """Return `config`, with tied embeddings if the files are an embedder's, without an LM head."""
    is_headless = checkpoint.is_bare and LM_HEAD not in checkpoint.names
    return replace(config, tie_word_embeddings=True) if is_headless else config


def _untied_if_different(
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
    return replace(config, tie_word_embeddings=False)


def open_checkpoint(folder: Path, config: ModelConfig) -> Checkpoint:
    """Return the tensors of the folder by the names that the layers declare."""
    if (folder / GGUF_WEIGHTS).exists():
        opened: Checkpoint = plugins.need("gguf", "checkpoint", f"{folder}, a GGUF file,")(
            folder, config
        )
        return opened
    family, plain = get_model_class(config.architecture), Checkpoint(folder)
    if not (family.view or family.names or config.is_wrapped or plain.is_bare):
        return plain
    seen: Checkpoint = plugins.need("wrappers", "view", f"{folder}: {config.architecture}")(
        folder, config, family
    )
    return seen


def _check_expert_parallel(spec: ModelSpec, comm: DistributedCommunicator) -> None:
    """Raise ConfigError if this model's experts cannot be split over the ranks."""
    if spec.moe is None:
        raise ConfigError(
            f"--ep splits experts over ranks, and {spec.config.architecture} has none; leave it out"
        )
    if not any(spec.moe.is_sparse):
        raise ConfigError(
            f"--ep splits experts over ranks, and no layer of {spec.config.fields.where} has any "
            "(mlp_only_layers, decoder_sparse_step); leave it out"
        )
    if comm.size > spec.moe.num_experts:
        raise ConfigError(
            f"{counted(spec.moe.num_experts, 'expert')} cannot be split over {comm.size} ranks, "
            "since each needs one; leave --ep out, or use fewer ranks"
        )
