"""The built-in model: a 5-million-parameter Qwen3 checkpoint, used when no --model is given.

Knows nothing of the engine, which loads the folder like any Hugging Face checkpoint. The
repository's training/ folder makes it again; training/README.md says what it gets right.
"""

from __future__ import annotations

from pathlib import Path


def model_path() -> Path:
    """The checkpoint folder: config, weights in bfloat16, tokenizer and chat template."""
    return Path(__file__).parent
