"""Reads and checks config.json: the sizes that every family has, and the rotary embedding.

Both spellings are read: `rope_theta` with `rope_scaling` and `torch_dtype` (up to transformers 4),
and `rope_parameters` with `dtype` (from 5 on). An error names the wrong or missing field and its
file.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from minisgl.core.args import Quantization
from minisgl.errors import ConfigError
from minisgl.kernel.ops import Activation
from minisgl.layers.frequencies import ROPE_TYPES, RotaryConfig
from minisgl.models.registry import get_model_class
from minisgl.models.spec import Family
from minisgl.quantization import UNQUANTISED, Formats
from minisgl.utils.hf import read_json
from minisgl.utils.text import counted

_ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
OTHER_ROPE_NAMES = {"su": "longrope", "mrope": "default"}
"""su is longrope's first name. mrope gives a token three positions, which are equal in text."""
MAX_HEAD_DIM = 1024
"""The C++ kernels handle no larger head (`kernel/csrc/rows.h`)."""
MODELOPT = "hf_quant_config.json"
"""The file in which NVIDIA's ModelOpt describes the quantised weights."""
MAX_LAYERS = 1024
"""A larger number is refused as a typo, because it would take long to build."""


@dataclass(frozen=True, slots=True)
class Fields:
    """Typed access to a JSON object. An absent or null field has the value `default`, if given."""

    values: Mapping[str, Any]
    where: str

    def integer(self, name: str, default: int | None = None, *, minimum: int = 1) -> int:
        value = self._value(name, default)
        if type(value) is not int or value < minimum:
            raise self.error(name, f"an integer of at least {minimum}")
        if value >= 2**31:
            raise self.error(name, "an integer below 2 ** 31")
        return value

    def optional_integer(self, name: str) -> int | None:
        """Return the field, or None if it is null or absent."""
        return None if self.values.get(name) is None else self.integer(name)

    def number(self, name: str, default: float | None = None) -> float:
        value = self._value(name, default)
        if type(value) not in (int, float) or not 0 < value <= sys.float_info.max:
            raise self.error(name, "a positive number")
        return float(value)

    def optional_number(self, name: str) -> float | None:
        return None if self.values.get(name) is None else self.number(name)

    def flag(self, name: str, default: bool) -> bool:
        value = self._value(name, default)
        if type(value) is not bool:
            raise self.error(name, "true or false")
        return value

    def error(self, name: str, expected: str) -> ConfigError:
        if self.values.get(name) is None:
            return ConfigError(f"{self.where}: {name} is missing; expected {expected}")
        return ConfigError(f"{self.where}: {name} must be {expected}, got {self.values[name]!r}")

    def _value(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        return default if value is None else value


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The sizes of a decoder.

    fields: all of config.json under our names of fields, with the family's defaults. dtype: of the
    checkpoint's tensors. formats: of its weights. is_wrapped: whether the decoder is the text model
    of a larger model.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    activation: Activation
    tie_word_embeddings: bool
    rope: RotaryConfig
    dtype: torch.dtype
    fields: Fields
    formats: Formats
    is_wrapped: bool = False

    @property
    def max_context(self) -> int:
        """The positions that the checkpoint was made for, with its RoPE scaling if it has one."""
        return self.rope.max_context

    @property
    def default_context(self) -> int:
        """The positions to serve unless more are asked for."""
        return self.rope.default_context

    @property
    def family(self) -> Family:
        return get_model_class(self.architecture)

    @classmethod
    def from_folder(cls, folder: Path, quantization: Quantization | None = None) -> ModelConfig:
        """Read `folder`/config.json, and the weights' headers only if it does not name the dtype.

        quantization: the format into which plain weights are converted while they are read.
        Raises UnsupportedModel if no family has the architecture, CheckpointError if the file is no
        JSON object, and ConfigError for a wrong field.
        """
        file = folder / "config.json"
        values = read_json(file)
        config = Fields(values, str(file))
        is_wrapped = False
        if isinstance(values.get("text_config"), dict) or "vision_config" in values:
            from minisgl.models.wrapper import text_values

            whole, values = values, text_values(values, str(file))
            is_wrapped, config = values is not whole, Fields(values, str(file))
        architectures = values.get("architectures")
        if not isinstance(architectures, list) or not architectures:
            raise config.error("architectures", "a list with one name, as in ['LlamaForCausalLM']")
        family = get_model_class(str(architectures[0]))
        named = {
            ours: value
            for theirs, ours in family.renames.items()
            if (value := values.get(theirs)) is not None
        }
        config = Fields({**family.defaults, **values, **named}, str(file))

        hidden_size = config.integer("hidden_size")
        num_heads = config.integer("num_attention_heads")
        num_kv_heads = config.integer("num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise config.error(
                "num_key_value_heads", f"a divisor of {counted(num_heads, 'query head')}"
            )
        if config.values.get("head_dim") is None and hidden_size % num_heads:
            raise config.error(
                "head_dim", f"an integer, since {num_heads} heads do not divide {hidden_size}"
            )
        head_dim = config.integer("head_dim", hidden_size // num_heads)
        if head_dim > MAX_HEAD_DIM:
            raise ConfigError(
                f"{file}: a head would have {head_dim} dims; expected at most {MAX_HEAD_DIM}"
            )
        num_layers = config.integer("num_hidden_layers")
        if num_layers > MAX_LAYERS:
            raise config.error("num_hidden_layers", f"at most {MAX_LAYERS}")
        activation = str(config._value("hidden_act", family.defaults.get("hidden_act", "silu")))
        activations: Mapping[str, Activation] = {**_ACTIVATIONS, **family.activations}
        if family.activation:
            activations = {family.activation: "silu"}
        if activation not in activations:
            raise config.error("hidden_act", f"one of {', '.join(activations)}")
        stored, modelopt = config.values.get("quantization_config"), folder / MODELOPT
        formats = UNQUANTISED
        if quantization or stored is not None or modelopt.is_file():
            from minisgl.models.formats import formats_of

            formats = formats_of(config, modelopt, quantization, family, is_wrapped)
        made = cls(
            architecture=str(architectures[0]),
            vocab_size=config.integer("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=config.integer("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            norm_eps=config.number("rms_norm_eps", 1e-6),
            activation=activations[activation],
            tie_word_embeddings=config.flag("tie_word_embeddings", False),
            rope=rotary_config(config, head_dim, "full_attention" if family.layer_ropes else None),
            dtype=_dtype(config, folder),
            fields=config,
            formats=formats,
            is_wrapped=is_wrapped,
        )
        if stored is None or formats is not UNQUANTISED:
            return made
        # A GGUF file: the names of its tensors, and so their formats, depend on the other fields.
        from minisgl_zoo.gguf.formats import GgufFormats

        return replace(made, formats=GgufFormats.read(made))


def _dtype(config: Fields, folder: Path) -> torch.dtype:
    for name in ("dtype", "torch_dtype"):
        if (value := config.values.get(name)) is not None:
            if str(value) not in _DTYPES:
                raise config.error(name, f"one of {', '.join(_DTYPES)}")
            return _DTYPES[str(value)]
    from minisgl.models.weight import checkpoint_dtype

    return checkpoint_dtype(folder)


def rotary_config(config: Fields, head_dim: int, kind: str | None = None) -> RotaryConfig:
    """Return the rotation that config.json describes. Raises ConfigError.

    kind: a type of layer. If config.json has an object for each type, that of `kind` is read, and
    `max_position_embeddings` counts the positions after stretching. If config.json has both
    `rope_scaling` and `rope_parameters`, the former counts, as in Hugging Face.
    """
    given = config.values.get("rope_scaling") not in (None, {})
    name = "rope_scaling" if given else "rope_parameters"
    values = config.values.get(name)
    values = {} if values is None else values
    if kind is not None and isinstance(values, dict) and isinstance(values.get(kind), dict):
        name, values = f"{name}.{kind}", values[kind]
    if not isinstance(values, dict) or any(isinstance(value, dict) for value in values.values()):
        raise config.error(name, "one object for all layers")
    rope = Fields(values, f"{config.where}: {name}")
    rope_type = str(values.get("rope_type", values.get("type", "default")))
    rope_type = OTHER_ROPE_NAMES.get(rope_type, rope_type)
    if rope_type not in ROPE_TYPES:
        raise ConfigError(
            f"{rope.where}: rope type {rope_type!r} is not supported; "
            f"expected one of {', '.join(ROPE_TYPES)}"
        )
    partial = rope.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0))
    rotary_dim = head_dim if rope_type == "proportional" else int(head_dim * min(partial, 2**31))
    lowest = 4 if rope_type == "dynamic" else 2  # its exponent divides by rotary_dim - 2
    if not lowest <= rotary_dim <= head_dim or rotary_dim % 2:
        raise ConfigError(
            f"{config.where}: {rotary_dim} of a head's {head_dim} dims would be rotated; "
            f"expected an even number from {lowest} to {head_dim}"
        )
    theta = rope.number("rope_theta", config.number("rope_theta", 10_000.0))
    if theta <= 1:
        raise ConfigError(f"{config.where}: rope_theta must be above 1, got {theta}")
    max_position = config.integer("max_position_embeddings")
    # A top-level field wins over the one in the object, as in Hugging Face.
    original = config.optional_integer("original_max_position_embeddings")
    original = original or rope.integer("original_max_position_embeddings", max_position)
    read = RotaryConfig(
        rope_type=rope_type,
        theta=theta,
        rotary_dim=rotary_dim,
        max_position=max_position,
        original_max_position=original,
    )
    if rope_type == "default":
        return read
    from minisgl_zoo.blocks.rotation import stretched

    return stretched(read, rope, of_a_type=kind is not None)
