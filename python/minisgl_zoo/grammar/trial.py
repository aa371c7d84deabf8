"""Compiles a grammar in a helper process, which can be stopped.

llguidance bounds the work of a mask, but not all of the work of compiling: the intersection of a
few patterns of a schema took more than 40 s, and the server ended because its tokenizer hung. So a
helper (`minisgl.utils.helper`) compiles each grammar first, in at most `LIMIT_S` of CPU time. A
grammar that it compiles is no problem for a rank: the helper's vocabulary is the 256 bytes, and
with a checkpoint's vocabulary compiling and the first mask took the same time within 20 %.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Final

import llguidance

from minisgl.utils.helper import Helper, HelperEnded, packed, serve

LIMITS: Final = llguidance.LLParserLimits(verbose_errors=False, max_items_in_row=20_000)
"""Bounds of the work of a mask. 2,000 items would refuse a list of 10,000 choices, whose mask takes
20 ms."""
LIMIT_S: Final = 0.3
"""CPU time of compiling and the first mask. 161 schemas took at most 0.6 ms, 10,000 choices 110 ms.
Each rank compiles again, and its running streams may wait as long."""
TOO_LONG: Final = (
    f"it takes more than {LIMIT_S} s to compile; use a simpler schema, regex or grammar"
)
MASK_S: Final = 0.01
"""CPU time of the second mask. In each step the rows without a grammar wait for the masks of the
others. A mask takes 0.15 ms for each KB of text without an alternative, or else less than 1 ms."""
SLOW: Final = (
    f"each of its masks takes more than {MASK_S * 1e3:.0f} ms, because it has a very long text "
    "without an alternative; shorten that text"
)
_TOKEN: Final = re.compile(r"<\[\d+\]>")
_ANY_TOKEN: Final = "<[256]>"  # a special one of the helper's vocabulary


def problem(grammar: str) -> str:
    """Return why a grammar cannot be compiled, "" if it can, `TOO_LONG` after `LIMIT_S`."""
    return first_problem([grammar])[1]


def first_problem(grammars: list[str]) -> tuple[int, str]:
    """Return the index of the first grammar that cannot be compiled, and why; "" if all can.

    `TOO_LONG` if all together take more than `LIMIT_S`; the index is then 0.
    """
    helpers = _helpers(os.getpid())
    free = next((helper for helper in helpers if not helper.is_busy), helpers[0])
    try:
        index, why = free.ask(packed(grammars), LIMIT_S)
    except HelperEnded:
        return 0, TOO_LONG
    return index, why


@lru_cache(1)
def _helpers(pid: int) -> tuple[Helper, Helper]:
    """Return the helpers of the process `pid`. A fork does not share its parent's. The second one
    starts when the first is busy: another key's grammar need not wait for it."""
    return Helper("minisgl_zoo.grammar.trial"), Helper("minisgl_zoo.grammar.trial")


def _compiled() -> Callable[[list[str]], tuple[int, str]]:
    """Return the helper's function: `first_problem`."""
    vocabulary = llguidance.LLTokenizer("byte")

    def answer(grammars: list[str]) -> tuple[int, str]:
        for index, grammar in enumerate(grammars):
            text = _TOKEN.sub(_ANY_TOKEN, grammar)
            matcher = llguidance.LLMatcher(vocabulary, text, limits=LIMITS, log_level=0)
            if why := _problem(matcher):
                return index, why
        return 0, ""

    return answer


def _problem(matcher: llguidance.LLMatcher) -> str:
    if not matcher.is_error():
        matcher.compute_bitmask()
    if not matcher.is_error():
        began = time.process_time()
        matcher.compute_bitmask()
        if time.process_time() - began > MASK_S:
            return SLOW
    return str(matcher.get_error())


if __name__ == "__main__":
    serve(_compiled())
