"""The original mini-sglang's names of our options: what was written for it runs here unchanged.

A name is in a table if it means the same. Source: the README and the help of that project.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

FLAGS: Final[Mapping[str, str]] = {
    "--model-path": "model",
    "--max-seq-len-override": "max_seq_len",
    "--graph": "cuda_graph_max_bs",
    "--tokenizer-count": "num_tokenizer",
    "--max-extend-length": "max_prefill_length",
    "--cache-type": "cache",
    "--shell-mode": "shell",
}
"""Flag -> the option that it sets."""

KEYWORDS: Final[Mapping[str, str]] = {
    "model_path": "model",
    "max_seq_len_override": "max_seq_len",
    "max_extend_tokens": "max_prefill_length",
    "max_extend_length": "max_prefill_length",
    "max_running_req": "max_running_requests",
    "num_page_override": "num_pages",
    "cache_type": "cache",
    "attention_backend": "attn",
}
"""Keyword of `LLM` -> ours."""


def own_keywords(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords of `LLM` by our names. Raises TypeError for an unknown one."""
    if unknown := given.keys() - KEYWORDS.keys():
        raise TypeError(f"LLM has no argument {', '.join(sorted(unknown))}")
    return {KEYWORDS[name]: value for name, value in given.items()}
