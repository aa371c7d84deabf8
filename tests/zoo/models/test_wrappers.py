"""Text models inside models of text and images, and tensors that files hold in another form."""

from __future__ import annotations

import json
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForImageTextToText,
    Gemma3Config,
    Gemma3TextConfig,
    Gemma4Config,
    Gemma4UnifiedConfig,
    Kimi_K25Config,
    Lfm2VlConfig,
    Lfm3VlConfig,
    Mistral3Config,
    MuseGlimmerConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2VLConfig,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
)

from helpers.dense_cases import DENSE_CASES, GEMMA, GEMMA4, YARN
from helpers.family_cases import (
    DEEPSEEK,
    MISTRAL4_ROPE,
    SIZES,
    TOLERANCE,
    check_case,
    save_case,
)
from helpers.hybrid_cases import DELTA, EXPERTS, HYBRID_CASES
from helpers.local_ranks import ranks
from helpers.model_harness import (
    Runner,
    Sequence,
    load,
    make_reference,
    random_ids,
    relative_error,
)
from minisgl.distributed import DistributedCommunicator, SingleRank
from minisgl.errors import CheckpointError, ConfigError, UnsupportedModel

VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
LFM2_VISION = {name: VISION[name] for name in VISION if name != "image_size"} | {"num_patches": 4}
GEMMA4_VISION = {name: value for name, value in VISION.items() if name != "image_size"}


def save_wrapped(config: PreTrainedConfig, folder: Path) -> PreTrainedModel:
    """A random model of text and images, saved. Returns its text model with a head."""
    torch.manual_seed(0)
    whole = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in whole.named_parameters():
            scale = 1.5 * parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.3
            parameter.normal_(1.0 if "norm" in name else 0.0, scale)
    whole.save_pretrained(folder)
    if isinstance(config, Kimi_K25Config):  # transformers 5.24 renames the text model's layers, too
        rename(folder, "language_model.model.blocks.", "language_model.model.layers.")
    return whole


def wrapped(kind: str) -> PreTrainedConfig:
    if kind == "gemma3":
        text = {**SIZES, **GEMMA, "num_hidden_layers": 7}
        return Gemma3Config(text_config=text, vision_config=VISION, mm_tokens_per_image=4)
    if kind == "gemma4":
        heads = {"num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 16}
        text = {**SIZES, **GEMMA4, "pad_token_id": 0}
        return Gemma4Config(text_config=text, vision_config={**GEMMA4_VISION, **heads})
    if kind == "gemma4_unified":
        text = {**SIZES, **GEMMA4, "pad_token_id": 0}
        patches = {"mm_embed_dim": 16, "mm_posemb_size": 4, "output_proj_dims": 16, "patch_size": 2}
        audio = {"audio_embed_dim": 16}
        return Gemma4UnifiedConfig(text_config=text, vision_config=patches, audio_config=audio)
    if kind == "lfm3":
        text = {**SIZES, **HYBRID_CASES["lfm3"][1], "model_type": kind}
        heads = {"num_key_value_heads": 2, "patch_size": 8}
        vision = {name: VISION[name] for name in VISION if name != "image_size"} | heads
        return Lfm3VlConfig(text_config=text, vision_config=vision, projector_hidden_size=16)
    if kind == "muse_glimmer":
        text = {**SIZES, "head_dim": 16, "num_hidden_layers": 5, "sliding_window": 9}
        vision = {"pos_emb_height": 4, "pos_emb_width": 4}
        vision |= {name: VISION[name] for name in VISION if name != "image_size"}
        return MuseGlimmerConfig(
            text_config={**text, "pad_token_id": 0},
            vision_config=vision,
            out_hidden_size=16,
            projector_hidden_size=16,
        )
    if kind == "kimi_k25":
        text = {**SIZES, **DEEPSEEK, "model_type": "deepseek_v3"}
        vision = {name: VISION[name] for name in VISION if name != "image_size"}
        sizes = {"pos_emb_height": 4, "pos_emb_width": 4, "projection_hidden_size": 16}
        vision |= {name: sizes.pop(name) for name in ("pos_emb_height", "pos_emb_width")}
        return Kimi_K25Config(
            text_config=text, vision_config=vision, tie_word_embeddings=False, **sizes
        )
    if kind == "lfm2":
        text = {**SIZES, **HYBRID_CASES["lfm2"][1], "model_type": kind}
        return Lfm2VlConfig(text_config=text, vision_config=LFM2_VISION)
    text = {**SIZES, "model_type": kind, "head_dim": 16}
    if kind == "ministral3":
        text["rope_parameters"] = YARN
    if kind == "mistral4":
        text |= {**DEEPSEEK, "head_dim": 20, "rope_parameters": MISTRAL4_ROPE}
    vision = {**VISION, "model_type": "pixtral", "head_dim": 8}
    return Mistral3Config(text_config=text, vision_config=vision)


def qwen3_vl(kind: type[PreTrainedConfig]) -> PreTrainedConfig:
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
    vision |= {
        "out_hidden_size": 48,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    }
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
    text = {**SIZES, **EXPERTS, "head_dim": 16, "rope_parameters": rope}
    text["moe_intermediate_size"] = 20  # not half of hidden_size, so that gate_up is not square
    return kind(text_config=text, vision_config=vision)


def rename(folder: Path, prefix: str, new: str) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    save_file({name.replace(prefix, new): tensor for name, tensor in tensors.items()}, file)


WRAPPED = (
    *("gemma3", "gemma4", "gemma4_unified"),
    *("mistral", "ministral3", "mistral4", "muse_glimmer", "lfm2", "lfm3", "kimi_k25"),
)


@pytest.mark.parametrize("released", [False, True], ids=["transformers-5", "released"])
@pytest.mark.parametrize("kind", WRAPPED)
@torch.inference_mode()
def test_the_text_model_of_a_wrapper_is_served(
    kind: str, released: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reference = save_wrapped(wrapped(kind), tmp_path)
    names = set(load_file(tmp_path / "model.safetensors"))
    now, before = "model.language_model.", "language_model.model."
    old = any(name.startswith(before) for name in names)
    assert old or any(name.startswith(now) for name in names)
    if released != old:
        rename(tmp_path, *((now, before) if released else (before, now)))
    if released and kind == "kimi_k25":
        file = tmp_path / "config.json"
        values = json.loads(file.read_text())
        values["architectures"] = ["KimiK25ForConditionalGeneration"]
        values["text_config"]["model_type"] = "kimi_k2"
        file.write_text(json.dumps(values))
    with caplog.at_level(logging.INFO):
        model = load(tmp_path)
    lines = [line for line in caplog.messages if "the decoder is the text model" in line]
    assert len(lines) == 1
    assert ("vision_embedder" if kind == "gemma4_unified" else "vision_tower") in lines[0]
    check_case(reference, Runner(model, page_size=4), num_outputs=24)


@pytest.mark.parametrize("kind", ["muse_glimmer", "qwen3_vl_moe"])
def test_two_ranks_compute_what_one_does(kind: str, tmp_path: Path) -> None:
    """Families that transformers has inside models of text and images alone."""
    config = qwen3_vl(Qwen3VLMoeConfig) if kind == "qwen3_vl_moe" else wrapped(kind)
    save_wrapped(config, tmp_path)

    def run(comm: DistributedCommunicator) -> torch.Tensor:
        with torch.inference_mode():
            sequence = Sequence(random_ids(30), 6)
            Runner(load(tmp_path, comm=comm), page_size=4).generate([sequence], chunk=7)
            return torch.cat(sequence.logits)

    alone = run(SingleRank())
    with ThreadPoolExecutor(2) as pool:
        for logits in pool.map(run, ranks(2)):
            assert relative_error(logits, alone) <= TOLERANCE


@pytest.mark.parametrize("kind", [Qwen3_5Config, Qwen3_5MoeConfig])
@torch.inference_mode()
def test_qwen_wrappers_and_their_drafts(
    kind: type[PreTrainedConfig], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As released: `model.language_model.`, `model.visual.` and `mtp.` at the top."""
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
    text = {**SIZES, **DELTA, **EXPERTS} if kind is Qwen3_5MoeConfig else {**SIZES, **DELTA}
    config = kind(text_config=text, vision_config={**vision, "out_hidden_size": 48})
    reference = save_wrapped(config, tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    assert {name.split(".")[1] for name in tensors} == {"language_model", "visual", "weight"}
    tensors["mtp.layers.0.input_layernorm.weight"] = torch.zeros(48)
    save_file(tensors, file)
    with caplog.at_level(logging.INFO):
        model = load(tmp_path)
    assert any("tensors of mtp and visual" in line for line in caplog.messages)
    check_case(reference, Runner(model, page_size=4), num_outputs=24)


@pytest.mark.parametrize("transposed", [True, False], ids=["released", "transformers-5"])
@pytest.mark.parametrize("kind", [Qwen3VLConfig, Qwen3VLMoeConfig])
@torch.inference_mode()
def test_the_text_model_of_qwen3_vl(
    kind: type[PreTrainedConfig], transposed: bool, tmp_path: Path
) -> None:
    """Its three positions of a token are one and the same in text."""
    reference = save_wrapped(qwen3_vl(kind), tmp_path)
    if not transposed:
        reference.save_pretrained(tmp_path, save_original_format=False)
    check_case(reference, Runner(load(tmp_path), page_size=4), num_outputs=24)


@pytest.mark.parametrize("released", [True, False], ids=["released", "transformers-5"])
@pytest.mark.parametrize("kind", [Qwen2VLConfig, Qwen2_5_VLConfig])
@torch.inference_mode()
def test_the_text_model_of_qwen2_vl(
    kind: type[PreTrainedConfig], released: bool, tmp_path: Path
) -> None:
    """Released without a text_config: its fields are beside vision_config, the rope type is mrope,
    and the tensors are `model.layers` and `visual.blocks`."""
    rope = {"type": "mrope", "mrope_section": [2, 2, 2]}
    text = {**SIZES, "use_sliding_window": False, "max_window_layers": 28, "sliding_window": 32}
    text["rms_norm_eps"] = 1e-6
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "in_channels": 3, "patch_size": 14}
    if kind is Qwen2VLConfig:
        vision = {**vision, "embed_dim": 16, "hidden_size": 48}
    else:
        vision = {**vision, "intermediate_size": 16, "out_hidden_size": 48}
    config = kind(
        text_config={**text, "rope_scaling": rope, "rope_theta": 1e6}, vision_config=vision
    )
    reference = save_wrapped(config, tmp_path)
    file = tmp_path / "config.json"
    values = json.loads(file.read_text())
    if released:
        flat = {**text, "rope_scaling": rope, "rope_theta": 1e6, "tie_word_embeddings": False}
        flat |= {"vision_config": values["vision_config"], "model_type": values["model_type"]}
        flat |= {"architectures": values["architectures"], "torch_dtype": "float32"}
        file.write_text(json.dumps(flat))
        rename(tmp_path, "model.language_model.", "model.")
        rename(tmp_path, "model.visual.", "visual.")
    check_case(reference, Runner(load(tmp_path), page_size=4), num_outputs=24)


@torch.inference_mode()
@pytest.mark.parametrize(
    ("name", "draft"),
    [
        ("glm4-moe", "model.layers.3.eh_proj.weight"),
        ("nemotron-3", "mtp.layers.0.eh_proj.weight"),
        ("mellum-moe", "mtp.layers.0.input_layernorm.weight"),
        ("exaone-moe", "mtp.layers.0.input_layernorm.weight"),
        ("hy-v3-moe", "model.layers.3.eh_proj.weight"),
        ("ernie4.5-moe", "model.mtp_linear_proj.0.weight"),
    ],
)
def test_layers_that_draft_are_skipped(
    name: str, draft: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reference, page_size = save_case(name, tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors[draft] = torch.zeros(48, 96)
    save_file(tensors, file, metadata={"format": "pt"})
    with caplog.at_level(logging.INFO):
        model = load(tmp_path)
    assert len([line for line in caplog.messages if "skipped 1 tensors of" in line]) == 1
    check_case(reference, Runner(model, page_size=page_size), num_outputs=9)


@torch.inference_mode()
def test_qwen3_next_as_it_is_released(tmp_path: Path) -> None:
    """Flat rotation fields, no layer types, and the layer that drafts."""
    config_class, changes, _, _ = HYBRID_CASES["qwen3-next-moe"]
    reference = make_reference(config_class(**{**SIZES, **changes}))
    reference.save_pretrained(tmp_path, save_original_format=True)
    file = tmp_path / "config.json"
    values = json.loads(file.read_text())
    del values["rope_parameters"], values["layer_types"]
    values |= {
        "full_attention_interval": 4,
        "partial_rotary_factor": 0.25,
        "rope_scaling": None,
        "rope_theta": 10_000,
    }
    file.write_text(json.dumps(values))
    file = tmp_path / "model.safetensors"
    save_file({**load_file(file), "mtp.norm.weight": torch.zeros(48)}, file)
    check_case(reference, Runner(load(tmp_path), page_size=4), num_outputs=24)


def test_a_text_tensor_is_not_skipped(tmp_path: Path) -> None:
    save_wrapped(wrapped("gemma3"), tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("layers.0.mlp.up_proj.weight"))
    tensors[name.replace("up_proj", "extra")] = tensors.pop(name)
    save_file(tensors, file)
    with pytest.raises(CheckpointError) as error:
        load(tmp_path)
    assert "missing: model.layers.0.mlp.up_proj.weight" in str(error.value)
    assert "extra: model.layers.0.mlp.extra.weight" in str(error.value)


@pytest.mark.parametrize(
    "name", ["Gemma3ForConditionalGeneration", "LlavaForConditionalGeneration"]
)
def test_another_text_model_is_refused_by_name(name: str, tmp_path: Path) -> None:
    values = {"architectures": [name], "text_config": {"model_type": "opt"}}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(UnsupportedModel, match=f"{name}.*'opt'.*Gemma3ForConditionalGeneration"):
        load(tmp_path)


@torch.inference_mode()
def test_gemma3_as_its_released_files_spell_it(tmp_path: Path) -> None:
    """Flat rotation fields, no layer types, and `max_position_embeddings` as it is served."""
    rope = {
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
    }
    sizes = {**SIZES, **GEMMA, "num_hidden_layers": 7, "rope_parameters": rope}
    reference = make_reference(Gemma3TextConfig(**sizes))
    reference.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    values: dict[str, Any] = json.loads(file.read_text())
    del values["rope_parameters"], values["layer_types"]
    values |= {
        "rope_theta": 1e6,
        "rope_local_base_freq": 5e3,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        "sliding_window_pattern": 6,
    }
    file.write_text(json.dumps(values))
    model = load(tmp_path)
    assert model.config.max_context == 128
    check_case(reference, Runner(model, page_size=4), num_outputs=24)


@torch.inference_mode()
def test_fused_families_load_tensors_that_are_apart(tmp_path: Path) -> None:
    reference = make_reference(Phi3Config(**SIZES))
    reference.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for name in [name for name in tensors if "qkv_proj" in name]:
        parts = tensors.pop(name).split([48, 24, 24])
        for part, letter in zip(parts, "qkv", strict=True):
            tensors[name.replace("qkv", letter)] = part.contiguous()
    save_file(tensors, file)
    check_case(reference, Runner(load(tmp_path)), num_outputs=8)


def test_a_fused_tensor_of_another_size_is_named(tmp_path: Path) -> None:
    config_class, changes, _, _ = DENSE_CASES["glm"]
    make_reference(config_class(**{**SIZES, **changes})).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.mlp.gate_up_proj.weight"
    tensors[name] = tensors[name][:-2].contiguous()
    save_file(tensors, file)
    with pytest.raises(CheckpointError) as error:
        load(tmp_path)
    assert f"extra: {name} [142, 48]" in str(error.value)
    assert "missing: model.layers.0.mlp.gate_proj.weight [72, 48]" in str(error.value)


@pytest.mark.parametrize("name", ["nemotron-h", "nemotron-3"])
@torch.inference_mode()
def test_nemotron_h_as_it_is_released(name: str, tmp_path: Path) -> None:
    reference, page_size = save_case(name, tmp_path)
    file = tmp_path / "config.json"
    values = json.loads(file.read_text())
    kinds = values.pop("layers_block_type", None) or values.pop("layer_types")
    letters = {"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E"}
    pattern = "".join(letters[kind] for kind in kinds)
    values |= {"hybrid_override_pattern": pattern, "num_hidden_layers": len(pattern)}
    file.write_text(json.dumps(values))
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {name.replace("model.", "backbone."): tensor for name, tensor in tensors.items()}
    renamed["mtp.layers.0.eh_proj.weight"] = torch.zeros(4, 4)  # drafts, which are left out
    save_file(renamed, tmp_path / "model.safetensors")
    check_case(reference, Runner(load(tmp_path), page_size=page_size), 8)
    for pattern, message in (("ME-*", "whose MLPs"), ("-M*", "whose MLPs"), ("MX*", "the kinds")):
        file.write_text(json.dumps(values | {"hybrid_override_pattern": pattern}))
        with pytest.raises(ConfigError, match=message):
            load(tmp_path)
