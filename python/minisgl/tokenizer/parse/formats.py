"""How model families write reasoning and tool calls, as data.

A checkpoint's format is found in its chat template: the template writes earlier calls and reasoning
as the model does. The facts are from the templates of these families' checkpoints.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal

Syntax = Literal["object", "named", "tags", "pairs", "python"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """How a family writes tool calls.

    syntax: of a call between `begin` and `end`.
        object  {"name": NAME, KEY: {...}}, the name under `name_key`; a list of such may follow one
                `begin`
        named   a header with the name, `separator`, then the arguments as JSON
        tags    a header with the name, then for each argument `key`, its name, `key_end`,
                `value_begin`, its value, `value_end`
        pairs   NAME{key:value,...}, texts between two of `quote`
        python  calls as Python writes them, in a list or each on a line of its own
    name: a regex for a header, whose first group is the name. section: the text before the first
    call and the text behind the last. is_bare: whether a whole answer may be a call without
    `begin`. detected_by: texts that every template with this format has. header, is_list: only for
    formats that a checkpoint describes (`minisgl.tokenizer.parse.response_template`): the text
    between `begin` and the arguments, with NAME in the place of the name; whether all calls are in
    one list.
    """

    begin: str
    end: str
    detected_by: tuple[str, ...] = ()
    syntax: Syntax = "object"
    name: str = r"\s*(.*?)\s*"
    name_key: str = "name"
    key: str = "arguments"
    separator: str = ""
    key_end: str = ""
    value_begin: str = ""
    value_end: str = ""
    quote: str = ""
    section: tuple[str, str] = ("", "")
    is_bare: bool = False
    header: str = ""
    is_list: bool = False

    @property
    def texts(self) -> tuple[str, ...]:
        """The texts that the parser looks for."""
        shown = (self.begin, self.end, self.separator, self.key, self.key_end)
        return (
            *shown,
            self.value_begin,
            self.value_end,
            self.name,
            self.quote,
            *self.section,
            "[CALL_ID]",
        )


CALLS: Final[dict[str, CallFormat]] = {
    "seed": CallFormat(
        begin="<seed:tool_call>",
        end="</seed:tool_call>",
        detected_by=("<seed:tool_call>",),
        syntax="tags",
        name=r"\s*<function=(.*?)>?\s*",
        key="<parameter=",
        key_end=">",
        value_end="</parameter>",
    ),
    "qwen3_coder": CallFormat(
        begin="<tool_call>",
        end="</tool_call>",
        detected_by=("<function=", "<parameter="),
        syntax="tags",
        name=r"\s*<function=(.*?)>?\s*",
        key="<parameter=",
        key_end=">",
        value_end="</parameter>",
    ),
    "glm": CallFormat(
        begin="<tool_call>",
        end="</tool_call>",
        detected_by=("<arg_key>",),
        syntax="tags",
        key="<arg_key>",
        key_end="</arg_key>",
        value_begin="<arg_value>",
        value_end="</arg_value>",
    ),
    "minimax": CallFormat(
        begin='<invoke name="',
        end="</invoke>",
        detected_by=("<minimax:tool_call>",),
        syntax="tags",
        name=r'\s*(.*?)"\s*>\s*',
        key='<parameter name="',
        key_end='">',
        value_end="</parameter>",
        section=("<minimax:tool_call>", "</minimax:tool_call>"),
    ),
    "hermes": CallFormat(
        begin="<tool_call>", end="</tool_call>", detected_by=("<tool_call>", "arguments")
    ),
    "deepseek_v3": CallFormat(
        begin="<｜tool▁call▁begin｜>",
        end="<｜tool▁call▁end｜>",
        detected_by=("<｜tool▁call▁begin｜>", "```json"),
        syntax="named",
        name=r"\s*(?:function<｜tool▁sep｜>)?(.*?)\s*",
        separator="```json",
        section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ),
    "deepseek_v31": CallFormat(
        begin="<｜tool▁call▁begin｜>",
        end="<｜tool▁call▁end｜>",
        detected_by=("<｜tool▁call▁begin｜>",),
        syntax="named",
        separator="<｜tool▁sep｜>",
        section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ),
    "mistral": CallFormat(
        begin="[TOOL_CALLS]",
        end="",
        detected_by=("[TOOL_CALLS]", "[ARGS]"),
        syntax="named",
        name=r"\s*(.*?)\s*(?:\[CALL_ID\].*)?",
        separator="[ARGS]",
    ),
    "mistral_v3": CallFormat(begin="[TOOL_CALLS]", end="", detected_by=("[TOOL_CALLS]",)),
    "gemma": CallFormat(
        begin="<start_function_call>call:",
        end="<end_function_call>",
        detected_by=("<start_function_call>",),
        syntax="pairs",
        quote="<escape>",
    ),
    "gemma4": CallFormat(
        begin="<|tool_call>call:",
        end="<tool_call|>",
        detected_by=("<|tool_call>",),
        syntax="pairs",
        quote='<|"|>',
    ),
    "cohere": CallFormat(
        begin="<|START_ACTION|>",
        end="<|END_ACTION|>",
        detected_by=("<|START_ACTION|>", "tool_name"),
        name_key="tool_name",
        key="parameters",
    ),
    "phi4": CallFormat(
        begin="<|tool_call|>", end="<|/tool_call|>", detected_by=("<|tool_call|>", "<|/tool_call|>")
    ),
    "nemotron": CallFormat(begin="<TOOLCALL>", end="</TOOLCALL>", detected_by=("<TOOLCALL>",)),
    "lfm2": CallFormat(
        begin="<|tool_call_start|>",
        end="<|tool_call_end|>",
        detected_by=("List of tools: ",),
        syntax="python",
    ),
    "olmo3": CallFormat(
        begin="<function_calls>",
        end="</function_calls>",
        detected_by=("<function_calls>",),
        syntax="python",
    ),
    "granite": CallFormat(begin="<|tool_call|>", end="", detected_by=("<|tool_call|>",)),
    "llama3": CallFormat(
        begin="<|python_tag|>",
        end="",
        detected_by=("<|start_header_id|>", "tool"),
        key="parameters",
        is_bare=True,
    ),
}
"""Name -> format. `--tool-call-parser` has these names and "harmony", which is no `CallFormat`
(`minisgl.tokenizer.parse.harmony`). If a template has the texts of several formats, the first one
counts."""

REASONING: Final[dict[str, tuple[str, str]]] = {
    "think": ("<think>", "</think>"),
    "seed": ("<seed:think>", "</seed:think>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "gemma4": ("<|channel>thought", "<channel|>"),
    "cohere": ("<|START_THINKING|>", "<|END_THINKING|>"),
}
"""The texts before and behind reasoning, by name."""

HARMONY: Final = "harmony"
HARMONY_MARKERS: Final = (
    "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>",
)  # fmt: skip
_TOKEN: Final = re.compile(r"<[^<>]*>|\[/?[A-Z_]+\]")
PARSERS: Final = (*CALLS, HARMONY)


Calls = str | CallFormat
"""A name in `CALLS` or "harmony", or a format that a checkpoint describes; "" for none."""
Marks = str | tuple[str, str]
"""A name in `REASONING` or "harmony", or the texts that a checkpoint describes; "" for none."""


def call_format(calls: Calls) -> CallFormat:
    return CALLS[calls] if isinstance(calls, str) else calls


def reasoning_marks(reasoning: Marks) -> tuple[str, str]:
    """Return the texts before and behind reasoning, which is not harmony's."""
    return REASONING[reasoning] if isinstance(reasoning, str) else reasoning


def detect_calls(template: str) -> str:
    """Return the name of the call format of a chat template, "" if it has none that is known."""
    if all(marker in template for marker in ("<|channel|>", "<|message|>", "<|call|>")):
        return HARMONY
    found = (name for name, form in CALLS.items() if all(t in template for t in form.detected_by))
    return next(found, "")


def detect_reasoning(template: str) -> str:
    """Return the name of the reasoning format of a chat template, "" if it has none."""
    return next((name for name, (_, end) in REASONING.items() if end in template), "")


def detect_switch(template: str) -> str:
    """Return the variable of a chat template that switches reasoning on and off, "" for none."""
    if "enable_thinking" in template:
        return "enable_thinking"
    code = _TEXT.sub("", " ".join(_CODE.findall(template)))
    return "thinking" if re.search(r"(?<![\w.])thinking(?!\w)", code) else ""


_CODE: Final = re.compile(r"\{%.*?%\}", re.DOTALL)
_TEXT: Final = re.compile(r"'[^']*'|\"[^\"]*\"")


def special_texts(calls: Calls, reasoning: Marks) -> tuple[str, ...]:
    """Return the texts of these formats that may be special tokens."""
    if HARMONY in (calls, reasoning):
        return HARMONY_MARKERS
    texts = [
        *(call_format(calls).texts if calls else ()),
        *(reasoning_marks(reasoning) if reasoning else ()),
    ]
    return tuple(token for text in texts for token in _TOKEN.findall(text))
