"""Reads and checks config.json.

Both spellings are read: `rope_theta` with `rope_scaling` and `torch_dtype` (up to transformers 4),
and `rope_parameters` with `dtype` (from 5 on). An error names the wrong or missing field and its
file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from minisgl import plugins
from minisgl.core.args import Quantization
from minisgl.errors import ConfigError
from minisgl.kernel.ops import Activation
from minisgl.models.config import Fields, ModelConfig
from minisgl.models.loading.rotation import rotary_config
from minisgl.models.loading.weight import checkpoint_dtype
from minisgl.models.registry import get_model_class
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
MAX_HEAD_DIM = 1024
"""The C++ kernels handle no larger head (`kernel/csrc/rows.h`)."""
ReadFormats = Callable[[ModelConfig, Path, Quantization | None], Formats]
"""The row `any` of table `weight_formats`: from a config, the path of `MODELOPT` and
`--quantization` to the formats of the weights. Raises ConfigError."""
MODELOPT = "hf_quant_config.json"
"""The file in which NVIDIA's ModelOpt describes the quantised weights."""
MAX_LAYERS = 1024
"""A larger number is refused as a typo, because it would take long to build."""


def read_config(
    folder: Path, quantization: Quantization | None = None, *, mtp: bool = False
) -> ModelConfig:
    """Read `folder`/config.json, and the weights' headers only if it does not name the dtype.

    quantization: the format into which plain weights are converted while they are read. mtp: see
    `ModelConfig`.
    Raises UnsupportedModel if no family has the architecture, CheckpointError if the file is no
    JSON object, and ConfigError for a wrong field.
    """
    file = folder / "config.json"
    values = read_json(file)
    config = Fields(values, str(file))
    is_wrapped = False
    if isinstance(values.get("text_config"), dict) or "vision_config" in values:
        text_values = plugins.need("wrappers", "text", f"{file}: a model of text and images")
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
    read: ReadFormats | None = None
    if quantization or stored is not None or modelopt.is_file():
        what = (
            f"--quantization {quantization}" if quantization else f"{file}: a quantised checkpoint"
        )
        read = plugins.need("weight_formats", "any", what, of="checkpoints")
    made = ModelConfig(
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
        formats=UNQUANTISED,
        is_wrapped=is_wrapped,
        mtp=mtp,
    )
    return replace(made, formats=read(made, modelopt, quantization)) if read else made


def _dtype(config: Fields, folder: Path) -> torch.dtype:
    for name in ("dtype", "torch_dtype"):
        if (value := config.values.get(name)) is not None:
            if str(value) not in _DTYPES:
                raise config.error(name, f"one of {', '.join(_DTYPES)}")
            return _DTYPES[str(value)]
    return checkpoint_dtype(folder)
