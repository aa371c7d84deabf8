"""A checkpoint's response_template, read as transformers reads it, however the text is cut."""

from __future__ import annotations

import json
import logging
import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from helpers.json_schemas import INTEGER, closed
from minisgl.builtin import model_path
from minisgl.core import SamplingParams
from minisgl.core.answer import collect
from minisgl.message import ChatPrompt
from minisgl.tokenizer import PromptEncoder, Tokenizer, load_tokenizer
from minisgl_zoo.calls import AnswerForm, AnswerParser
from minisgl_zoo.calls.formats import CallFormat
from minisgl_zoo.calls.response_template import UnknownResponseTemplate, response_formats
from minisgl_zoo.grammar.maskers import Grammars

PARSER = "transformers.utils.chat_parsing.response_parser"
responses = pytest.importorskip(PARSER, reason="transformers has it from 5.23 on")

THINK = {"open": "<think>", "close": "</think>", "content": "text"}
FUNCTION = {"type": "function", "function": "{content}"}
NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
CONTENT = {"close": "<|end|>", "content": "text"}


def template(calls: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {
        "defaults": {"role": "assistant"},
        "start_anchor": "<|assistant|>",
        "fields": {"tool_calls": {"repeats": True, **calls}, "content": CONTENT, **fields},
    }


TEMPLATES: dict[str, dict[str, Any]] = {
    "hermes": template(
        {
            "open_pattern": r"\s*<tool_call>",
            "close": "</tool_call>",
            "content": "json",
            "transform": FUNCTION,
        },
        reasoning_content=THINK,
    ),
    "tags": template(
        {
            "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
            "close_pattern": r"</function>\s*</tool_call>",
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"
            },
            "transform": NAMED,
        },
        reasoning_content=THINK,
    ),
    "pairs": template(
        {
            "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
            "close": "<tool_call|>",
            "content": "json",
            "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
            "transform": NAMED,
        },
        thinking={"open": "<|channel>thought\n", "close": "<channel|>", "content": "text"},
    ),
    "own object": template(
        {
            "open": "<<call",
            "close": "call>>",
            "content": "json",
            "transform": {"function": {"name": "{content.tool}", "arguments": "{content.with}"}},
        },
        reasoning={"open": "[hm]", "close": ["[/hm]"], "content": "text"},
    ),
    "own list": template(
        {
            "open": "@calls",
            "close": "@end",
            "repeats": False,
            "content": "json",
            "transform_each": True,
            "transform": {"type": "function", "function": {"name": "{fn}", "arguments": "{args}"}},
        }
    ),
    "own name": template(
        {
            "open_pattern": r"\s*<call>\s*to=(?P<name>[\w.]+)<with>",
            "close": "</call>",
            "content": "json",
            "transform": NAMED,
        }
    ),
    "own tags": template(
        {
            "open_pattern": r"\s*<do>(?P<name>\w+)",
            "close": "</do>",
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<k>(?P<key>\w+)</k>\s*<v>(?P<value>.*?)</v>"},
            "transform": NAMED,
        }
    ),
}
WEATHER = '{"city": "Zürich \\"}", "n": [1, {"a": "]"}]}'
ANSWERS = {
    "hermes": "<think>\nhm\n</think>\n\nSo.\n"
    f'<tool_call>\n{{"name": "f", "arguments": {WEATHER}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "tags": "<think>hm</think>So.\n<tool_call>\n<function=f>\n<parameter=city>\nZürich\n"
    "</parameter>\n<parameter=m>\nB e r n\n</parameter>\n</function>\n</tool_call>\n"
    "<tool_call>\n<function=now>\n</function>\n</tool_call>",
    "pairs": '<|channel>thought\nhm<channel|>So.<|tool_call>call:f{city:<|"|>Zü, a: b<|"|>,n:[1,'
    "{a:true}]}<tool_call|><|tool_call>call:now{}<tool_call|>",
    "own object": f'[hm]hm[/hm]So. <<call {{"tool": "f", "with": {WEATHER}}} call>>',
    "own list": f'So.@calls [{{"fn": "f", "args": {WEATHER}}}, {{"fn": "now", "args": {{}}}}] @end',
    "own name": f"So. <call> to=f<with>{WEATHER}</call><call>to=now<with>{{}}</call>",
    "own tags": "So. <do>f<k>city</k> <v>Zürich</v><k>m</k><v>B e</v></do>",
}


def parts(form: AnswerForm, pieces: list[str]) -> Any:
    parser = AnswerParser(form)
    found = [part for piece in pieces for part in parser.feed(piece)] + parser.flush()
    answer = collect(found)
    calls = [(call.name, json.loads(call.arguments)) for call in answer.calls]
    return answer.content.strip(), answer.reasoning.strip(), calls


@pytest.mark.parametrize("name", TEMPLATES)
def test_transformers_reads_the_same_parts(name: str) -> None:
    formats = response_formats(TEMPLATES[name])
    assert isinstance(formats.calls, CallFormat) == name.startswith("own")
    form = AnswerForm(calls=formats.calls, reasoning=formats.reasoning or "", types={"f": {}})
    form = msgspec.json.decode(msgspec.json.encode(form), type=AnswerForm)  # as processes send it
    text = ANSWERS[name]
    read = responses.parse_response(text, TEMPLATES[name], prefix="<|assistant|>")
    calls = [
        (call["function"]["name"], call["function"]["arguments"]) for call in read["tool_calls"]
    ]
    reasoning = "".join(
        read.get(field, "") for field in ("reasoning_content", "thinking", "reasoning")
    )
    expected = (read["content"].strip(), reasoning.strip(), calls)
    assert len(calls) == (1 if name in ("own object", "own tags") else 2)
    assert parts(form, [text]) == expected
    for cut in range(1, len(text)):
        assert parts(form, [text[:cut], text[cut:]]) == expected, text[:cut]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({}, "it has no fields"),
        ({"fields": {"tool_calls": 1}}, "it has no fields"),
        (template({"open_pattern": r"(a|b)", "close": "x"}), "more than texts and groups"),
        (template({"open": ["a", "b"], "close": "x"}), "several texts for open"),
        (template({"open": "a", "content": "kv-lines"}), "kv-lines, not json"),
        (template({"open": "a", "content": "json", "transform": {"x": "{y}"}}), "no functions"),
        (template({"open_pattern": r"(?P<name>\w+)"}), "do not begin with a text"),
        (template({"open_pattern": r"a(?P<name>\w+)", "content": "int"}), "other groups"),
        ({"fields": {"thinking": {"open": "<a>"}}}, "the close mark of its reasoning"),
        (
            template(
                TEMPLATES["pairs"]["fields"]["tool_calls"]
                | {"content_args": {"unquoted_keys": True}}
            ),
            "another dialect",
        ),
        (
            template(
                TEMPLATES["tags"]["fields"]["tool_calls"]
                | {"content_args": {"tag_pattern": r"<(?P<key>\w+)>(?P<value>.*?)</(?P=key)>"}}
            ),
            "more than texts",
        ),
    ],
)
def test_an_unknown_description_is_refused_by_its_part(wrong: Any, says: str) -> None:
    with pytest.raises(UnknownResponseTemplate, match=says):
        response_formats(wrong)


EOS, VOCAB = 2, 1408
CHAT = "{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}"
TOOL = {"name": "f", "parameters": closed(a=INTEGER)}


def encoder(folder: Path, own: Any) -> PromptEncoder:
    config = {"chat_template": CHAT, "response_template": own}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return PromptEncoder(tokenizer=load_tokenizer(model_path()), folder=folder)


def planned(encoder: PromptEncoder, choice: str = "auto") -> Any:
    tools = [{"type": "function", "function": TOOL}]
    messages = [{"role": "user", "content": "Hi"}]
    prompt = ChatPrompt(messages=messages, is_split=True, tools=tools, tool_choice=choice)
    return encoder.encode(prompt).plan


def draw(tokenizer: Tokenizer, grammar: str) -> str:
    """A random text that the grammar allows."""
    masker = Grammars(lambda: tokenizer, VOCAB, {EOS}).masker(grammar)
    rng, output = random.Random(1), list[int]()
    while EOS not in output:
        bits = np.unpackbits(masker.mask(output).view(np.uint8), bitorder="little")[:VOCAB]
        output.append(rng.choice(bits.nonzero()[0].tolist()))
        assert len(output) < 200
    return tokenizer.decode(output[:-1], skip_special_tokens=False)


def test_a_format_with_another_mark_is_not_the_known_one() -> None:
    text = json.dumps(TEMPLATES["tags"])
    assert response_formats(json.loads(text)).calls == "qwen3_coder"
    calls = response_formats(json.loads(text.replace("</parameter>", "</param>"))).calls
    assert isinstance(calls, CallFormat)
    assert calls.value_end == "</param>"


def test_a_format_whose_calls_need_their_mark_is_not_llama3() -> None:
    """Llama 3 also writes a call without the mark, as an answer in JSON would look."""
    names = {"name": "{content.name}", "arguments": "{content.parameters}"}
    described = {"open": "<|python_tag|>", "content": "json", "transform": {"function": names}}
    calls = response_formats(template(described)).calls
    assert isinstance(calls, CallFormat)
    assert (calls.begin, calls.key, calls.is_bare) == ("<|python_tag|>", "parameters", False)


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name != "pairs"])
def test_a_required_call_has_the_form_of_the_checkpoint(name: str, tmp_path: Path) -> None:
    calls = TEMPLATES[name]["fields"]["tool_calls"]
    own = encoder(tmp_path, template(calls))
    plan = planned(own, "f")
    grammar, form = plan.resolve(SamplingParams(), own.tokenizer)
    text = draw(own.tokenizer, grammar)
    read = responses.parse_response(text, template(calls), prefix="<|assistant|>")
    (call,) = read["tool_calls"]
    _, _, ours = parts(msgspec.json.decode(form, type=AnswerForm), [text])
    number = call["function"]["arguments"]["a"]
    assert call["function"]["name"] == "f"
    assert ours == [("f", {"a": int(number)})]


def test_without_a_known_description_the_chat_template_decides(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("minisgl"), "propagate", True)
    plan = planned(encoder(tmp_path, {"fields": {"tool_calls": {"open_pattern": "(a|b)"}}}))
    assert plan.form.calls == "hermes"
    assert "in tokenizer_config.json is not used, because the pattern" in caplog.text
