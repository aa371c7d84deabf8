"""Check a checkpoint against its model without reading a tensor."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from minisgl.models.build import build_model, open_checkpoint
from minisgl.models.config import ModelConfig
from minisgl.models.loading.weight import join_names
from minisgl.utils.formats import other_format
from minisgl.utils.logger import get_logger

if TYPE_CHECKING:
    from minisgl.core.args import Quantization
    from minisgl.distributed import DistributedCommunicator
    from minisgl.kernel.ops import Ops

logger = get_logger(__name__)


def check_model(
    folder: Path,
    *,
    dtype: torch.dtype,
    ops: Ops,
    comm: DistributedCommunicator,
    expert_parallel: bool,
    quantization: Quantization | None,
) -> None:
    """Raise the errors that `load_model` would raise before it reads a tensor.

    A folder without weights gets a warning in the log. Weights in another format are an error.
    """
    has_weights = any(folder.glob("*.safetensors*")) or any(folder.glob("*.gguf"))
    if not has_weights and not other_format(folder):
        logger.warning("%s has no weights yet; a start needs them", folder)
        return
    config = ModelConfig.from_folder(folder, quantization)
    model = build_model(config, dtype=dtype, ops=ops, comm=comm, expert_parallel=expert_parallel)
    join_names(list(model.parameters()), open_checkpoint(folder, config))
