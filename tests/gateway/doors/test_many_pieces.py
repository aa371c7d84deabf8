"""Requests in other vendors' forms with many pieces. While they are joined, nobody is served."""

from __future__ import annotations

import time

from minisgl.server.api.messages import Message, ToolCall, ToolFunction
from minisgl_gateway.pictures import content_of, lines, picture
from minisgl_gateway.turns import joined


def test_many_calls_in_a_row_are_one_message_soon() -> None:
    function = ToolFunction(name="f", arguments="{}")
    calls = [ToolCall(id=f"c{index}", function=function) for index in range(40_000)]
    began = time.process_time()
    (turn,) = joined(
        [Message(role="assistant", tool_calls=[call]) for call in calls], ("assistant",)
    )
    assert time.process_time() - began < 2  # 0.1 s; a list that is copied for each takes 5 s
    assert (turn.content, turn.tool_calls) == (None, calls)


def test_many_texts_are_one_text_soon() -> None:
    began = time.process_time()
    text = content_of(["word"] * 200_000, "\n")
    parts = content_of([*["word"] * 200_000, picture("data:"), "word"])
    assert time.process_time() - began < 2  # 0.1 s; a text that is copied for each takes 10 s
    assert text == "\n".join(["word"] * 200_000)
    assert [getattr(part, "text", None) for part in parts] == ["word" * 200_000, None, "word"]


def test_contents_in_lines() -> None:
    pieces = content_of([picture("data:"), "a"])
    assert lines(["a", None, "", "b"]) == "a\nb"
    assert lines(["a", pieces]) == content_of(["a\n", picture("data:"), "a"])
