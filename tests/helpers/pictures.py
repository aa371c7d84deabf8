"""Small models of text and images, saved as released ones are, and pictures for them."""

from __future__ import annotations

import base64
import copy
import io
import json
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForImageTextToText,
    Mistral3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
)
from transformers.image_processing_base import ImageProcessingMixin

from helpers import text_checkpoints, without_torchvision
from helpers.hybrid_cases import DELTA, EXPERTS
from minisgl.tokenizer import load_tokenizer
from minisgl.tokenizer.tokenize import PromptEncoder
from minisgl_zoo.vision.reader import Reader

SIZES = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
}
BUFFERS = {"min": -1.5, "max": 1.5, "bias": 0.5, "scale": 0.7}
"""The numbers beside the weights of Gemma 4's tower: bounds of activations, and of its output."""
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST]"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for b in m.content %}"
    "{% if b.type == 'text' %}{{ b.text }}{% elif b.type in ['image', 'image_url'] %}[IMG]"
    "{% endif %}{% endfor %}{% endif %}[/INST]"
    "{% elif m.role == 'assistant' %}{{ m.content }}{{ eos_token }}"
    "{% else %}[TOOL]{{ m.content if m.content is string else m.content | tojson }}[/TOOL]"
    "{% endif %}{% endfor %}"
)

QWEN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for b in m.content %}{% if b.type == 'image' %}<|vision_start|><|image_pad|>"
    "<|vision_end|>{% else %}{{ b.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}<|im_start|>assistant\n"
)

GEMMA3 = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content | trim }}{% else %}{% for b in m.content %}"
    "{% if b.type == 'image' %}<start_of_image>{% else %}{{ b.text | trim }}{% endif %}"
    "{% endfor %}{% endif %}<end_of_turn>\n{% endfor %}<start_of_turn>model\n"
)
GEMMA4 = (
    "{{ bos_token }}{% for m in messages %}<|turn>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for b in m.content %}"
    "{% if b.type == 'image' %}\n\n<|image|>\n\n{% else %}{{ b.text | trim }}{% endif %}"
    "{% endfor %}{% endif %}<turn|>\n{% endfor %}<|turn>model\n"
)
LFM2 = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}"
    "{{ m.content }}{% else %}{% for b in m.content %}{% if b.type == 'image' %}<image>"
    "{% else %}{{ b.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)


@dataclass(frozen=True)
class Sample:
    """A saved model, its reference, and how it processes pictures."""

    folder: Path
    model: PreTrainedModel
    processor: Any
    pixels: Callable[[Any, list[Any]], dict[str, Any]]
    """From the processor and pictures to the arguments of the model."""
    types: str = ""
    """The argument that says which tokens are an image's."""
    masks_of_generate: bool = False
    """Whether the masks are those of `generate`: in 5.24 `forward` makes others (huggingface/
    transformers#46711), by which layers without a window see images both ways."""

    @cached_property
    def encoder(self) -> PromptEncoder:
        """It reads pictures in this process: to start another one takes seconds."""
        encoder = PromptEncoder(tokenizer=load_tokenizer(self.folder), folder=self.folder)
        images: Any = encoder.images
        images._helper = _Here(Reader(self.folder, 0))
        return encoder


class _Here:
    """`minisgl.utils.helper.Helper` without a process. Its memory is not limited."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        reader._is_limited = True

    def ask(self, question: bytes, cpu_s: float) -> Any:
        return self._reader.answer(json.loads(question))


def mistral3(folder: Path) -> Sample:
    ids = _tokenizer(folder, ["[IMG]", "[IMG_BREAK]", "[IMG_END]", "[INST]", "[/INST]"], MISTRAL)
    vision = {
        "model_type": "pixtral", "hidden_size": 32, "intermediate_size": 48, "head_dim": 16,
        "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 112, "patch_size": 4,
    }  # fmt: skip
    text = {**SIZES, "model_type": "mistral", "vocab_size": ids["size"], "sliding_window": None}
    config = Mistral3Config(
        text_config=text,
        vision_config=vision,
        image_token_index=ids["[IMG]"],
        spatial_merge_size=2,
        tie_word_embeddings=False,
    )
    settings = {
        "image_processor_type": "PixtralImageProcessor",
        "patch_size": {"height": 4, "width": 4},
        "size": {"longest_edge": 112},
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    }
    return _saved(folder, config, settings, _mistral_pixels)


def qwen3_vl(folder: Path) -> Sample:
    return _qwen(folder, Qwen3VLConfig, {"deepstack_visual_indexes": [0, 2]}, (4, 2, 2))


def qwen3_5(folder: Path) -> Sample:
    return _qwen(folder, Qwen3_5Config, {}, (2, 1, 1), partial=0.5, **DELTA)


def qwen3_vl_moe(folder: Path) -> Sample:
    deep = {"deepstack_visual_indexes": [1]}
    experts = {name: EXPERTS[name] for name in EXPERTS if not name.startswith("shared")}
    return _qwen(folder, Qwen3VLMoeConfig, deep, (4, 2, 2), **experts)


def qwen3_5_moe(folder: Path) -> Sample:
    return _qwen(folder, Qwen3_5MoeConfig, {}, (2, 1, 1), partial=0.5, **DELTA, **EXPERTS)


def _qwen(
    folder: Path,
    kind: type[Any],
    more: dict[str, Any],
    section: tuple[int, ...],
    partial: float = 1.0,
    **text: Any,
) -> Sample:
    names = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    ids = _tokenizer(folder, names, QWEN)
    vision = {
        "depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 4,
        "out_hidden_size": SIZES["hidden_size"], "num_position_embeddings": 36, **more,
    }  # fmt: skip
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4}
    rope |= {"mrope_section": section, "mrope_interleaved": True, "partial_rotary_factor": partial}
    sizes = {**SIZES, "vocab_size": ids["size"], "rope_parameters": rope, "pad_token_id": 0, **text}
    config = kind(
        text_config=sizes,
        vision_config=vision,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=False,
    )
    settings = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": 4,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "size": {"shortest_edge": 256, "longest_edge": 8192},
        "image_mean": [0.5, 0.4, 0.5],
        "image_std": [0.5, 0.5, 0.3],
    }

    def pixels(processor: Any, shown: list[Any]) -> dict[str, Any]:
        return dict(processor(images=shown, return_tensors="pt"))

    return _saved(folder, config, settings, pixels, "mm_token_type_ids")


def gemma3(folder: Path) -> Sample:
    """As released: few fields, a rotation stretched by 8, windows shorter than an image."""
    ids = _tokenizer(folder, ["<image_soft_token>", "<start_of_image>", "<end_of_image>"], GEMMA3)
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "boi_token_index": ids["<start_of_image>"],
        "eoi_token_index": ids["<end_of_image>"],
        "image_token_index": ids["<image_soft_token>"],
        "mm_tokens_per_image": 25,
        "text_config": {
            **SIZES,
            "model_type": "gemma3_text",
            "query_pre_attn_scalar": 16,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 13,
            "sliding_window_pattern": 2,
            "vocab_size": ids["size"],
        },
        "vision_config": {
            "model_type": "siglip_vision_model", "hidden_size": 32, "image_size": 40,
            "intermediate_size": 48, "num_attention_heads": 2, "num_hidden_layers": 2,
            "patch_size": 4, "vision_use_head": False,
        },
    }  # fmt: skip
    settings = {
        "image_processor_type": "Gemma3ImageProcessor",
        "do_pan_and_scan": None,
        "image_mean": [0.5, 0.5, 0.4],
        "image_std": [0.5, 0.4, 0.5],
        "size": {"height": 40, "width": 40},
    }

    def pixels(processor: Any, shown: list[Any]) -> dict[str, Any]:
        return {"pixel_values": processor(images=shown, return_tensors="pt")["pixel_values"]}

    return _with_old_names(_saved(folder, config, settings, pixels, "token_type_ids"))


def _with_old_names(sample: Sample) -> Sample:
    """Give the tower's tensors the names that released files have."""
    file = sample.folder / "model.safetensors"
    names = {name: name.replace("tower.", "tower.vision_model.") for name in load_file(file)}
    save_file({names[name]: each for name, each in load_file(file).items()}, file)
    return sample


def gemma4(folder: Path) -> Sample:
    """As the larger ones: both ways within images, keys as values."""
    text = {
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "use_bidirectional_attention": "vision",
        "hidden_size_per_layer_input": 0,
    }
    return _gemma4(folder, text, {"standardize": True})


def gemma4_e2b(folder: Path) -> Sample:
    """As the smaller ones: causal, with parts of the embedding, layers that share keys."""
    text = {
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": "size",
        "num_kv_shared_layers": 2,
        "use_bidirectional_attention": None,
    }
    return _gemma4(folder, text, {"use_clipped_linears": True})


def gemma4_unified(folder: Path) -> Sample:
    """As the 12B one: no tower, places of 3 x 3 patches."""
    ids = _tokenizer(folder, ["<|image>", "<|image|>", "<image|>"], GEMMA4)
    text = {
        **_gemma4_text(ids),
        "model_type": "gemma4_unified_text",
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
    }
    vision = {
        "model_type": "gemma4_unified_vision", "patch_size": 4, "pooling_kernel_size": 3,
        "mm_embed_dim": 40, "mm_posemb_size": 80, "output_proj_dims": 40,
    }  # fmt: skip
    config = {
        "architectures": ["Gemma4UnifiedForConditionalGeneration"],
        "model_type": "gemma4_unified",
        "audio_config": None,
        "boi_token_id": ids["<|image>"],
        "eoi_token_id": ids["<image|>"],
        "image_token_id": ids["<|image|>"],
        "text_config": text,
        "vision_config": vision,
    }
    settings = _gemma4_settings("Unified")
    sample = _saved(folder, config, settings, _gemma4_pixels, "mm_token_type_ids")
    return replace(sample, masks_of_generate=True)


def _gemma4(folder: Path, text: dict[str, Any], vision: dict[str, Any]) -> Sample:
    ids = _tokenizer(folder, ["<|image>", "<|image|>", "<image|>"], GEMMA4)
    config = {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "audio_config": None,
        "boi_token_id": ids["<|image>"],
        "eoi_token_id": ids["<image|>"],
        "image_token_id": ids["<|image|>"],
        "vision_soft_tokens_per_image": 70,
        "text_config": {
            **_gemma4_text(ids),
            "model_type": "gemma4_text",
            **{name: ids.get(str(value), value) for name, value in text.items()},
        },
        "vision_config": {
            "model_type": "gemma4_vision", "head_dim": 16, "hidden_size": 32,
            "intermediate_size": 48, "num_attention_heads": 2, "num_hidden_layers": 2,
            "num_key_value_heads": 2, "patch_size": 4, "pooling_kernel_size": 3,
            "position_embedding_size": 640, "default_output_length": 70,
            "rope_parameters": {"rope_theta": 100.0, "rope_type": "default"}, **vision,
        },
    }  # fmt: skip
    return _saved(folder, config, _gemma4_settings(""), _gemma4_pixels, "mm_token_type_ids")


def _gemma4_text(ids: dict[str, int]) -> dict[str, Any]:
    return {
        **SIZES,
        "final_logit_softcapping": 30.0,
        "global_head_dim": 32,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_hidden_layers": 4,
        "rope_parameters": {
            "full_attention": {
                "partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "proportional",
            },
            "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
        },
        "sliding_window": 16,
        "vocab_size": ids["size"],
    }  # fmt: skip


def _gemma4_settings(kind: str) -> dict[str, Any]:
    settings = {
        "image_processor_type": f"Gemma4{kind}ImageProcessor",
        "max_soft_tokens": 70,
        "patch_size": 4,
        "pooling_kernel_size": 3,
    }
    return {"image_processor": settings}


def _gemma4_pixels(processor: Any, shown: list[Any]) -> dict[str, Any]:
    found = processor(images=shown, return_tensors="pt")
    return {name: found[name] for name in ("pixel_values", "image_position_ids")}


def lfm2_vl(folder: Path) -> Sample:
    """Tiles of 6 x 6 places, and a thumbnail."""
    text = {"conv_L_cache": 3, "layer_types": ["conv", "full_attention", "conv"]}
    return _lfm2(folder, {"model_type": "lfm2", "block_auto_adjust_ff_dim": False, **text})


def lfm2_vl_moe(folder: Path) -> Sample:
    text = {
        "model_type": "lfm2_moe", "conv_L_cache": 3, "num_dense_layers": 1, "num_experts": 4,
        "layer_types": ["conv", "full_attention", "conv"], "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "use_expert_bias": True,
    }  # fmt: skip
    return _lfm2(folder, text)


def _lfm2(folder: Path, text: dict[str, Any]) -> Sample:
    tiles = [f"<|img_row_{row}_col_{column}|>" for row in range(1, 5) for column in range(1, 5)]
    names = ["<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>", *tiles]
    ids = _tokenizer(folder, names, LFM2)
    config = {
        "architectures": ["Lfm2VlForConditionalGeneration"],
        "model_type": "lfm2_vl",
        "image_token_id": ids["<image>"],
        "projector_hidden_size": 40,
        "text_config": {**SIZES, **text, "vocab_size": ids["size"], "pad_token_id": 0},
        "vision_config": {
            "model_type": "siglip2_vision_model", "hidden_size": 32, "intermediate_size": 48,
            "num_attention_heads": 2, "num_hidden_layers": 2, "num_patches": 36, "patch_size": 4,
            "vision_use_head": False,
        },
    }  # fmt: skip
    settings = {
        "image_processor_type": "Lfm2VlImageProcessorFast",
        "encoder_patch_size": 4,
        "image_mean": [0.5, 0.4, 0.5],
        "image_std": [0.5, 0.5, 0.3],
        "max_image_tokens": 40,
        "max_tiles": 4,
        "min_image_tokens": 10,
        "resample": 3,
        "tile_size": 48,
    }

    def pixels(processor: Any, shown: list[Any]) -> dict[str, Any]:
        return dict(processor(images=shown, return_tensors="pt"))

    return _with_old_names(_saved(folder, config, settings, pixels))


def _tokenizer(folder: Path, special: list[str], template: str) -> dict[str, int]:
    """Write a tokenizer with these special tokens. Returns their ids, and the size."""
    text_checkpoints.make(folder, "byte_level", config={"chat_template": template})
    file = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(file))
    found = {token: tokenizer.token_to_id(token) for token in special}
    return {**found, "size": tokenizer.get_vocab_size()}


def _mistral_pixels(processor: Any, shown: list[Any]) -> dict[str, Any]:
    side = {"height": 8, "width": 8}
    return dict(processor(images=shown, patch_size=side, return_tensors="pt"))


def _saved(
    folder: Path,
    config: PreTrainedConfig | dict[str, Any],
    settings: dict[str, Any],
    pixels: Any,
    types: str = "",
) -> Sample:
    """config: a dict is written as it is."""
    torch.manual_seed(0)
    released = config
    if isinstance(config, dict):
        given = {name: value for name, value in config.items() if name != "model_type"}
        config = AutoConfig.for_model(config["model_type"], **copy.deepcopy(given))
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 1.5 * parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.3
            parameter.normal_(1.0 if "norm" in name else 0.0, scale)
        for name, buffer in model.named_buffers():  # of Gemma 4's tower
            kind = name.rpartition("_")[2]
            if "vision_tower" in name and kind in BUFFERS:
                buffer.fill_(BUFFERS[kind])
    model.save_pretrained(folder)
    if isinstance(released, dict):
        (folder / "config.json").write_text(json.dumps(released))
    file = "processor_config.json" if "image_processor" in settings else "preprocessor_config.json"
    (folder / file).write_text(json.dumps(settings))
    model.double().set_experts_implementation("eager")
    return Sample(folder, model, _processor(folder), pixels, types)


def _processor(folder: Path) -> Any:
    """Return transformers' processor; for those that need torchvision, with Pillow's resizing."""
    found: Any = ImageProcessingMixin.get_image_processor_dict(folder)[0]
    name = found["image_processor_type"].removesuffix("Fast")
    if name in without_torchvision.MODULES:
        return without_torchvision.Processor(name, found)
    auto: Any = AutoImageProcessor
    return auto.from_pretrained(folder, backend="pil")


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Return a picture with structure at several scales, and noise."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (3, 4, 3), np.uint8)).resize((width, height))
    noise = rng.integers(-20, 20, (height, width, 3))
    return Image.fromarray((np.asarray(coarse) + noise).clip(0, 255).astype(np.uint8))


def data_url(image: Image.Image, kind: str = "PNG", **options: Any) -> str:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"


def png(width: int, height: int, data: bytes = b"") -> bytes:
    """Return a PNG file with these sizes in its header, and this data."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        check = zlib.crc32(kind + content)
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", check)

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


def image_part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


PICTURES = [picture(50, 37), picture(113, 8, 1), picture(8, 41, 2), picture(300, 200, 3)]
"""Of odd sizes. The last one is large for these models."""


def chat(*shown: Any, words: str = "look") -> list[dict[str, Any]]:
    """Return a message with these pictures and words between them."""
    parts: list[dict[str, Any]] = [text_part("What is this? ")]
    for index, image in enumerate(shown):
        parts += [image_part(data_url(image)), text_part(f" {words} {index} ")]
    return [{"role": "user", "content": parts}]
