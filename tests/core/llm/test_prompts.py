"""Intake of prompts: every form gives the same bytes, and wrong ids are refused in each form."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch

from minisgl.errors import InvalidRequest
from minisgl.llm.prompts import as_batch, chat_records, ids_of_prompt
from minisgl.message import ChatPrompt

IDS = [5, 0, 1, 2**31 - 1, 77]
DATA = np.array(IDS, "<i4").tobytes()


@pytest.mark.parametrize(
    "prompt",
    [
        IDS,
        tuple(IDS),
        [np.int64(item) for item in IDS],
        np.array(IDS),
        np.array(IDS, np.uint64),
        np.array(IDS, object),
        np.array([IDS, IDS]).T[:, 0],
        torch.tensor(IDS),
        torch.tensor(IDS, dtype=torch.int32),
    ],
    ids=lambda prompt: type(prompt).__name__,
)
def test_every_form_gives_the_same_bytes(prompt: Any) -> None:
    assert ids_of_prompt(prompt) == DATA
    (one,) = as_batch(prompt)
    assert ids_of_prompt(one) == DATA
    if isinstance(prompt, list | tuple):
        assert [ids_of_prompt(item) for item in as_batch([prompt, prompt])] == [DATA, DATA]


def test_a_matrix_is_a_batch() -> None:
    for matrix in (np.array([[1, 2], [3, 4]]), torch.tensor([[1, 2], [3, 4]])):
        batch = [np.frombuffer(ids_of_prompt(row), "<i4").tolist() for row in as_batch(matrix)]
        assert batch == [[1, 2], [3, 4]]


@pytest.mark.parametrize(
    ("prompt", "named"),
    [
        ([3, True], "True in one"),
        ([3, False], "False in one"),
        ([3, np.True_], "True_? in one"),
        ([3, -1], "-1 in one"),
        ([3, 2**31], "2147483648 in one"),
        ([3, 2**80], "in one"),
        ([3, 1.0], "1.0 in one"),
        ([3, "4"], "'4' in one"),
        ([3, None], "None in one"),
        (np.array([3, -1]), "-1 in one"),
        (np.array([3, 2**31]), "2147483648 in one"),
        (np.array([3, 2**63], np.uint64), "9223372036854775808 in one"),
        (np.array([3.0]), r"\[3.0\]"),
        (np.array([True]), r"\[True\]"),
        (np.array([3, True], object), "True in one"),
        (torch.tensor([3, -1]), "-1 in one"),
        (torch.tensor([3.0], dtype=torch.bfloat16), r"\[3.0\]"),
        (torch.tensor([True]), r"\[True\]"),
        (np.array(3), "3"),
        (b"ab", "b'ab'"),
        (None, "None"),
    ],
)
def test_wrong_ids_are_refused_by_value(prompt: Any, named: str) -> None:
    with pytest.raises(InvalidRequest, match=f"a text or a list of token ids, got .*{named}"):
        ids_of_prompt(prompt)


@pytest.mark.parametrize(
    "calls",
    [
        "f()",
        5,
        [1],
        [{}],
        [{"function": None}],
        [{"function": "f"}],
        [{"function": {"arguments": "{}"}}],
        [{"function": {"name": 1}}],
        [{"function": {"name": "f"}}, None],
    ],
)
def test_calls_of_a_wrong_form_are_refused(calls: Any) -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": calls}]
    records, _ = chat_records([turns], {}, None, "auto")
    with pytest.raises(InvalidRequest, match=r"messages\[1\].tool_calls must be a list") as refused:
        list(records)
    assert refused.value.param == "messages"


@pytest.mark.parametrize("turn", [{}, {"role": None}, {"role": 3}, {"role": "usr"}, {"role": []}])
def test_a_role_that_the_server_refuses_is_refused(turn: dict[str, Any]) -> None:
    records, _ = chat_records([{"role": "tool", "content": "a"}, turn], {}, None, "auto")
    says = r"^messages\[1\].role must be one of system, developer, user, assistant, tool, got "
    with pytest.raises(InvalidRequest, match=says):
        list(records)


@pytest.mark.parametrize("calls", [None, [], ({"function": {"name": "f", "arguments": {}}},)])
def test_calls_in_openai_form(calls: Any) -> None:
    turn = {"role": "assistant", "content": "a", "tool_calls": calls}
    records, _ = chat_records([turn], {}, None, "auto")
    assert [record.messages for record in records if isinstance(record, ChatPrompt)] == [[turn]]


def test_variables_of_the_template_are_a_dict() -> None:
    turn = {"role": "user", "content": "a"}
    wrong: Any
    for wrong in (["enable_thinking"], {"messages": []}):
        with pytest.raises(InvalidRequest, match="chat_template_kwargs must be a dict without"):
            chat_records([turn], wrong, None, "auto")


@pytest.mark.parametrize(
    ("path", "why"), [("none.png", "No such file or directory"), ("a\0b.png", "null")]
)
def test_a_picture_that_is_no_file_is_refused(path: str, why: str) -> None:
    content = [{"type": "image", "image": path}]
    with pytest.raises(InvalidRequest, match=f"^the image .*{why}"):
        list(chat_records([{"role": "user", "content": content}], {}, None, "auto")[0])


def test_ids_are_checked_as_one_array() -> None:
    """A loop over the ids, which takes some 40 times as long, calls functions for each."""
    calls: list[str] = []
    sys.setprofile(lambda frame, event, _: calls.append(event))
    try:
        ids_of_prompt(list(range(1000, 401_000)))
    finally:
        sys.setprofile(None)
    assert len(calls) < 1000
