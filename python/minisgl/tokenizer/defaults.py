"""The sampling parameters that a checkpoint recommends, and its end-of-sequence ids."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from minisgl import plugins
from minisgl.core import SamplingParams
from minisgl.errors import CheckpointError, ConfigError, InvalidSampling
from minisgl.tokenizer.tokenizer import Tokenizer
from minisgl.utils.hf import read_json
from minisgl.utils.logger import get_logger

logger = get_logger(__name__)

_NEUTRAL: Final[dict[str, object]] = {
    "no_repeat_ngram_size encoder_no_repeat_ngram_size penalty_alpha epsilon_cutoff eta_cutoff": 0,
    "min_length min_new_tokens": 0,
    "mirostat xtc_probability": 0,
    "encoder_repetition_penalty guidance_scale num_beams typical_p": 1,
    "force_words_ids constraints stop_strings bad_words_ids suppress_tokens": [],
    "begin_suppress_tokens": [],
    "sequence_bias": {},
    "token_healing": False,
    "exponential_decay_length_penalty watermarking_config dola_layers top_h": None,
    "forced_bos_token_id forced_eos_token_id": None,
}
"""Fields that are not applied here but change the tokens of transformers' `generate`, unless they
are null or have the neutral value beside them."""

FOLLOWED: Final[dict[str, Callable[[float], float]]] = {
    "temperature": float,
    "top_k": int,
    "top_p": float,
    "min_p": float,
    "repetition_penalty": float,
}
"""The fields that become sampling parameters, and their types."""

FOR_OTHERS: Final = {"temperature": 0.7, "top_p": 0.95, "min_p": 0.05}
"""For models without any recommendation: llama.cpp's default cuts (top-p 0.95, min-p 0.05), at a
temperature of 0.7 instead of its 0.8. At temperature 1 with all tokens allowed, a small quantised
model writes word salad."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """The recommendations of a checkpoint.

    sampling: sampling parameters by name. unsupported: the fields that have no effect here, with
    their values.
    """

    eos_token_ids: tuple[int, ...] = ()
    sampling: dict[str, Any] = field(default_factory=dict)
    unsupported: dict[str, Any] = field(default_factory=dict)


def read_generation_defaults(folder: Path) -> GenerationDefaults:
    """Read generation_config.json. If it has no end-of-sequence ids, take those of config.json.

    If `do_sample` is false, the temperature is 0, and only the repetition penalty is read. Raises
    CheckpointError, which names file and field, for a value of a wrong type. Bounds are checked
    when the values become `SamplingParams`.
    """
    file = folder / "generation_config.json"
    fields = read_json(file) if file.is_file() else {}
    eos = _token_ids(fields, file)
    if not eos and (folder / "config.json").is_file():
        eos = _token_ids(read_json(folder / "config.json"), folder / "config.json")
    is_greedy = fields.get("do_sample") is False
    sampling: dict[str, Any] = {"temperature": 0.0} if is_greedy else {}
    for name in ("repetition_penalty",) if is_greedy else FOLLOWED:
        if (value := fields.get(name)) is not None:
            sampling[name] = _number(value, name, file)
    return GenerationDefaults(
        eos_token_ids=eos,
        sampling=sampling,
        unsupported={
            name: value
            for names, neutral in _NEUTRAL.items()
            for name in names.split()
            if (value := fields.get(name)) is not None and value != neutral
        },
    )


def _number(value: Any, name: str, file: Path) -> float:
    kind = FOLLOWED[name]
    if type(value) not in (int, float) or not abs(value) < 2**31 or kind(value) != value:
        raise CheckpointError(f"{file}: {name} must be a number, got {value!r}")
    return kind(value)


def _token_ids(fields: dict[str, Any], file: Path) -> tuple[int, ...]:
    value = fields.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(type(token) is not int or token < 0 for token in ids):
        raise CheckpointError(
            f"{file}: eos_token_id must be a token id or a list of them, got {value!r}"
        )
    return tuple(dict.fromkeys(ids))


def sampling_defaults(folder: Path) -> SamplingParams:
    """Return the sampling parameters of requests that leave them out, and log them.

    They are those of generation_config.json, where a file without any is at temperature 1 with all
    tokens allowed, as in transformers. Without the file they are what the publisher recommends (the
    row `recommended` of the table `tokenizers`), or `FOR_OTHERS`. Logs a warning about fields that
    have no effect here. Raises ConfigError for values that no request could have.
    """
    found = read_generation_defaults(folder)
    if found.unsupported:
        values = ", ".join(f"{name} {value}" for name, value in found.unsupported.items())
        logger.warning(
            "generation_config.json asks for %s, which is not done here: tokens may differ from "
            "those of transformers' generate",
            values,
        )
    if (folder / "generation_config.json").is_file():
        origin, sampling = "the checkpoint", found.sampling
    else:
        find = plugins.find("tokenizers", "recommended")
        row = find(read_json(folder / "config.json")) if find else None
        origin, sampling = "Mini-SGLang, for models that recommend none", FOR_OTHERS
        if row:
            origin, sampling = f"{row.source}, for {row.family}", row.sampling
    try:
        defaults = SamplingParams(**sampling)
    except InvalidSampling as error:
        raise ConfigError(f"{folder}/generation_config.json: {error}") from error
    values = ", ".join(f"{name} {value:g}" for name, value in sampling.items())
    logger.info("sampling defaults from %s: %s", origin, values or "none")
    return defaults


def end_of_sequence_ids(folder: Path, tokenizer: Tokenizer) -> frozenset[int]:
    """Return the ids of generation_config.json (or config.json), and the tokenizer's own."""
    ids = set(read_generation_defaults(folder).eos_token_ids)
    if tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    return frozenset(ids)
