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


_CONFIG: Final = "generation_config.json of "
_CARD: Final = "the model card of "

RECOMMENDED: Final = (
    Recommended(
        family="DeepSeek-R1",
        names=r"deepseek[-_ ]r1",
        sampling={"temperature": 0.6, "top_p": 0.95},
        source=_CONFIG + "deepseek-ai/DeepSeek-R1",
    ),
    Recommended(
        family="SmolLM3",
        names=r"smollm3",
        sampling={"temperature": 0.6, "top_p": 0.95},
        source=_CONFIG + "HuggingFaceTB/SmolLM3-3B",
    ),
    Recommended(
        family="SmolLM2",
        names=r"smollm2",
        sampling={"temperature": 0.2, "top_p": 0.9},
        source=_CARD + "HuggingFaceTB/SmolLM2-135M-Instruct",
    ),
    Recommended(
        family="Qwen3.5",
        names=r"qwen3[._]5",
        sampling={"temperature": 0.6, "top_p": 0.95, "top_k": 20},
        source=_CONFIG + "Qwen/Qwen3.5-27B",
    ),
    Recommended(
        family="Qwen3 without reasoning",
        names=r"qwen3.*instruct",
        sampling={"temperature": 0.7, "top_p": 0.8, "top_k": 20},
        source=_CONFIG + "Qwen/Qwen3-4B-Instruct-2507",
    ),
    Recommended(
        family="Qwen3",
        names=r"qwen3",
        sampling={"temperature": 0.6, "top_p": 0.95, "top_k": 20},
        source=_CONFIG + "Qwen/Qwen3-0.6B",
    ),
    Recommended(
        family="Qwen2.5",
        names=r"qwen2\.5",
        sampling={"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05},
        source=_CONFIG + "Qwen/Qwen2.5-7B-Instruct",
    ),
    Recommended(
        family="Gemma",
        names=r"gemma[-_ ]?[34]",
        sampling={"temperature": 1.0, "top_p": 0.95, "top_k": 64},
        source=_CARD + "google/gemma-4-31B-it, and what the Gemma team says of Gemma 3",
    ),
    Recommended(
        family="Llama 3",
        names=r"llama[-_ ]?3",
        sampling={"temperature": 0.6, "top_p": 0.9},
        source=_CONFIG + "meta-llama/Llama-3.2-3B-Instruct",
    ),
    Recommended(
        family="Mistral Nemo",
        names=r"mistral[-_ ]nemo",
        sampling={"temperature": 0.3},
        source=_CARD + "mistralai/Mistral-Nemo-Instruct-2407",
    ),
    Recommended(
        family="Phi-3",
        names=r"phi[-_ ]3",
        sampling={"temperature": 0.0},
        source=_CARD + "microsoft/Phi-3-mini-4k-instruct",
    ),
    Recommended(
        family="gpt-oss",
        names=r"gpt[-_ ]?oss",
        sampling={"temperature": 1.0, "top_p": 1.0},
        source="the README of github.com/openai/gpt-oss",
    ),
    Recommended(
        family="MiniMax-M2",
        names=r"minimax[-_ ]?m2",
        sampling={"temperature": 1.0, "top_p": 0.95, "top_k": 40},
        source=_CONFIG + "MiniMaxAI/MiniMax-M2",
    ),
    Recommended(
        family="GLM-4.5",
        names=r"glm[-_ ]?4\.5",
        sampling={"temperature": 0.6, "top_p": 0.95},
        source="docs.z.ai, Chat Completion",
    ),
    Recommended(
        family="GLM",
        names=r"glm[-_ ]?(4\.[67]|5)",
        sampling={"temperature": 1.0, "top_p": 0.95},
        source="docs.z.ai, Chat Completion",
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
