"""Small models of text and images, saved as released ones are, and pictures for them."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer
from transformers import (
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

from helpers import text_checkpoints
from helpers.hybrid_cases import DELTA, EXPERTS
from minisgl.tokenizer import load_tokenizer
from minisgl.tokenizer.tokenize import PromptEncoder

SIZES = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
}
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


@dataclass(frozen=True)
class Sample:
    """A saved model, its reference, and how it processes pictures."""

    folder: Path
    model: PreTrainedModel
    processor: Any
    pixels: Callable[[Any, list[Any]], dict[str, Any]]
    """From the processor and pictures to the arguments of the model."""

    @cached_property
    def encoder(self) -> PromptEncoder:
        """Its process that reads pictures takes seconds to start, so tests share it."""
        return PromptEncoder(tokenizer=load_tokenizer(self.folder), folder=self.folder)


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

    return _saved(folder, config, settings, pixels)


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


def _saved(folder: Path, config: PreTrainedConfig, settings: dict[str, Any], pixels: Any) -> Sample:
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 1.5 * parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.3
            parameter.normal_(1.0 if "norm" in name else 0.0, scale)
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    auto: Any = AutoImageProcessor
    return Sample(folder, model, auto.from_pretrained(folder, backend="pil"), pixels)


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
