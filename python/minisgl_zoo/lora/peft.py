"""Reads the description of an adapter in PEFT's format: adapter_config.json and the header of
adapter_model.safetensors. Imports no torch, since the API server reads adapters too.

The file's tensors say which layers are adapted and with which ranks, so `target_modules` (a list, a
regular expression or "all-linear"), `layers_to_transform` and the like need not be read again. What
is more than plain LoRA is refused by the name of its field; so is every field that is unknown here,
unless it is empty.
"""

from __future__ import annotations

import hashlib
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from safetensors import SafetensorError, safe_open

from minisgl.core.adapters import Adapter
from minisgl.errors import CheckpointError, ConfigError
from minisgl.utils.hf import read_json
from minisgl.utils.text import brief

CONFIG: Final = "adapter_config.json"
WEIGHTS: Final = "adapter_model.safetensors"
MAX_RANK: Final = 128
"""The largest rank. Larger ones cost as much as a second model; they are better merged."""
DTYPES: Final = ("F64", "F32", "F16", "BF16")
"""The number formats that adapters have."""

_READ: Final = frozenset(
    ("peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora",
     "init_lora_weights", "bias")
)  # fmt: skip
_WITHOUT_EFFECT: Final = frozenset(
    ("auto_mapping", "peft_version", "base_model_name_or_path", "revision", "task_type",
     "inference_mode", "lora_dropout", "target_modules", "exclude_modules", "layers_to_transform",
     "layers_pattern", "megatron_config", "megatron_core", "eva_config", "loftq_config",
     "qalora_group_size", "runtime_config", "fan_in_fan_out")
)  # fmt: skip
"""They matter in training, or choose layers, which the file's tensors say. fan_in_fan_out is about
how another class of layers stores the parent's weights; A and B have one form."""
_PLAIN_STARTS: Final = ("gaussian", "eva", "orthogonal", True, False, None)
"""Values of `init_lora_weights` that leave the parent's weights as they are."""
_SLOW: Final = re.compile(r"\)[*+{]|([*+?{(].*){4}", re.DOTALL)
"""What a regular expression must not have: each such part multiplies its time."""
MAX_LENGTH: Final = 160
"""The most characters of an expression and of the name that it is matched with, together."""
MATCHING_S: Final = 1.0
"""The most time of a core for all modules of an adapter."""
_TENSOR: Final = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFile:
    """inputs: each adapted module -> the shape of its A, [rank, inputs]. outputs: -> the shape of
    its B, [outputs, rank]. scales: -> the factor of B A x. Modules have the parent's names in
    transformers."""

    folder: Path
    inputs: Mapping[str, tuple[int, int]]
    outputs: Mapping[str, tuple[int, int]]
    scales: Mapping[str, float]

    @property
    def rank(self) -> int:
        """The largest rank of a module."""
        return max(rank for rank, _ in self.inputs.values())


def read_adapter(folder: Path) -> Adapter:
    """Return the adapter of a folder. Raises ConfigError if it is not served."""
    open_adapter(folder)
    return Adapter(digest_of(folder), str(folder))


def digest_of(folder: Path, weights: bytes | None = None) -> str:
    """Return the SHA-256 of both files. weights: the second, if it is read already. Raises
    CheckpointError."""
    try:
        config = _digest(folder / CONFIG)
        numbers = hashlib.sha256(weights).digest() if weights else _digest(folder / WEIGHTS)
        return hashlib.sha256(config + numbers).hexdigest()
    except OSError as error:
        raise CheckpointError(f"{error.filename} cannot be read: {error.strerror}") from error


def _digest(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def open_adapter(folder: Path) -> AdapterFile:
    """Read the description of an adapter. Raises ConfigError, which names the field or tensor."""
    file = folder / CONFIG
    if not file.is_file():
        raise CheckpointError(
            f"{folder} has no {CONFIG}; a LoRA adapter is a folder that PEFT's save_pretrained made"
        )
    config = read_json(file)
    _refuse_others(config, file)
    inputs: dict[str, tuple[int, int]] = {}
    outputs: dict[str, tuple[int, int]] = {}
    for name, shape in _shapes(folder).items():
        found = _TENSOR.fullmatch(name)
        if not found or len(shape) != 2:
            raise CheckpointError(
                f"{folder / WEIGHTS} has {brief(name)} {list(shape)}, which is not the A or B of a "
                "linear layer; only linear layers can be adapted"
            )
        (inputs if found[2] == "A" else outputs)[found[1]] = (shape[0], shape[1])
    for module in inputs.keys() ^ outputs.keys():
        raise CheckpointError(
            f"{folder / WEIGHTS} lacks A or B of {module}; save the adapter again"
        )
    if not inputs:
        raise CheckpointError(f"{folder / WEIGHTS} has no tensors; save the adapter again")
    scales, end = {}, time.thread_time() + MATCHING_S
    for module, (rank, _) in inputs.items():
        if time.thread_time() > end:
            raise ConfigError(f"{file}: its patterns take too long to match; write modules' names")
        if outputs[module][1] != rank:
            raise CheckpointError(
                f"{folder / WEIGHTS}: A of {module} has rank {rank}, B has {outputs[module][1]}"
            )
        said = _of_pattern(config, "rank_pattern", "r", module, file)
        if said != rank:
            raise CheckpointError(f"{file} gives {module} rank {said:g}, but its A has rank {rank}")
        if rank > MAX_RANK:
            raise ConfigError(
                f"{file}: {module} has rank {rank}, and at most {MAX_RANK} are served; merge the "
                "adapter into its model (PEFT's merge_and_unload) and serve the result"
            )
        alpha = _of_pattern(config, "alpha_pattern", "lora_alpha", module, file)
        scales[module] = alpha / (rank**0.5 if config.get("use_rslora") else rank)
    return AdapterFile(folder=folder, inputs=inputs, outputs=outputs, scales=scales)


def _refuse_others(config: dict[str, Any], file: Path) -> None:
    """Raise ConfigError for what is not plain LoRA."""
    if config.get("peft_type") != "LORA":
        raise ConfigError(
            f"{file}: peft_type is {brief(config.get('peft_type'))}; only LORA is served"
        )
    if config.get("bias", "none") != "none":
        raise ConfigError(
            f"{file}: bias is {brief(config['bias'])}: it changes biases of the parent, which all "
            "requests share; merge the adapter into its model and serve the result"
        )
    start = config.get("init_lora_weights", True)
    if start not in _PLAIN_STARTS:
        raise ConfigError(
            f"{file}: init_lora_weights is {brief(start)}: training has changed the parent's "
            "weights; save the adapter as plain LoRA (PEFT's path_initial_model_for_weight_"
            "conversion)"
        )
    for name, value in config.items():
        if value and name not in _READ and name not in _WITHOUT_EFFECT:
            raise ConfigError(
                f"{file}: {name} is {brief(value)}, which is more than plain LoRA; merge the "
                "adapter into its model (PEFT's merge_and_unload) and serve the result"
            )


def _of_pattern(
    config: dict[str, Any], patterns: str, field: str, module: str, file: Path
) -> float:
    """Return the value of the first pattern whose regular expression matches the module's name or
    the end of it, as PEFT reads `rank_pattern` and `alpha_pattern`; else that of the field. One
    that may be slow is refused: while it is matched, nothing else runs in the process."""
    given = config.get(patterns) or {}
    if not isinstance(given, dict):
        raise ConfigError(f"{file}: {patterns} must be an object, got {brief(given)}")
    try:
        for key in given:
            if len(key) + len(module) > MAX_LENGTH or _SLOW.search(key):
                raise ConfigError(
                    f"{file}: {patterns} has {brief(key)}, which may take too long to match; write "
                    f"the modules' names, or at most three of * + ? {{ ( and none behind a group"
                )
        found = [v for key, v in given.items() if re.match(rf"(.*\.)?({key})$", module)]
    except re.error as error:
        raise ConfigError(f"{file}: {patterns} has no regular expression: {error}") from error
    value: Any = found[0] if found else config.get(field)
    name = patterns if found else field
    if type(value) not in (int, float) or not 0 < value <= sys.float_info.max:
        raise ConfigError(
            f"{file}: {name} gives {module} {brief(value)}; expected a number above 0"
        )
    return float(value)


def _shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor of the file, from its header, which must fit its size."""
    path = folder / WEIGHTS
    if not path.is_file():
        raise CheckpointError(
            f"{folder} has no {WEIGHTS}; adapters in other files, such as adapter_model.bin, which "
            "is a pickle and may run code, are not read: save it with safe_serialization=True"
        )
    try:
        with safe_open(path, framework="numpy") as file:
            tensors = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 # no dict
            for name, tensor in tensors.items():
                if tensor.get_dtype() not in DTYPES:
                    raise CheckpointError(
                        f"{path}: {brief(name)} has numbers of type {tensor.get_dtype()}, expected "
                        f"{', '.join(DTYPES)}"
                    )
            return {name: tuple(tensor.get_shape()) for name, tensor in tensors.items()}
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    except SafetensorError as error:
        raise CheckpointError(
            f"{path} is damaged ({brief(str(error))}); save the adapter again"
        ) from error
