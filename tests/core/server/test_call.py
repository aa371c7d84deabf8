"""A call whose reader is slower than the frontend that fills it."""

from __future__ import annotations

import asyncio

import pytest

from minisgl.core import Accepted, Failed, SamplingParams
from minisgl.errors import EngineError
from minisgl.message import RequestReply, TextReply
from minisgl.server.call import Call

TEXT = TextReply(uid=1, text="six ", token_ids=[3])
FAILED = Failed(uid=1, message="out of luck", code="engine_error", status=500)


def accepted(uid: int) -> Accepted:
    return Accepted(uid=uid, num_prompt_tokens=2, sampling=SamplingParams())


@pytest.mark.parametrize("limits", [(5, 9), (9, 5)])
def test_the_lowest_limit_of_several_prompts_is_told(limits: tuple[int, ...]) -> None:
    call = Call([1, 2], lambda uids, why: None)
    for uid, most in enumerate(limits, 1):
        sampling = SamplingParams(max_tokens=most)
        call.deliver(Accepted(uid=uid, num_prompt_tokens=2, sampling=sampling))
    assert call.max_tokens == 5


def read(uids: list[int], *replies: RequestReply) -> list[str]:
    """Return the texts that a reader gets if all replies come before it reads, then the error."""

    async def late() -> list[str]:
        call = Call(uids, lambda uids, why: None)
        for reply in replies:
            call.deliver(reply)
        texts: list[str] = []
        try:
            await call.accepted()
            texts.append("accepted")
            async for answer in call:
                texts += [reply.text for _, reply in answer if isinstance(reply, TextReply)]
        except EngineError as error:
            texts.append(str(error))
        return texts

    return asyncio.run(late())


@pytest.mark.parametrize(
    ("uids", "replies", "seen"),
    [
        ([1], [accepted(1), TEXT, FAILED], ["accepted", "six ", "out of luck"]),
        ([1], [accepted(1), FAILED], ["out of luck"]),
        ([1, 2], [accepted(1), TEXT, FAILED], ["out of luck"]),  # 2 may yet be refused
    ],
)
def test_a_late_reader_gets_the_text_before_the_failure(
    uids: list[int], replies: list[RequestReply], seen: list[str]
) -> None:
    assert read(uids, *replies) == seen
