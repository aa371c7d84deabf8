"""The grammar of a whole answer: reasoning, then structured content or tool calls.

The parts are in llguidance's Lark. llguidance keeps added tokens of the tokenizer apart from text.
So a marker that is an added token is written by its id, and text between two such markers cannot
contain one. A reference to another grammar, such as a JSON schema, is @NAME.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from minisgl_zoo.grammar.compile import joined, text_literal

TEXT: Final = r"/(.|\n)*/"
_MARK: Final = re.compile(r"(<[^<>]*>|\[/?[A-Z_]+\])")


@dataclass(slots=True, kw_only=True)
class AnswerGrammar:
    """Builds the text of a grammar. Mutable: rules and grammars are added.

    token_id: returns the id of an added token that llguidance keeps apart from text; None for other
    texts. grammars: those that the rules refer to.
    """

    token_id: Callable[[str], int | None]
    rules: list[str] = field(default_factory=list)
    grammars: list[dict[str, Any]] = field(default_factory=list)

    def literal(self, text: str) -> str:
        """Return `text` as Lark, with added tokens by their ids."""
        pieces = []
        for piece in filter(None, _MARK.split(text)):
            token = self.token_id(piece)
            pieces.append(text_literal(piece) if token is None else f"<[{token}]>")
        return " ".join(pieces)

    def sub(self, grammar: Mapping[str, Any]) -> str:
        """Add another grammar. Returns a reference to it."""
        name = f"g{len(self.grammars)}"
        self.grammars.append({"name": name, **grammar})
        return f"@{name}"

    def rule(self, name: str, body: str) -> str:
        """Add a rule. Returns its name, without the options in brackets."""
        self.rules.append(f"{name}: {body}")
        return name.partition("[")[0]

    def reasoning(self, begin: str, end: str, *, is_open: bool, budget: int | None) -> str:
        """Return Lark for reasoning of at most `budget` tokens, between `begin` and `end`.

        is_open: whether the prompt ends within reasoning. If not, the answer may have none.
        """
        closed = f"{self._thinking(end, budget)} /[ \\n]{{0,4}}/"
        return closed if is_open else f"({self.literal(begin)} {closed})?"

    def message(self, begin: str, end: str, *, budget: int | None) -> str:
        """Return Lark for an optional message of reasoning, of at most `budget` tokens."""
        return f"({self.literal(begin)} {self._thinking(end, budget)})?"

    def _thinking(self, end: str, budget: int | None) -> str:
        """Return Lark for at most `budget` tokens, and `end`. If `end` is text and there is a
        budget, these tokens have no character like `end`'s first."""
        limits = "" if budget is None else f"[max_tokens={max(budget, 1)}]"
        body, closing = TEXT, self.literal(end)
        if all(self.token_id(piece) is None for piece in _MARK.split(end)):
            # `end` is text, and a lexeme takes all text that it can.
            if budget is None:
                self.rule("BEFORE", f"{TEXT} & ~/(.|\\n)*{escaped(end)}(.|\\n)*/")
                body, closing = self.rule("THINKING", f"BEFORE {closing}"), ""
            else:  # which may cut the lexeme anywhere, so `end` is not a part of it
                body = f"/[^{escaped(end[0])}]*/"
        thinking = self.rule(f"thinking{limits}", body)
        return closing if budget == 0 else f"{thinking} {closing}"

    def finish(self, start: str) -> str:
        """Return the grammar's text. start: the Lark of the whole answer."""
        lark = "\n".join([f"start: {start}", *self.rules])
        return joined({"lark_grammar": lark}, *self.grammars)


def escaped(text: str) -> str:
    """Return `text` as a part of a regex between slashes."""
    return re.escape(text).replace("\\\n", r"\n").replace("/", r"\/")
