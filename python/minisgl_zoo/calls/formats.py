"""How model families write reasoning and tool calls, as data.

The facts are from the chat templates of these families' checkpoints; Hunyuan's are from its
publisher's description of its function calls. Each is a row of `chat_formats`. Grammars describe
JSON, so they write calls in Python's syntax as a list of objects, which LFM2 also writes where it
is asked to.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Final, Literal

Syntax = Literal["object", "named", "tags", "pairs", "python"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """How a family writes tool calls.

    syntax: the form of a call between `begin` and `end`.
        object  {"name": NAME, KEY: {...}}, the name under `name_key`; or a list of such objects
        named   a header with the name, `separator`, then the arguments as JSON
        tags    a header with the name, then for each argument `key`, its name, `key_end`,
                `value_begin`, its value, `value_end`
        pairs   NAME{key:value,...}, with `quote` before and behind each text
        python  calls as Python writes them, in a list or each on a line of its own
    name: a regex for a header, whose first group is the name. section: the text before the first
    call and the text behind the last. is_bare: whether a whole answer may be a call without
    `begin`. detected_by: texts that every template with this format has.

    A parser accepts several spellings; a grammar writes one:
    header, footer: for "named" and "tags", the text before the arguments, with NAME in the place of
    the name, and the text behind them. argument: for "tags", the text of an argument, with KEY and
    VALUE. is_list: whether all calls are one list of JSON objects.
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
    footer: str = ""
    argument: str = ""
    is_list: bool = False

    @property
    def texts(self) -> tuple[str, ...]:
        """The texts that the parser looks for."""
        marks = (self.begin, self.end, self.separator, self.key, self.key_end, self.value_begin)
        return (*marks, self.value_end, self.name, self.quote, *self.section, "[CALL_ID]")


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageFormat:
    """How a family writes an answer of several messages, each a header, <|message|> and a text.

    markers: its special tokens. detected_by: those that every template with this format has. ends:
    the texts behind a message. bare: how a header begins that follows a text without an end, with a
    name behind it; "" if models write none. call, reasoning: regexes that the header of a call, and
    of reasoning, has; any other message is content. calls: how a call's message writes calls; with
    None it has the arguments of one as JSON, and the first group of `call` is the name.

    A grammar writes, where the prompt ends in a header: header, footer, argument: of a call, as in
    `CallFormat`. thinking: the texts before and behind reasoning. answer: that before content.
    """

    markers: tuple[str, ...]
    detected_by: tuple[str, ...]
    ends: tuple[str, ...]
    bare: str = ""
    call: str
    reasoning: str
    calls: CallFormat | None = None
    header: str
    footer: str = ""
    argument: str = ""
    thinking: tuple[str, str]
    answer: str


_FUNCTION_TAGS: Final = partial(
    CallFormat,
    syntax="tags",
    name=r"\s*<function=(.*?)>?\s*",
    key="<parameter=",
    key_end=">",
    value_end="</parameter>",
)
_INVOKE_TAGS: Final = partial(CallFormat, syntax="tags", name=r'\s*(.*?)"\s*>\s*', key_end='">')
_DEEPSEEK: Final = partial(
    CallFormat,
    begin="<｜tool▁call▁begin｜>",
    end="<｜tool▁call▁end｜>",
    syntax="named",
    section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
)
SEED: Final = _FUNCTION_TAGS(
    begin="<seed:tool_call>",
    end="</seed:tool_call>",
    detected_by=("<seed:tool_call>",),
    header="<seed:tool_call>\n<function=NAME>\n",
    footer="</function>\n</seed:tool_call>",
    argument="<parameter=KEY>VALUE</parameter>\n",
)
QWEN3_CODER: Final = _FUNCTION_TAGS(
    begin="<tool_call>",
    end="</tool_call>",
    detected_by=("<function=", "<parameter="),
    header="<tool_call>\n<function=NAME>\n",
    footer="</function>\n</tool_call>",
    argument="<parameter=KEY>\nVALUE\n</parameter>\n",
)
GLM: Final = CallFormat(
    begin="<tool_call>",
    end="</tool_call>",
    detected_by=("<arg_key>",),
    syntax="tags",
    key="<arg_key>",
    key_end="</arg_key>",
    value_begin="<arg_value>",
    value_end="</arg_value>",
    header="<tool_call>NAME\n",
    footer="</tool_call>",
    argument="<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n",
)
MINIMAX: Final = _INVOKE_TAGS(
    begin='<invoke name="',
    end="</invoke>",
    detected_by=("<minimax:tool_call>",),
    key='<parameter name="',
    value_end="</parameter>",
    section=("<minimax:tool_call>", "</minimax:tool_call>"),
    header='\n<invoke name="NAME">\n',
    footer="</invoke>",
    argument='<parameter name="KEY">VALUE</parameter>\n',
)
HERMES: Final = CallFormat(
    begin="<tool_call>", end="</tool_call>", detected_by=("<tool_call>", "arguments")
)
DEEPSEEK_V3: Final = _DEEPSEEK(
    detected_by=("<｜tool▁call▁begin｜>", "```json"),
    name=r"\s*(?:function<｜tool▁sep｜>)?(.*?)\s*",
    separator="```json",
    header="<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n",
    footer="\n```<｜tool▁call▁end｜>",
)
DEEPSEEK_V31: Final = _DEEPSEEK(
    detected_by=("<｜tool▁call▁begin｜>",),
    separator="<｜tool▁sep｜>",
    header="<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>",
    footer="<｜tool▁call▁end｜>",
)
MISTRAL: Final = CallFormat(
    begin="[TOOL_CALLS]",
    end="",
    detected_by=("[TOOL_CALLS]", "[ARGS]"),
    syntax="named",
    name=r"\s*(.*?)\s*(?:\[CALL_ID\].*)?",
    separator="[ARGS]",
    header="[TOOL_CALLS]NAME[ARGS]",
)
MISTRAL_V3: Final = CallFormat(
    begin="[TOOL_CALLS]", end="", detected_by=("[TOOL_CALLS]",), is_list=True
)
GEMMA: Final = CallFormat(
    begin="<start_function_call>call:",
    end="<end_function_call>",
    detected_by=("<start_function_call>",),
    syntax="pairs",
    quote="<escape>",
)
GEMMA4: Final = CallFormat(
    begin="<|tool_call>call:",
    end="<tool_call|>",
    detected_by=("<|tool_call>",),
    syntax="pairs",
    quote='<|"|>',
)
COHERE: Final = CallFormat(
    begin="<|START_ACTION|>",
    end="<|END_ACTION|>",
    detected_by=("<|START_ACTION|>", "tool_name"),
    name_key="tool_name",
    key="parameters",
    is_list=True,
)
PHI4: Final = CallFormat(
    begin="<|tool_call|>", end="<|/tool_call|>", detected_by=("<|tool_call|>", "<|/tool_call|>")
)
NEMOTRON: Final = CallFormat(
    begin="<TOOLCALL>", end="</TOOLCALL>", detected_by=("<TOOLCALL>",), is_list=True
)
HUNYUAN: Final = CallFormat(
    begin="<tool_calls>",
    end="</tool_calls>",
    detected_by=("<tool_calls>",),
    section=("<answer>", "</answer>"),
    is_list=True,
)
LFM2: Final = CallFormat(
    begin="<|tool_call_start|>",
    end="<|tool_call_end|>",
    detected_by=("List of tools: ",),
    syntax="python",
    is_list=True,
)
OLMO3: Final = CallFormat(
    begin="<function_calls>",
    end="</function_calls>",
    detected_by=("<function_calls>",),
    syntax="python",
    is_list=True,
)
GRANITE: Final = CallFormat(
    begin="<|tool_call|>", end="", detected_by=("<|tool_call|>",), is_list=True
)
LLAMA3: Final = CallFormat(
    begin="<|python_tag|>",
    end="",
    detected_by=("<|start_header_id|>", "tool"),
    key="parameters",
    is_bare=True,
)


# Several messages, for calls and reasoning. Sources: OpenAI's description of harmony
# (cookbook.openai.com); of Muse Glimmer's, what projects that serve it say of its chat template.
HARMONY: Final = MessageFormat(
    markers=(
        *("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"),
        *("<|end|>", "<|call|>", "<|return|>"),
    ),
    detected_by=("<|channel|>", "<|message|>", "<|call|>"),
    ends=("<|end|>", "<|call|>", "<|return|>", "<|start|>"),
    call=r"to=functions\.([\w.-]+)",
    reasoning=r"<\|channel\|>analysis",
    header="<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>",
    thinking=("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
    answer="<|channel|>final<|message|>",
)
MUSE_GLIMMER: Final = MessageFormat(
    markers=("<|start|>", "<|message|>", "<|eom|>", "<|eot|>"),
    detected_by=("<|message|>", "<|eom|>", "<atem:function_calls>"),
    ends=("<|eom|>", "<|eot|>", "<|start|>"),
    bare=" to=",
    call=r"to=(?!(?:self|user)\b)",
    reasoning=r"to=self\b",
    calls=_INVOKE_TAGS(
        begin='<atem:invoke name="',
        end="</atem:invoke>",
        key='<atem:parameter name="',
        value_end="</atem:parameter>",
        section=("<atem:function_calls>", "</atem:function_calls>"),
    ),
    header=' to=NAME<|message|><atem:function_calls>\n<atem:invoke name="NAME">\n',
    footer="</atem:invoke>\n</atem:function_calls>",
    argument='<atem:parameter name="KEY">VALUE</atem:parameter>\n',
    thinking=(" to=self<|message|>", "<|eom|><|start|>assistant"),
    answer=" to=user<|message|>",
)
