"""What a checkpoint recommends for requests that leave it open: sampling, and where to end."""

from __future__ import annotations

from pathlib import Path

from minisgl.core import SamplingParams
from minisgl.errors import ConfigError, InvalidSampling
from minisgl.tokenizer.tokenizer import Tokenizer
from minisgl.utils.hf import read_generation_defaults
from minisgl.utils.logger import get_logger

logger = get_logger(__name__)


def sampling_defaults(folder: Path) -> SamplingParams:
    """generation_config.json's temperature, top-k, top-p and min-p, said in the log, as is what
    else it asks for.

    Raises ConfigError for values that no request could have.
    """
    recommended = read_generation_defaults(folder)
    if recommended.unsupported:
        wishes = ", ".join(f"{name} {value}" for name, value in recommended.unsupported.items())
        logger.warning(
            "generation_config.json asks for %s, which is not done here: tokens may differ from "
            "those of transformers' generate",
            wishes,
        )
    given = {
        name: value
        for name in ("temperature", "top_k", "top_p", "min_p")
        if (value := getattr(recommended, name)) is not None
    }
    try:
        defaults = SamplingParams(**given)
    except InvalidSampling as error:
        raise ConfigError(f"{folder}/generation_config.json: {error}") from error
    said = ", ".join(f"{name} {value:g}" for name, value in given.items()) or "nothing"
    logger.info("sampling defaults from the checkpoint: %s", said)
    return defaults


def end_of_sequence_ids(folder: Path, tokenizer: Tokenizer) -> frozenset[int]:
    """The ids of generation_config.json (or config.json), and the tokenizer's own."""
    ids = set(read_generation_defaults(folder).eos_token_ids)
    if tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    return frozenset(ids)
