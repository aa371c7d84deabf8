"""Answers in each family's format: the parts are the same however the text is cut."""

from __future__ import annotations

import json
import random
import time
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from helpers.call_writers import (
    CALLS,
    NOW,
    SEARCH,
    TYPES,
    WEATHER,
    WRITERS,
    harmony,
    hermes,
    llama3,
    muse_glimmer,
)
from minisgl.core.answer import Part, collect
from minisgl.core.options import options_of
from minisgl.message import TextReply
from minisgl.server.args import ServerArgs
from minisgl_zoo.calls import AnswerForm, AnswerParser
from minisgl_zoo.calls.known import MESSAGES, PARSERS, detect_calls, detect_reasoning
from minisgl_zoo.calls.reader import Reader


def parsed(form: AnswerForm, pieces: list[str]) -> list[Part]:
    parser = AnswerParser(form)
    parts = [part for piece in pieces for part in parser.feed(piece)]
    return merged([*parts, *parser.flush()])


def merged(parts: list[Part]) -> list[Part]:
    joined: list[Part] = []
    for kind, text in parts:
        assert text
        if kind != "call" and joined and joined[-1][0] == kind:
            joined[-1] = (kind, joined[-1][1] + text)
        else:
            joined.append((kind, text))
    return joined


def check(form: AnswerForm, text: str) -> Any:
    """The whole answer. Every cut in two, single characters and random cuts give the same parts."""
    whole = parsed(form, [text])
    for at in range(len(text) + 1):
        assert parsed(form, [text[:at], text[at:]]) == whole, at
    assert parsed(form, list(text)) == whole
    rng = random.Random(0)
    for _ in range(20):
        cuts = sorted(rng.choices(range(len(text) + 1), k=6))
        bounds = [0, *cuts, len(text)]
        pieces = [text[a:b] for a, b in pairwise(bounds)]
        assert parsed(form, pieces) == whole
    return collect(whole)


def test_every_format_is_tested() -> None:
    rule = options_of(ServerArgs)["tool_call_parser"][1].rule
    assert set(WRITERS) == set(PARSERS) == set(rule.choices)


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("calls", CALLS, ids=lambda calls: "+".join(name for name, _ in calls))
def test_calls(name: str, calls: list[Any]) -> None:
    answer = check(AnswerForm(calls=name, types=TYPES), WRITERS[name](*calls))
    assert [(call.name, json.loads(call.arguments)) for call in answer.calls] == calls
    assert answer.content == ""


@pytest.mark.parametrize(
    "name", [name for name in WRITERS if name != "llama3" and name not in MESSAGES]
)
def test_content_before_calls(name: str) -> None:
    text = "Let me look at [it] <b>now</b>.\n\n" + WRITERS[name](WEATHER)
    answer = check(AnswerForm(calls=name, types=TYPES), text)
    assert answer.content == "Let me look at [it] <b>now</b>."
    assert [call.name for call in answer.calls] == ["get_weather"]


@pytest.mark.parametrize("name", WRITERS)
def test_content_alone(name: str) -> None:
    for text in ("", "Hello", " a <tool", "x [TOOL\n\n", "<｜tool", '{"a": 1}', "[1]", "1 < 2 \n"):
        assert check(AnswerForm(calls=name, types=TYPES), text).content == text


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        (
            '[f(a=true, b=[null, 1.5], c={"d": -1})]',
            [("f", {"a": True, "b": [None, 1.5], "c": {"d": -1}})],
        ),
        ("[get-it(a='x get-it(1)'), get-it()]", [("get-it", {"a": "x get-it(1)"}), ("get-it", {})]),
        ("[a.b(text='two\nlines')]", [("a.b", {"text": "two\nlines"})]),
        ('[{"name": "f", "arguments": {"a": 1}}]', [("f", {"a": 1})]),
    ],
)  # fmt: skip
def test_calls_in_python(body: str, wanted: list[Any]) -> None:
    form = AnswerForm(calls="lfm2", types={"get-it": {}})
    answer = check(form, f"Well.<|tool_call_start|>{body}<|tool_call_end|>")
    assert [(call.name, json.loads(call.arguments)) for call in answer.calls] == wanted
    assert answer.content == "Well."


@pytest.mark.parametrize(
    "body",
    [
        '[{"name": 1, "arguments": {}}]',
        "f(1)",
        "[f(a=b)]",
        "[f(**{})]",
        "f",
        "[f(a=1), 2]",
        "x = f(a=1)",
        "1e999",
    ],
)
def test_text_that_is_no_call_in_python_is_content(body: str) -> None:
    text = f"<|tool_call_start|>{body}<|tool_call_end|>"
    assert check(AnswerForm(calls="lfm2"), text).content == text


@pytest.mark.parametrize("name", WRITERS)
def test_cut_answers(name: str) -> None:
    """An answer that `max_tokens` cuts: what is known of the call, never an exception."""
    form, text = AnswerForm(calls=name, types=TYPES), WRITERS[name](WEATHER, SEARCH)
    whole = collect(parsed(form, [text]))
    for end in range(len(text)):
        answer = collect(parsed(form, [text[:end]]))
        for call, full in zip(answer.calls, whole.calls, strict=False):
            assert call.name == full.name
            assert full.arguments.startswith(call.arguments.rstrip()[:-1])


@pytest.mark.parametrize(
    ("name", "begin", "end"),
    [("think", "<think>", "</think>"), ("mistral", "[THINK]", "[/THINK]"),
     ("seed", "<seed:think>", "</seed:think>"), ("gemma4", "<|channel>thought", "<channel|>")],
)  # fmt: skip
def test_reasoning(name: str, begin: str, end: str) -> None:
    form = AnswerForm(reasoning=name)
    answer = check(form, f"{begin}\nI think, é 🙂.\n\n{end}\n\nThe <answer>.\n")
    assert (answer.reasoning, answer.content) == ("I think, é 🙂.", "The <answer>.\n")
    answer = check(AnswerForm(reasoning=name, is_open=True), f"I think.{end}Yes")
    assert (answer.reasoning, answer.content) == ("I think.", "Yes")
    assert check(form, f"{begin}I think").reasoning == "I think"
    assert check(form, " plain").content == " plain"
    assert check(form, f"{begin}{end}x").content == "x"


def test_reasoning_before_calls() -> None:
    form = AnswerForm(calls="hermes", reasoning="think", types=TYPES)
    text = f"<think>\nUse <tool_call> now\n</think>\n\nWell.\n{hermes(WEATHER, NOW)}\n"
    answer = check(form, text)
    assert answer.reasoning == "Use <tool_call> now"
    assert answer.content == "Well."
    assert [call.name for call in answer.calls] == ["get_weather", "now"]


def test_harmony_channels() -> None:
    text = (
        "<|channel|>analysis<|message|>Think é.<|end|><|start|>assistant"
        "<|channel|>commentary<|message|>I will call.<|end|><|start|>assistant"
        f"{harmony(WEATHER)}"
    )
    answer = check(AnswerForm(calls="harmony", reasoning="harmony", types=TYPES), text)
    assert (answer.reasoning, answer.content) == ("Think é.", "I will call.")
    assert json.loads(answer.calls[0].arguments) == WEATHER[1]
    for end in ("<|end|>", ""):  # a message that the model does not end
        begin = f"<|channel|>analysis<|message|>Hm{end}<|start|>assistant"
        answer = check(AnswerForm(reasoning="harmony"), f"{begin}<|channel|>final<|message|>42")
        assert (answer.reasoning, answer.content) == ("Hm", "42")


def test_messages_of_muse_glimmer() -> None:
    form = AnswerForm(calls="muse_glimmer", reasoning="muse_glimmer", types=TYPES)
    thinking = ' to=self<|message|>Think <atem:invoke name="now">.<|eom|><|start|>assistant'
    prose = " to=user<|message|>I will call.<|eom|><|start|>assistant"
    answer = check(form, f"{thinking}{prose}{muse_glimmer(WEATHER, NOW)}<|eot|>")
    assert answer.reasoning == 'Think <atem:invoke name="now">.'
    assert answer.content == "I will call."
    assert [call.name for call in answer.calls] == ["get_weather", "now"]
    assert json.loads(answer.calls[0].arguments) == WEATHER[1]
    both = muse_glimmer(WEATHER).removesuffix("</atem:function_calls>")
    answer = check(form, f'{both}<atem:invoke name="now"></atem:invoke></atem:function_calls>')
    assert [call.name for call in answer.calls] == ["get_weather", "now"]
    # The model may leave a message without its end; a text may have what looks like its header.
    call = muse_glimmer(WEATHER)
    answer = check(form, f" to=self<|message|>Go\n to=b now.{call}<|eot|>")
    assert answer.reasoning == "Go\n to=b now."
    assert [call.name for call in answer.calls] == ["get_weather"]
    # A call that a message cuts off does not take the next one.
    cut = ' to=now<|message|><atem:function_calls><atem:invoke name="now">\n<atem:parameter name="a'
    answer = check(form, f"{cut}<|eom|><|start|>assistant{muse_glimmer(WEATHER)}")
    assert [call.name for call in answer.calls] == ["now", "get_weather"]
    assert json.loads(answer.calls[1].arguments) == WEATHER[1]
    for text in (" to=user<|message|>42<|eot|>", "<|message|>42", "42", f"{thinking}42"):
        assert check(AnswerForm(reasoning="muse_glimmer"), text).content == (
            "42" if text != f"{thinking}42" else ""
        )


def test_is_reasoning_follows_the_text() -> None:
    parser = AnswerParser(AnswerForm(reasoning="think"))
    states = []
    for piece in ("<think>", "a", "b", "</th", "ink>", "c"):
        parser.feed(piece)
        states.append(parser.is_reasoning)
    assert states == [True, True, True, True, False, False]


def test_objects_in_other_orders() -> None:
    form = AnswerForm(calls="hermes", types=TYPES)
    for body in (
        '{"arguments": {"city": "a"}, "name": "get_weather"}',
        '{"id": "x1", "name": "get_weather", "arguments": {"city": "a"}, "more": [1, {}]}',
        '{"name": "get_weather", "arguments": "{\\"city\\": \\"a\\"}"}',
        '{ "name" : "get_weather" , "parameters" : {"city": "a"} }',
    ):
        (call,) = check(form, f"<tool_call>{body}</tool_call>").calls
        assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "a"})
    (call,) = check(form, '<tool_call>{"name": "now"}</tool_call>').calls
    assert (call.name, call.arguments) == ("now", "{}")


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>no</tool_call> left",
        "<tool_call>{1}</tool_call>",
        "<tool_call>{}",
        "<tool_call>",
    ],
)
def test_text_that_is_no_call_is_content(text: str) -> None:
    answer = check(AnswerForm(calls="hermes"), text)
    assert (answer.content, answer.calls) == (text, [])


def test_a_bare_object_calls_only_known_tools() -> None:
    text = '{"name": "Ada", "parameters": {"age": 36}}'
    assert check(AnswerForm(calls="llama3", types=TYPES), text).content == text
    answer = check(AnswerForm(calls="llama3", types=TYPES), "<|python_tag|>" + llama3(WEATHER))
    assert answer.calls[0].name == "get_weather"


@pytest.mark.parametrize("before", ["", "<think>\nWell.\n</think>\n"])
def test_answers_of_hunyuan_are_in_a_section(before: str) -> None:
    """As its publisher shows them (docs of Hunyuan-A13B's function calls)."""
    form = AnswerForm(calls="hunyuan", reasoning="think", types=TYPES)
    answer = check(form, before + WRITERS["hunyuan"](WEATHER, NOW))
    assert (answer.content, len(answer.calls)) == ("", 2)
    answer = check(form, f"{before}<answer>\n助手：It is sunny.\n</answer>")
    assert (answer.content, answer.calls) == ("助手：It is sunny.", [])
    assert answer.reasoning.strip() == ("Well." if before else "")


def test_detection() -> None:
    assert detect_calls("plain") == detect_reasoning("plain") == ""
    assert detect_calls('<tool_calls>[{"name": "func_name1"') == "hunyuan"
    assert detect_reasoning("{{ '</think>' }}") == "think"


@pytest.mark.parametrize("cut", [0, 6, 7, 8, 11])
def test_a_string_that_ends_in_a_backslash_ends(cut: int) -> None:
    text = r'["C:\\", 1]'
    reader = Reader()
    reading = reader.json_value()
    reader.buffer = text[:cut]
    pieces = [text[cut:] + ", 2]"] if cut < len(text) else []
    taken = None
    while taken is None:
        try:
            next(reading)
            reader.buffer += pieces.pop(0)
        except StopIteration as ended:
            taken = ended.value
    assert taken == text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", r'<tool_call>{"name": "f\ud800", "arguments": {"a": "\ud800"}}</tool_call>'),
        ("hermes", r'<tool_call>{"name": "f", "arguments": "\udfff"}</tool_call>'),
        ("lfm2", r'<|tool_call_start|>[{"name": "\ud800", "arguments": 1}]<|tool_call_end|>'),
        ("lfm2", r"<|tool_call_start|>[f(a='\ud800')]<|tool_call_end|>"),
        ("qwen3_coder", '<tool_call><function=f><parameter=a>"\\ud800"</parameter></tool_call>'),
        ("gemma4", r'<|tool_call>call:f{a:"\ud800"}<tool_call|>'),
    ],
)
def test_half_of_a_surrogate_pair_can_be_sent(name: str, text: str) -> None:
    """Else the detokenizer could not send the answer, and would end, and with it the server."""
    answer = check(AnswerForm(calls=name), text)
    assert len(answer.calls) == 1
    reply = TextReply(uid=0, text="", token_ids=[], parts=parsed(AnswerForm(calls=name), [text]))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(reply), type=TextReply) == reply


def test_a_text_argument_keeps_its_own_line_breaks() -> None:
    """The template writes a line break before and behind each value; these alone are dropped."""
    text = "\n\nif x:\n    y()\n\n"
    form = AnswerForm(calls="qwen3_coder", types={"now": {"a": "string"}})
    answer = check(form, WRITERS["qwen3_coder"](("now", {"a": text})))
    assert json.loads(answer.calls[0].arguments) == {"a": text}


@pytest.mark.parametrize("value", ["NaN", "-Infinity", "1e999", "[" * 5000, "{'a': 1e999}"])
def test_a_value_that_is_not_json_is_a_string(value: str) -> None:
    """Arguments are JSON whatever the model writes, and no depth is an error."""
    answers = {
        "qwen3_coder": f"<tool_call>\n<function=now>\n<parameter=a>\n{value}\n</parameter>\n"
        "</function>\n</tool_call>",
        "gemma4": f"<|tool_call>call:now{{a:{value}}}<tool_call|>",
        "hermes": f'<tool_call>{{"name": {value}}}</tool_call>',
    }
    for name, text in answers.items():
        parser = AnswerParser(AnswerForm(calls=name, types={"now": {"a": "number"}}))
        found = collect([*parser.feed(text), *parser.flush()])
        if name == "qwen3_coder":
            assert json.loads(found.calls[0].arguments) == {"a": value}
        elif name == "hermes":
            assert found.calls == []


def test_whitespace_without_end_takes_linear_time() -> None:
    """A call may follow, so it is held back. Each piece used to look at all of it again."""
    parser = AnswerParser(AnswerForm(calls="hermes"))
    start = time.process_time()
    assert not any(parser.feed(" ") for _ in range(50_000))
    assert time.process_time() - start < 10  # 0.2 s here; it was a minute
    assert parser.feed("a") == [("content", " " * 50_000 + "a")]


def cut(form: AnswerForm, pieces: list[str], following: str = "") -> list[Part]:
    parser = AnswerParser(form)
    parts = [part for piece in pieces for part in parser.feed(piece)]
    return merged([*parts, *parser.flush(is_cut=True, following=following)])


@pytest.mark.parametrize("name", WRITERS)
def test_a_cut_call_leaves_no_syntax_in_the_content(name: str) -> None:
    """Wherever `max_tokens`, a stop string or an abort cuts it, also a stream's."""
    form = AnswerForm(
        calls=name, types=TYPES, reasoning=name if name in MESSAGES else "think", is_open=False
    )
    text = WRITERS[name](WEATHER, SEARCH)
    for end in range(len(text)):
        parts = cut(form, [text[:end]])
        if end % 3 == 0:  # both calls together are cut at every place of their syntax
            assert cut(form, list(text[:end])) == parts
        answer = collect(parts)
        assert (answer.content, answer.reasoning) == ("", ""), text[:end]
        names = [call.name for call in answer.calls]
        assert names == ["get_weather", "search"][: len(names)]
    if name in MESSAGES:
        return
    said = "Let me look." + text if name != "llama3" else "Let me look.<|python_tag|>" + text
    for end in range(len("Let me look."), len(said)):
        assert collect(cut(form, [said[:end]])).content == "Let me look.", said[:end]


def test_a_cut_call_whose_arguments_are_missing_has_none() -> None:
    """Empty arguments would look like a whole call."""
    form = AnswerForm(calls="hermes", types=TYPES)
    (call,) = collect(cut(form, ['<tool_call>{"name": "now"'])).calls
    assert (call.name, call.arguments) == ("now", "")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("llama3", '{"name": "Ada Lovel'),
        ("llama3", '{"city": "Rome", "name": "x'),
        ("hermes", "<tool_call>no, that"),
        ("hermes", "a <b"),
        ("harmony", "It is 4"),
        ("muse_glimmer", "to be or"),
    ],
)
def test_a_cut_text_that_is_no_call_stays(name: str, text: str) -> None:
    assert collect(cut(AnswerForm(calls=name, types=TYPES), [text])).content == text


def test_a_stop_string_behind_half_a_mark() -> None:
    form = AnswerForm(calls="hermes")
    assert collect(cut(form, ["if a <"], following="b")).content == "if a <"
    assert collect(cut(form, ["if a <"], following="tool_")).content == "if a"
    assert collect(cut(form, ["if a <"])).content == "if a"
