"""The sampling parameters that publishers recommend, for files that say nothing themselves.

A GGUF file has no generation_config.json, and old converters copy nothing of it. At temperature 1
with all tokens allowed, a small quantised model writes word salad.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommended:
    """What one publisher recommends.

    family: its name, for the log. names: a pattern of the names of its models, in small letters.
    sampling: parameters by name; those that are not here are neutral. source: where the publisher
    says it.
    """

    family: str
    names: str
    sampling: Mapping[str, float]
    source: str


def _said(family: str, names: str, source: str, **sampling: float) -> Recommended:
    return Recommended(family=family, names=names, sampling=sampling, source=source)


def _file(family: str, names: str, repo: str, **sampling: float) -> Recommended:
    return _said(family, names, f"generation_config.json of {repo}", **sampling)


def _card(family: str, names: str, repo: str, **sampling: float) -> Recommended:
    return _said(family, names, f"the model card of {repo}", **sampling)


RECOMMENDED: Final = (
    _file(
        "DeepSeek-R1", r"deepseek[-_ ]r1", "deepseek-ai/DeepSeek-R1", temperature=0.6, top_p=0.95
    ),
    _file("SmolLM3", r"smollm3", "HuggingFaceTB/SmolLM3-3B", temperature=0.6, top_p=0.95),
    _card("SmolLM2", r"smollm2", "HuggingFaceTB/SmolLM2-135M-Instruct", temperature=0.2, top_p=0.9),
    _file("Qwen3.5", r"qwen3[._]5", "Qwen/Qwen3.5-27B", temperature=0.6, top_p=0.95, top_k=20),
    _file(
        "Qwen3 without reasoning",
        r"qwen3.*instruct",
        "Qwen/Qwen3-4B-Instruct-2507",
        temperature=0.7,
        top_p=0.8,
        top_k=20,
    ),
    _file("Qwen3", r"qwen3", "Qwen/Qwen3-0.6B", temperature=0.6, top_p=0.95, top_k=20),
    _file(
        "Qwen2.5",
        r"qwen2\.5",
        "Qwen/Qwen2.5-7B-Instruct",
        temperature=0.7,
        top_p=0.8,
        top_k=20,
        repetition_penalty=1.05,
    ),
    _card(
        "Gemma",
        r"gemma[-_ ]?[34]",
        "google/gemma-4-31B-it, and what the Gemma team says of Gemma 3",
        temperature=1.0,
        top_p=0.95,
        top_k=64,
    ),
    _file(
        "Llama 3", r"llama[-_ ]?3", "meta-llama/Llama-3.2-3B-Instruct", temperature=0.6, top_p=0.9
    ),
    _card(
        "Mistral Nemo", r"mistral[-_ ]nemo", "mistralai/Mistral-Nemo-Instruct-2407", temperature=0.3
    ),
    _card("Phi-3", r"phi[-_ ]3", "microsoft/Phi-3-mini-4k-instruct", temperature=0.0),
    _said(
        "gpt-oss",
        r"gpt[-_ ]?oss",
        "the README of github.com/openai/gpt-oss",
        temperature=1.0,
        top_p=1.0,
    ),
    _file(
        "MiniMax-M2",
        r"minimax[-_ ]?m2",
        "MiniMaxAI/MiniMax-M2",
        temperature=1.0,
        top_p=0.95,
        top_k=40,
    ),
    _said("GLM-4.5", r"glm[-_ ]?4\.5", "docs.z.ai, Chat Completion", temperature=0.6, top_p=0.95),
    _said(
        "GLM", r"glm[-_ ]?(4\.[67]|5)", "docs.z.ai, Chat Completion", temperature=1.0, top_p=0.95
    ),
)
"""The first row that fits counts."""


def recommended(config: Mapping[str, Any]) -> Recommended | None:
    """Return what the publisher of a model recommends, if we know it. config: config.json.

    The model's name is in `_name_or_path`, where transformers and our reader of GGUF files write
    it; else its class is looked at.
    """
    text = config.get("text_config") or {}
    classes = config.get("architectures") or text.get("architectures") or ()
    name = f"{config.get('_name_or_path') or ''} {' '.join(map(str, classes))}".lower()
    return next((row for row in RECOMMENDED if re.search(row.names, name)), None)
