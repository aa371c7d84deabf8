"""Reads harmony, the format of gpt-oss.

An answer is one or several messages, each with a channel and perhaps a recipient. Source: OpenAI's
description of the format (cookbook.openai.com, "harmony").
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from minisgl.tokenizer.parse.reader import Reader, Reading
from minisgl.tokenizer.parse.syntax import read_arguments

_RECIPIENT: Final = re.compile(r"to=functions\.([\w.-]+)")
_ENDS: Final = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")


def read_harmony(reader: Reader, set_reasoning: Callable[[bool], None]) -> Reading[None]:
    """Read messages: one to a function is a call, one of the channel `analysis` is reasoning, and
    any other is content. A text without a message is content.

    set_reasoning: called when reasoning begins and ends.
    """
    is_first = True
    while True:
        reader.taken = ""
        header, mark = yield from reader.until("<|message|>")
        if not mark:
            if is_first:
                reader.emit("content", header)
            return
        is_first = False
        call = _RECIPIENT.search(header)
        if call:
            reader.emit("call", call[1])
            yield from reader.skip_space()
            yield from read_arguments(reader)
            yield from reader.until(*_ENDS)
        elif "<|channel|>analysis" in header:
            set_reasoning(True)
            yield from reader.until(*_ENDS, kind="reasoning")
            set_reasoning(False)
        else:
            yield from reader.until(*_ENDS, kind="content")
