"""Converts a tokenizer of another format to that of tokenizer.json, by transformers."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import tokenizers

from minisgl.errors import CheckpointError, ConfigError
from minisgl.utils.logger import get_logger

logger = get_logger(__name__)

_FORMATS = ("*.model", "vocab*", "tekken.json", "*.tiktoken")


def convert(folder: Path, config: dict[str, Any]) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """Return the tokenizer that transformers makes, and `config` with its special tokens.

    Raises CheckpointError if `folder` has no usable tokenizer, ConfigError if a package is missing.
    """
    none = CheckpointError(
        f"{folder} has no tokenizer: neither tokenizer.json nor a file that transformers could "
        "make one of (tokenizer.model, vocab.json with merges.txt, ...); download it again"
    )
    if not any(any(folder.glob(pattern)) for pattern in _FORMATS):
        raise none
    if (folder / "tekken.json").is_file() and not (folder / "tokenizer.model").is_file():
        raise CheckpointError(
            f"{folder} has only Mistral's tekken.json, which is not read: take a copy of the model "
            "that has a tokenizer.json, as most repositories in Hugging Face format do"
        )
    logger.info("%s has no tokenizer.json: transformers converts its tokenizer", folder)
    try:
        auto = importlib.import_module("transformers").AutoTokenizer.from_pretrained(str(folder))
    except ImportError as error:
        raise ConfigError(
            f"{folder} has no tokenizer.json, and converting its tokenizer needs a package that is "
            f"missing ({error}): pip install 'minisgl[sentencepiece]'"
        ) from error
    except Exception as error:  # a broken or missing file can make it raise anything
        raise CheckpointError(
            f"{folder} has no tokenizer.json, and transformers cannot make one of what is there "
            f"({' '.join(str(error).split())}); download it again, and have the packages of "
            "pip install 'minisgl[sentencepiece]'"
        ) from error
    if auto.backend_tokenizer.get_vocab_size(with_added_tokens=False) <= 1:
        raise none  # where files are missing, transformers makes an empty tokenizer
    return auto.backend_tokenizer, config | auto.special_tokens_map
