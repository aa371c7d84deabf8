"""Sampling parameters are checked once, where they are made; other processes decode them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from minisgl import LLM, SamplingParams
from minisgl.core import sampling
from minisgl.errors import InvalidSampling, MinisglError
from minisgl.message import UserMsg, ids_to_bytes

DRAW = SamplingParams(temperature=1.0, max_tokens=4, ignore_eos=True, seed=1)
WRONG: list[dict[str, Any]] = [
    *({"temperature": value} for value in (math.nan, -1.0, math.inf)),
    *({"top_k": value} for value in (-7, 2**40)),
    *({"top_p": value} for value in (0.0, -1.0, math.nan)),
    *({"min_p": value} for value in (5.0, math.nan)),
    *({"max_tokens": value} for value in (-5, 2**40)),
    *({"min_tokens": value} for value in (-3, 2**40)),
    *({"logit_bias": {token: 1.0}} for token in (-(10**9), 10**9)),
    *({"bad_words_ids": (ids,)} for ids in ((), (-3, 10**15))),
    *({"repetition_penalty": value} for value in (0.0, math.nan)),
    *({"top_logprobs": value, "logprobs": True} for value in (-4, 1000)),
    *({"prompt_logprobs": value} for value in (-3, 10**6)),
    {"stop_token_ids": (-5, 2**40)},
    {"allowed_token_ids": (10**12,)},
    {"frequency_penalty": 1e300},
    {"truncate_prompt_tokens": -9},
    {"stop": ("",)},
]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(progress=False, num_pages=128) as llm:
        yield llm


def crossed(params: SamplingParams) -> UserMsg:
    message = UserMsg(uid=0, ids=ids_to_bytes([5, 6]), sampling=params)
    return msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=UserMsg)


def test_what_crosses_is_not_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "_checked", lambda _: pytest.fail("checked again"))
    message = crossed(DRAW)
    assert message.sampling == DRAW
    assert message.sampling.with_seed(1).seed == 2


@pytest.mark.needs("minisgl_zoo")
@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_no_request_past_the_door_ends_the_loop(wrong: dict[str, Any], llm: LLM) -> None:
    """A record beyond the bounds of its fields is dropped, as any that cannot be decoded."""
    try:
        message = crossed(msgspec.structs.replace(DRAW, **wrong))
    except msgspec.ValidationError:
        return
    call = llm._session.call([message], lambda *_: None, 1)
    llm._session.complete(call)
    assert call.error is None or isinstance(call.error, MinisglError)
    assert len(llm.generate("a", DRAW)[0].token_ids) == 4


def test_what_replace_has_made_is_checked_by_the_call(llm: LLM) -> None:
    """`msgspec.structs.replace` makes a record without a check."""
    wrong = msgspec.structs.replace(DRAW, temperature=-1.0)
    with pytest.raises(InvalidSampling, match="temperature must be"):
        llm.generate("a", wrong)
