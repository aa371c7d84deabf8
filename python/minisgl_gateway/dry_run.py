"""`--dry-run`: checks a model and options without its weights, and shows the memory they take."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from minisgl.attention import create_attention_backend
from minisgl.core.args import EngineConfig
from minisgl.engine.connect import connect, resolve_dtype
from minisgl.engine.extras import create_adapters
from minisgl.engine.memory import plan_engine_memory
from minisgl.kernel.ops import Ops
from minisgl.kernel.registry import create_ops
from minisgl.models import ModelConfig, build_model
from minisgl.models.build import headed, open_checkpoint
from minisgl.models.loading.reading import read_config
from minisgl.models.loading.weight import join_names
from minisgl.models.registry import spec_of
from minisgl.quantization import UNQUANTISED
from minisgl.utils.hf import other_format
from minisgl.utils.logger import get_logger
from minisgl.utils.text import size_of

if TYPE_CHECKING:
    import torch

    from minisgl.distributed import DistributedCommunicator

logger = get_logger(__name__)


def dry_run(config: EngineConfig) -> str:
    """Check the checkpoint and the options without loading weights. Returns the memory table."""
    device, comm = connect(config)
    try:
        model = read_config(config.folder, config.quantization, mtp=config.mtp)
        dtype = resolve_dtype(config, model, device)
        # Only for quantised weights the memory depends on the kernels, which must be compiled.
        is_known = not config.quantization and not model.formats.depends_on_kernels
        ops = Ops() if is_known else create_ops(device.torch_device)
        adapters = create_adapters(config, model, device.torch_device, comm)
        adapt = adapters.adapt if adapters else None
        table = str(plan_engine_memory(config, model, dtype, device, comm, ops, adapt))
        if adapters:
            adapters.bind(build_model(model, dtype=dtype, ops=ops, comm=comm, adapt=adapt))
        if config.attn != "auto":
            create_attention_backend(
                config.attn,
                Ops(),
                device.torch_device,
                dtype=dtype,
                head_dim=model.head_dim,
                page_size=config.page_size,
                needs=spec_of(model).attention,
            )
        if not config.dummy_weight:
            _check_weights(config, dtype, ops, comm)
        if config.quantization:
            table += _saved(config, model, dtype, comm, ops)
        return table
    finally:
        device.close()
        comm.close()


def _check_weights(
    config: EngineConfig, dtype: torch.dtype, ops: Ops, comm: DistributedCommunicator
) -> None:
    """Raise the errors that `load_model` would raise before it reads a tensor.

    A folder without weights gets a warning in the log. Weights in another format are an error.
    """
    folder = config.folder
    has_weights = any(folder.glob("*.safetensors*")) or any(folder.glob("*.gguf"))
    if not has_weights and not other_format(folder):
        logger.warning("%s has no weights yet; a start needs them", folder)
        return
    read = read_config(folder, config.quantization, mtp=config.mtp)
    checkpoint = open_checkpoint(folder, read)
    model = build_model(
        headed(read, checkpoint), dtype=dtype, ops=ops, comm=comm, expert_parallel=config.ep
    )
    join_names(list(model.parameters()), checkpoint)


def _saved(
    config: EngineConfig,
    model: ModelConfig,
    dtype: torch.dtype,
    comm: DistributedCommunicator,
    ops: Ops,
) -> str:
    """Return a line with the memory that --quantization saves."""
    held, plain = (
        build_model(
            each, dtype=dtype, ops=ops, comm=comm, expert_parallel=config.ep
        ).num_weight_bytes
        for each in (model, replace(model, formats=UNQUANTISED))
    )
    return (
        f"\n--quantization {config.quantization}: weights take {size_of(held)} instead of "
        f"{size_of(plain)}"
    )
