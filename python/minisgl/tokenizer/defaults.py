"""generation_config.json: the sampling parameters and end-of-sequence ids of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from minisgl.core import SamplingParams
from minisgl.errors import CheckpointError, ConfigError, InvalidSampling
from minisgl.tokenizer.tokenizer import Tokenizer
from minisgl.utils.hf import read_json
from minisgl.utils.logger import get_logger

logger = get_logger(__name__)

_NEUTRAL: Final[dict[str, object]] = {
    "no_repeat_ngram_size encoder_no_repeat_ngram_size penalty_alpha epsilon_cutoff eta_cutoff": 0,
    "min_length min_new_tokens": 0,
    "encoder_repetition_penalty guidance_scale num_beams typical_p": 1,
    "force_words_ids constraints stop_strings bad_words_ids suppress_tokens": [],
    "begin_suppress_tokens": [],
    "sequence_bias": {},
    "token_healing": False,
    "exponential_decay_length_penalty watermarking_config dola_layers top_h": None,
    "forced_bos_token_id forced_eos_token_id": None,
}
"""Fields that change the tokens of transformers' `generate` and have no effect here, and the value,
beside null, with which they change nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """What a checkpoint recommends; None where it says nothing. ``temperature=0`` is greedy.

    unsupported: the fields that have no effect here, with their values.
    """

    unsupported: dict[str, Any] = field(default_factory=dict)
    eos_token_ids: tuple[int, ...] = ()
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


def read_generation_defaults(folder: Path) -> GenerationDefaults:
    """Read generation_config.json; if it has no end-of-sequence ids, take those of config.json.

    Raises CheckpointError, which names file and field, for a value of the wrong type. Bounds are
    checked when the values become `SamplingParams`.
    """
    file = folder / "generation_config.json"
    fields = read_json(file) if file.is_file() else {}
    eos = _token_ids(fields, file)
    if not eos and (folder / "config.json").is_file():
        eos = _token_ids(read_json(folder / "config.json"), folder / "config.json")
    is_sampled = fields.get("do_sample") is not False

    def number(name: str, kind: Callable[[float], Any], *, is_kept: bool = False) -> Any:
        """is_kept: greedy choices heed it, too."""
        value = fields.get(name) if is_sampled or is_kept else None
        if value is None:
            return None
        if type(value) not in (int, float) or not abs(value) < 2**31 or kind(value) != value:
            raise CheckpointError(f"{file}: {name} must be a number, got {value!r}")
        return kind(value)

    return GenerationDefaults(
        unsupported={
            name: value
            for names, neutral in _NEUTRAL.items()
            for name in names.split()
            if (value := fields.get(name)) is not None and value != neutral
        },
        eos_token_ids=eos,
        temperature=number("temperature", float) if is_sampled else 0.0,
        top_k=number("top_k", int),
        top_p=number("top_p", float),
        min_p=number("min_p", float),
        repetition_penalty=number("repetition_penalty", float, is_kept=True),
    )


def _token_ids(fields: dict[str, Any], file: Path) -> tuple[int, ...]:
    value = fields.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(type(token) is not int or token < 0 for token in ids):
        raise CheckpointError(
            f"{file}: eos_token_id must be a token id or a list of them, got {value!r}"
        )
    return tuple(dict.fromkeys(ids))


def sampling_defaults(folder: Path) -> SamplingParams:
    """Return the recommended temperature, top-k, top-p, min-p and repetition penalty, and log them.

    Logs a warning about recommendations that have no effect here. Raises ConfigError for values
    that no request could have.
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
        for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        if (value := getattr(recommended, name)) is not None
    }
    try:
        defaults = SamplingParams(**given)
    except InvalidSampling as error:
        raise ConfigError(f"{folder}/generation_config.json: {error}") from error
    said = ", ".join(f"{name} {value:g}" for name, value in given.items()) or "none"
    logger.info("sampling defaults from the checkpoint: %s", said)
    return defaults


def end_of_sequence_ids(folder: Path, tokenizer: Tokenizer) -> frozenset[int]:
    """The ids of generation_config.json (or config.json), and the tokenizer's own."""
    ids = set(read_generation_defaults(folder).eos_token_ids)
    if tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    return frozenset(ids)
