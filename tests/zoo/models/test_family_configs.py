"""Each family's config.json: a field that is left out, and a field with a value that cannot be."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from transformers import (
    AfmoeConfig,
    AutoConfig,
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    MiniMaxM2Config,
    PreTrainedConfig,
)

from helpers.family_cases import CASES, SIZES, check_case, save_case
from helpers.model_harness import Runner, load, to_old_spelling
from minisgl.distributed import SingleRank
from minisgl.errors import ConfigError, MinisglError
from minisgl.kernel.ops import Ops
from minisgl.models import build_model
from minisgl.models.build import open_checkpoint
from minisgl.models.config import Fields
from minisgl.models.loading.reading import read_config
from minisgl.models.registry import get_model_class, spec_of
from minisgl.quantization import PLAIN
from minisgl_zoo.blocks.scaled import ScaledDecoder

CLASSES = {each[0]: each[1:] for each in reversed(CASES.values())}
"""Config class -> (changes, page size, old spelling) of its first case."""
REQUIRED: dict[str, dict[str, int]] = {
    "DeepseekV2Config": {"num_experts_per_tok": 6},
    "Dots1Config": {"n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 2},
    "Glm4MoeConfig": {"head_dim": 128},
}
"""Fields without which transformers' default values do not fit together."""
ODD = ([[]], {"0": 1}, 1e308, -1)

each_family = pytest.mark.parametrize("config_class", CLASSES, ids=lambda each: each.__name__)


def is_mixture(config_class: type[PreTrainedConfig]) -> bool:
    changes = CLASSES[config_class][0]
    return any(
        name.endswith(("num_experts", "local_experts", "routed_experts")) for name in changes
    )


def save(config: PreTrainedConfig, folder: Path, old_spelling: bool = False) -> dict[str, Any]:
    """Write config.json as transformers does. Returns its content."""
    classes = AutoModelForCausalLM._model_mapping
    config.architectures, config.dtype = [classes[type(config)].__name__], "float32"
    config.save_pretrained(folder)
    if old_spelling:
        to_old_spelling(folder)
    values: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return values


def read(folder: Path, values: dict[str, Any]) -> tuple[object, ...]:
    """Everything that the model is built from, without the fields themselves."""
    (folder / "config.json").write_text(json.dumps(values))
    config = read_config(folder)
    spec = spec_of(config)
    plain = dataclasses.replace(spec.config, fields=Fields({}, ""))
    moe = spec.moe and dataclasses.replace(spec.moe, layer=type, names=str, prefix=str)
    options = getattr(spec.decoder, "keywords", None)
    return dataclasses.replace(spec, config=plain, moe=moe, decoder=None), plain, options


@each_family
def test_each_field_that_has_a_default_may_be_absent(
    config_class: type[PreTrainedConfig], tmp_path: Path
) -> None:
    """Or its absence is an error; but it never means something else than in transformers."""
    config = config_class(**REQUIRED.get(config_class.__name__, {}))
    values = save(config, tmp_path)
    is_plain = "rope_type" in values.get("rope_parameters", {})
    if is_plain and values["rope_parameters"]["rope_type"] == "default":
        to_old_spelling(tmp_path)
        values = json.loads((tmp_path / "config.json").read_text())
    whole, absent = read(tmp_path, values), set[str]()
    for field in values:
        rest = {name: value for name, value in values.items() if name != field}
        try:
            assert read(tmp_path, rest) == whole, field
        except ConfigError as error:  # not every field's absence is one
            assert f"{field} is missing; expected" in str(error)  # noqa: PT017 - see above
        else:
            absent.add(field)
    rest = {name: value for name, value in values.items() if name not in absent}
    assert read(tmp_path, rest) == whole


@each_family
def test_a_value_that_cannot_be_is_refused(
    config_class: type[PreTrainedConfig], tmp_path: Path
) -> None:
    """Each field that is read, and each entry of one; or the value changes nothing."""
    changes, _, old_spelling = CLASSES[config_class]
    values = save(config_class(**{**SIZES, **changes}), tmp_path, old_spelling)
    config, seen = read_config(tmp_path), set[str]()

    class Seen(dict[str, Any]):
        def get(self, name: str, default: Any = None) -> Any:
            seen.add(name)
            return super().get(name, default)

    fields = Fields(Seen(config.fields.values), "")
    spec_of(dataclasses.replace(config, fields=fields))
    for name in sorted(seen | values.keys() | get_model_class(config.architecture).defaults.keys()):
        changed = [{**values, name: odd} for odd in ODD]
        if isinstance(inner := values.get(name), dict):
            changed += [{**values, name: {**inner, key: odd}} for key in inner for odd in ODD]
        for each in changed:
            with contextlib.suppress(MinisglError):
                read(tmp_path, each)


@pytest.mark.parametrize("config_class", [each for each in CLASSES if is_mixture(each)])
def test_quantization_leaves_routers_plain(
    config_class: type[PreTrainedConfig], tmp_path: Path
) -> None:
    save(config_class(**{**SIZES, **CLASSES[config_class][0]}), tmp_path)
    config = read_config(tmp_path, "int8")
    moe = spec_of(config).moe
    assert moe
    (first, *_) = (moe.names(index) for index, sparse in enumerate(moe.is_sparse) if sparse)
    router, expert = (name.removesuffix(".weight") for name in (first.router, first.up.format(0)))
    assert config.formats.of([router], "Linear") is PLAIN
    assert config.formats.of([expert], "Linear") is not PLAIN


@pytest.mark.parametrize("dims", [130, 7])
def test_dims_that_a_head_does_not_have_cannot_rotate(dims: int, tmp_path: Path) -> None:
    values = save(MiniMaxM2Config(), tmp_path)
    with pytest.raises(ConfigError, match="rotary_dim must be an even number up to 128, got"):
        read(tmp_path, {**values, "rotary_dim": dims})


@pytest.mark.parametrize(
    ("case", "changes", "wrong"),
    [
        ("glm4-moe", {"n_group": 5}, "n_group must be 1, or a divisor of 9 experts"),
        ("glm4-moe", {"n_group": 9, "topk_group": 9}, "with 2 or more in each group, got 9"),
        ("glm4-moe", {"n_group": 3, "topk_group": 4}, "topk_group must be from 1 to 3, as a token"),
        ("lfm2", {"layer_types": None, "full_attn_idxs": 5}, "full_attn_idxs must be a list of"),
        ("gemma4-shared", {"num_kv_shared_layers": 8}, "fewer: one layer of each type must have"),
        ("gemma4-shared", {"vocab_size_per_layer_input": 210}, "integer of at least 211, got 210"),
        ("falcon-h1", {"mlp_multipliers": [float("nan"), 1.0]}, "a list of 2 positive numbers"),
        ("glm4-lite-moe", {"kv_lora_rank": 1017}, "kv_lora_rank must be at most 1016, got 1017"),
        ("deepseek-v3-moe", {"attention_bias": True}, "biases of attention are not supported"),
        ("afmoe", {"attention_bias": True}, "biases of attention are not supported"),
        ("cohere2-moe", {"expert_selection_fn": "relu"}, "must be one of softmax, sigmoid"),
        ("cohere2-moe", {"shared_expert_combination_strategy": "max"}, "one of average, sum"),
        ("cohere2-moe", {"layer_types": None, "first_k_dense_replace": 7}, "at most the 6 layers"),
        ("deepseek-v2-moe", {"topk_method": "noaux_tc"}, "one of greedy, group_limited_greedy"),
        ("deepseek-v2-moe", {"norm_topk_prob": True}, "norm_topk_prob must be false"),
        ("mistral4-moe", {"qk_nope_head_dim": 7}, "a partial_rotary_factor that rotates 8 dims"),
        ("hunyuan-moe", {"moe_topk": [3, 2]}, "the same number for each of 2 layers"),
        ("ernie4.5-moe", {"use_bias": True}, "mixtures of ERNIE 4.5 with biases are not served"),
        ("mellum-moe", {"mlp_layer_types": ["sparse"] * 2}, "a list of 3, each dense or sparse"),
        ("mellum-moe", {"mlp_layer_types": [[]] * 3}, "a list of 3, each dense or sparse"),
        ("lfm3", {"layer_types": ["conv"] * 5}, "a list with one or more full_attention"),
        ("granite-swa", {"layer_rope_theta": [1e4] * 4}, "a list of 5 numbers, none below 0"),
    ],
)
def test_values_that_fail_late_are_refused_before_the_weights_are_read(
    case: str, changes: dict[str, Any], wrong: str, tmp_path: Path
) -> None:
    """Groups of experts used to end the first step with an error of torch."""
    with pytest.raises(ConfigError, match=wrong):
        build(case, changes, tmp_path)


def test_factors_may_be_whole_numbers(tmp_path: Path) -> None:
    build("falcon-h1", {"mlp_multipliers": [1, 0.6], "ssm_multipliers": [1] * 5}, tmp_path)


def build(case: str, changes: dict[str, Any], folder: Path) -> None:
    """Build the model of a case with other fields on `meta`, and look at its checkpoint."""
    config_class, sizes, *_ = CASES[case]
    values = save(config_class(**{**SIZES, **sizes}), folder)
    (folder / "config.json").write_text(json.dumps({**values, **changes}))
    safetensors.torch.save_file({}, folder / "model.safetensors")
    config = read_config(folder)
    build_model(config, dtype=torch.float32, ops=Ops(), comm=SingleRank())
    open_checkpoint(folder, config)


@torch.inference_mode()
def test_gelu_means_the_form_with_tanh_in_gemma_1(tmp_path: Path) -> None:
    """Eleven of twelve released files write it so."""
    reference, _ = save_case("gemma", tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    values |= {"hidden_act": "gelu", "hidden_activation": None}
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert AutoConfig.from_pretrained(tmp_path).hidden_act == "gelu_pytorch_tanh"
    check_case(reference, Runner(load(tmp_path)), num_outputs=6)


@pytest.mark.parametrize(
    ("config", "scale"),
    [(GemmaConfig(**SIZES), 6.9375), (AfmoeConfig(**SIZES, mup_enabled=True), 48**0.5)],
    ids=["gemma", "afmoe"],
)
def test_only_gemma_rounds_the_scale_of_embeddings_to_their_dtype(
    config: PreTrainedConfig, scale: float, tmp_path: Path
) -> None:
    """As in transformers; the square root of the hidden size is 6.928."""
    save(config, tmp_path)
    model = build_model(read_config(tmp_path), dtype=torch.bfloat16, ops=Ops(), comm=SingleRank())
    assert isinstance(model, ScaledDecoder)
    assert model.embedding_scale == scale


def test_layers_with_a_window_are_not_stretched(tmp_path: Path) -> None:
    """Gemma 3 as it was released: `rope_scaling` is that of the layers without a window."""
    values = save(Gemma3TextConfig(**SIZES, sliding_window_pattern=2), tmp_path)
    values |= {"rope_parameters": None, "layer_types": None, "sliding_window_pattern": 2}
    values |= {"rope_theta": 1e6, "rope_local_base_freq": 1e4}
    values["rope_scaling"] = {"rope_type": "linear", "factor": 8.0}
    (tmp_path / "config.json").write_text(json.dumps(values))
    config = read_config(tmp_path)
    layers = spec_of(config).layers
    ropes = [(each.window, each.rope or config.rope) for each in layers]
    found = [(window, rope.rope_type, rope.theta, rope.factor) for window, rope in ropes]
    assert found == [(4096, "default", 1e4, 1.0), (None, "linear", 1e6, 8.0)]
