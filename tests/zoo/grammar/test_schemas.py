"""Texts of a random model under a grammar are valid by another library."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema
import numpy as np
import pytest

from helpers.json_schemas import schemas
from minisgl.builtin import model_path
from minisgl.core import SamplingParams
from minisgl.errors import InvalidSampling
from minisgl.tokenizer import Tokenizer, load_tokenizer
from minisgl_zoo.grammar.compile import compiled
from minisgl_zoo.grammar.maskers import Grammars

EOS, VOCAB, MOST = 2, 1408, 1024
SCHEMAS = schemas()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(model_path())


@pytest.fixture(scope="module")
def maskers(tokenizer: Tokenizer) -> Grammars:
    return Grammars(lambda: tokenizer, VOCAB, {EOS})


def walk(maskers: Grammars, option: dict[str, Any], seed: int) -> list[int]:
    """Output ids of a model that draws any allowed token, the end of sequence included."""
    params = SamplingParams(structured_outputs=option)
    assert params.structured_outputs
    masker = maskers.masker(compiled(params.structured_outputs))
    rng, output = random.Random(seed), list[int]()
    while len(output) < MOST and EOS not in output:
        mask = masker.mask(output).view(np.uint8)
        allowed = np.unpackbits(mask, bitorder="little")[:VOCAB].nonzero()[0]
        output.append(rng.choice(allowed.tolist()))
    return output


def test_an_answer_has_declared_properties_alone(maskers: Grammars, tokenizer: Tokenizer) -> None:
    """Pydantic's `model_json_schema` leaves objects open, and clients send it as it is."""
    inner = {"type": "object", "properties": {"y": {"enum": [1, 2]}}, "required": ["y"]}
    schema = {"properties": {"x": {"$ref": "#/$defs/inner"}}, "required": ["x"], "type": "object"}
    for seed in range(5):
        output = walk(maskers, {"json": {**schema, "$defs": {"inner": inner}}}, seed)
        answer = json.loads(tokenizer.decode(output[:-1]))
        assert (answer.keys(), answer["x"].keys()) == ({"x"}, {"y"})


def test_there_are_enough() -> None:
    assert len(SCHEMAS) >= 150


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_answer_is_valid(name: str, maskers: Grammars, tokenizer: Tokenizer) -> None:
    schema = SCHEMAS[name]
    check = jsonschema.Draft202012Validator(
        schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )
    for seed in range(3):
        output = walk(maskers, {"json": schema}, seed)
        assert output[-1] == EOS, tokenizer.decode(output)
        check.validate(json.loads(tokenizer.decode(output)))


@pytest.mark.parametrize(
    ("option", "pattern"),
    [
        ({"regex": r"\d{3}-[a-z]{2}"}, r"\d{3}-[a-z]{2}"),
        ({"regex": "(a/b|\\n|é+)!"}, "(a/b|\\n|é+)!"),
        (
            {"choice": ["yes", 'no "way"', "\\ back", "new\nline", "\x7f"]},
            'yes|no "way"|\\\\ back|new\nline|\x7f',
        ),
        ({"grammar": 'start: "x" N\nN: /[0-9]{1,4}/'}, "x[0-9]{1,4}"),
        ({"grammar": 'root ::= "x" [0-9] [0-9]?'}, "x[0-9]{1,2}"),
    ],
)
def test_other_forms(
    option: dict[str, Any], pattern: str, maskers: Grammars, tokenizer: Tokenizer
) -> None:
    for seed in range(8):
        output = walk(maskers, option, seed)
        assert re.fullmatch(pattern, tokenizer.decode(output[:-1])), tokenizer.decode(output)


def test_json_object(maskers: Grammars) -> None:
    option: dict[str, Any] = {"json_object": True}
    params = SamplingParams(structured_outputs=option)
    masker = maskers.masker(compiled(params.structured_outputs or {}))
    first = np.unpackbits(masker.mask([]).view(np.uint8), bitorder="little").nonzero()[0]
    tokenizer = load_tokenizer(model_path())
    assert {tokenizer.decode([token]).strip()[:1] for token in first.tolist()} == {"{"}


def test_a_vocabulary_of_another_size(tokenizer: Tokenizer) -> None:
    """The model's is larger (padding) or smaller than the tokenizer's."""
    for size in (VOCAB + 100, VOCAB - 100):
        mask = Grammars(lambda: tokenizer, size, {EOS}).masker('start: "yes"').mask([])
        allowed = np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0]
        assert len(mask) == -(-size // 32)
        assert all(tokenizer.decode([token]) in ("y", "ye", "yes") for token in allowed.tolist())


def test_too_much_work_is_refused(maskers: Grammars, tokenizer: Tokenizer) -> None:
    masker = maskers.masker(compiled({"regex": "(a?){5000}a{5000}"}))
    masker.mask([])
    with pytest.raises(InvalidSampling, match="cannot be followed behind output token 1: lexer"):
        masker.mask(tokenizer.encode("a", add_special_tokens=False))
