"""The adapters of an engine: they are checked against its model, and put into slots.

An adapter names the modules of transformers, as the checkpoint's files do; our layers may declare
them otherwise. So the outputs of the adapter's B matrices are seen through the view of the family's
files (`minisgl_zoo.view`), which splits, renames, reorders and scales outputs as those of weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from minisgl.core.adapters import Adapter, AdapterLoad
from minisgl.core.args import EngineConfig
from minisgl.distributed import DistributedCommunicator
from minisgl.errors import AdapterLost, CheckpointError, ConfigError
from minisgl.models import BaseLLMModel, ModelConfig, get_model_class
from minisgl.quantization import Part, Weight
from minisgl.utils.logger import get_logger
from minisgl.utils.text import brief
from minisgl_zoo.lora.peft import WEIGHTS, AdapterFile, digest_of, open_adapter
from minisgl_zoo.lora.products import MIN_RANK, inputs_of, rows_of
from minisgl_zoo.lora.weight import AdaptedWeight, StepRows
from minisgl_zoo.view import CheckpointView, open_view

logger = get_logger(__name__)

USUAL_RANK = 16
"""The rank of a slot if no adapter is known at the start. PEFT's default is 8; 16 is common."""
MAX_NAMED = 5


@dataclass(frozen=True, slots=True)
class _Outputs:
    """Stands for a file with the weight of a linear layer; it has B in place of the weight."""

    b: Tensor

    def get_slice(self, name: str) -> _Outputs:
        return self

    def get_shape(self) -> list[int]:
        return list(self.b.shape)

    def get_dtype(self) -> str:
        return "F32"

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor:
        return self.b[index]


class DeviceAdapters:
    """Mutable: what the slots have. Implements `minisgl.engine.extras.EngineAdapters`."""

    def __init__(
        self,
        config: EngineConfig,
        model: ModelConfig,
        device: torch.device,
        comm: DistributedCommunicator,
    ) -> None:
        """Raises ConfigError for adapters that are not plain LoRA."""
        self._folders = [Path(place) for place in config.loras.values()]
        ranks = [open_adapter(folder).rank for folder in self._folders] or [USUAL_RANK]
        rank = config.max_lora_rank or max(ranks)
        rank = max(MIN_RANK, 1 << (rank - 1).bit_length())
        self.step = StepRows(config.num_slots, rank, is_gpu=device.type == "cuda")
        if comm.rank == 0:
            logger.info("slots for %d LoRA adapters of rank %d", config.num_slots, rank)
        self._config, self._comm = model, comm
        self._num_changed = 0  # weights that an adapter has changed; it only grows
        self._weights: list[AdaptedWeight] = []

    @property
    def key(self) -> int:
        return self._num_changed

    def adapt(self, weight: Weight, parts: Sequence[Part]) -> Weight:
        return AdaptedWeight(weight, parts, self.step)

    def bind(self, model: BaseLLMModel) -> None:
        self._weights = [node for node in model.walk() if isinstance(node, AdaptedWeight)]
        for folder in self._folders:
            self.check(folder)

    def check(self, folder: Path) -> None:
        self._view(open_adapter(folder), lambda module, shape: torch.empty(shape, device="meta"))

    def load(self, loads: Sequence[AdapterLoad]) -> None:
        for slot, adapter in loads:
            error: Exception | None = None
            try:
                a, b, view = self._read(adapter)
            except (ConfigError, OSError, SafetensorError) as failed:
                error = failed
            if not self._comm.all_min(int(error is None)):
                raise AdapterLost(
                    f"the adapter cannot be used any more: {error or 'another rank failed'}",
                    digest=adapter.digest,
                    folder=adapter.folder,
                )
            for weight in self._weights:
                weight.products.fill(slot, *_shares(weight, a, b, view))
        self._num_changed = sum(weight.products.is_changed for weight in self._weights)

    def begin(self, slots_T: Tensor | None, positions_S: Tensor) -> None:
        self.step.begin(slots_T, positions_S)

    def _read(
        self, adapter: Adapter
    ) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor], CheckpointView]:
        """Read an adapter. Returns A, by module, B times the scale, and the view of its B's."""
        folder = Path(adapter.folder)
        data = (folder / WEIGHTS).read_bytes()
        if digest_of(folder, data) != adapter.digest:
            raise CheckpointError(f"the files in {folder} have changed; load them again")
        file, tensors = open_adapter(folder), load(data)

        def half(module: str, letter: str, scale: float = 1.0) -> Tensor:
            name = f"base_model.model.{module}.lora_{letter}.weight"
            tensor = tensors[name].float() * scale
            # As it is held: on a GPU zeros of other adapters' tokens are multiplied by it, too.
            if not tensor.to(self._weights[0].dtype).isfinite().all():
                raise CheckpointError(
                    f"{folder / WEIGHTS}: {name} has NaN or infinity, or is with its scale too "
                    f"large for {self._weights[0].dtype}"
                )
            return tensor

        a = {module: half(module, "A") for module in file.inputs}
        b = {module: half(module, "B", scale) for module, scale in file.scales.items()}
        return a, b, self._view(file, lambda module, shape: b[module])

    def _view(
        self, file: AdapterFile, outputs: Callable[[str, tuple[int, int]], Tensor]
    ) -> CheckpointView:
        """Return the view of the adapter's B's. Raises ConfigError if it does not fit the model."""
        if file.rank > self.step.rank:
            raise ConfigError(
                f"{file.folder} has rank {file.rank}, and this server's slots have "
                f"{self.step.rank}; start it with --max-lora-rank {file.rank}"
            )
        files = {
            f"{module}.weight": _Outputs(outputs(module, shape))
            for module, shape in file.outputs.items()
        }
        config = self._config
        view = open_view(file.folder, config, get_model_class(config.architecture), files)
        used: set[str] = set()
        for part in (part for weight in self._weights for part in weight.parts):
            if part.name not in view.names:
                continue
            module = view.source(part.name).removesuffix(".weight")
            found = (view.shape(part.name)[0], file.inputs[module][1])
            if found != part.shape:
                raise ConfigError(
                    f"{file.folder} adapts {module} as a layer of {list(found)} outputs and "
                    f"inputs, but the model's has {list(part.shape)}: it is another model's adapter"
                )
            used.add(module)
        if unused := sorted(file.inputs.keys() - used):
            more = f" and {len(unused) - MAX_NAMED} more" if len(unused) > MAX_NAMED else ""
            named = ", ".join(map(brief, unused[:MAX_NAMED]))
            raise ConfigError(
                f"{file.folder} adapts {named}{more}, which this model "
                "does not have, or which take no adapters here: those are the linear layers, "
                "without experts, routers, embeddings and LM head (docs/lora.md)"
            )
        return view


def _shares(
    weight: AdaptedWeight,
    a: Mapping[str, Tensor],
    b: Mapping[str, Tensor],
    view: CheckpointView,
) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
    """Return this rank's share of an adapter's A's and B's, as `Products.fill` takes them."""
    of_name: dict[int, Tensor] = {}
    of_part: dict[int, Tensor] = {}
    for index, part in enumerate(weight.parts):
        if part.name in view.names:
            module = view.source(part.name).removesuffix(".weight")
            inputs, rows = inputs_of(part), rows_of(part)
            of_name[weight.products.a_of[index]] = a[module][:, inputs.start : inputs.stop]
            whole = Part(
                name=part.name, shape=(part.shape[0], b[module].shape[1]), axis=0, share=rows
            )
            of_part[index] = view.share(part.name, whole)
    return of_name, of_part
