"""Answers that must be calls, or must follow a form behind reasoning, drawn at random."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import llguidance
import msgspec
import numpy as np
import pytest
import tokenizers

from minisgl.builtin import model_path
from minisgl.core import Accepted, Finished, SamplingParams, Token
from minisgl.core.answer import collect
from minisgl.errors import InvalidRequest, RequestError
from minisgl.message import ChatPrompt, TextReply, ids_to_bytes
from minisgl.message.frontend import CodecReply, EncodeMsg
from minisgl.tokenizer import Detokenizer, PromptEncoder, Tokenizer
from minisgl.tokenizer.template import ChatTemplate
from minisgl_gateway.codec_answers import answer_codec
from minisgl_zoo.calls import AnswerForm
from minisgl_zoo.calls.known import CALLS, MESSAGES, PARSERS, REASONING, special_texts
from minisgl_zoo.calls.plan import _types
from minisgl_zoo.calls.tool_text import plain_messages
from minisgl_zoo.grammar.answer import AnswerGrammar
from minisgl_zoo.grammar.constraint import AnswerPlan
from minisgl_zoo.grammar.maskers import Grammars
from minisgl_zoo.grammar.pairs import pairs_call

EOS = 2
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "unit": {"enum": ["C", "F"]},
        "days": {"type": "integer", "minimum": 0, "maximum": 9},
        "spots": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
FLAG = {"type": "boolean"}
NOW = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = (("get_weather", WEATHER), ("now", NOW))
TYPES = {"get_weather": {"city": "string", "days": "integer"}, "now": {}}


def make_tokenizer(texts: list[str]) -> Tokenizer:
    """The built-in model's, with these texts as added tokens that are not special ones."""
    content = json.loads((model_path() / "tokenizer.json").read_text())
    at = len(content["model"]["vocab"])
    for index, text in enumerate(dict.fromkeys(texts)):
        token = {"id": at + index, "content": text, "special": text.startswith("[")}
        flags = ("single_word", "lstrip", "rstrip", "normalized")
        content["added_tokens"].append(token | dict.fromkeys(flags, False))
    return Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(content)), {})


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    texts = [text for name in PARSERS for text in special_texts(name, "")]
    return make_tokenizer([*texts, *(text for name in REASONING for text in REASONING[name])])


@cache
def without_marks() -> Tokenizer:
    return make_tokenizer([])


@cache
def maskers_of(tokenizer: Tokenizer) -> Grammars:
    return Grammars(lambda: tokenizer, tokenizer.vocab_size, {EOS})


def draw(tokenizer: Tokenizer, grammar: str, seed: int, most: int = 400) -> list[int]:
    size = tokenizer.vocab_size
    masker = maskers_of(tokenizer).masker(grammar)
    rng, output = random.Random(seed), list[int]()
    while EOS not in output and len(output) < most:
        bits = np.unpackbits(masker.mask(output).view(np.uint8), bitorder="little")
        allowed = bits[:size].nonzero()[0].tolist()
        # Free text ends some day: a mark or the end of sequence is drawn more often.
        marks = [token for token in allowed if token >= 1408 or token == EOS]
        output.append(rng.choice(marks if marks and rng.random() < 0.2 else allowed))
    return output


def answer(
    tokenizer: Tokenizer,
    form: str,
    output: list[int],
    accepted: Accepted | None = None,
    had: Sequence[Any] = (),
) -> tuple[Any, Finished]:
    """What the detokenizer makes of the ids. had: earlier replies."""
    detokenizer = Detokenizer(tokenizer)
    events: list[Any] = [
        accepted or Accepted(uid=0, num_prompt_tokens=1, sampling=SamplingParams(), form=form),
        *(Token(uid=0, id=token, silent=token == EOS) for token in output),
        Finished(uid=0, reason="stop", num_prompt_tokens=1, num_output_tokens=len(output)),
    ]
    replies = [reply for event in events for reply in detokenizer.handle([event])[0]]
    parts = [
        part for reply in [*had, *replies] if isinstance(reply, TextReply) for part in reply.parts
    ]
    assert isinstance(replies[-1], Finished)
    return collect(parts), replies[-1]


@pytest.mark.parametrize("name", PARSERS)
def test_another_engine_goes_on_within_a_call(name: str, tokenizer: Tokenizer) -> None:
    """Wherever the first one ended: the parts and the tokens of reasoning are the same."""
    form = AnswerForm(calls=name, types=TYPES, reasoning=name if name in MESSAGES else "")
    plan = AnswerPlan(form=form, tools=TOOLS, choice="required")
    grammar, encoded = plan.resolve(SamplingParams(), tokenizer)
    output = draw(tokenizer, grammar, seed=1, most=150)
    whole = answer(tokenizer, encoded, output)
    fields = {"uid": 0, "num_prompt_tokens": 1, "sampling": SamplingParams(), "form": encoded}
    for end in range(0, len(output), 7):
        first = [Accepted(**fields), *(Token(uid=0, id=token) for token in output[:end])]
        had = [each for each in Detokenizer(tokenizer).handle(first)[0] if each != first[0]]
        seen = [token for reply in had for token in reply.token_ids]
        again = Accepted(**fields, output=ids_to_bytes(seen))
        found, last = answer(tokenizer, encoded, output[len(seen) :], again, had)
        assert found == whole[0], end
        assert last.num_reasoning_tokens == whole[1].num_reasoning_tokens, end


@pytest.mark.parametrize("name", PARSERS)
@pytest.mark.parametrize("choice", ["required", "get_weather"])
@pytest.mark.parametrize("has_tokens", [True, False])
def test_required_calls(name: str, choice: str, has_tokens: bool, tokenizer: Tokenizer) -> None:
    if not has_tokens:
        if name in MESSAGES:
            return
        tokenizer = without_marks()
    form = AnswerForm(calls=name, types=TYPES, reasoning=name if name in MESSAGES else "")
    tools = tuple(tool for tool in TOOLS if choice in ("required", tool[0]))
    plan = AnswerPlan(form=form, tools=tools, choice=choice)
    grammar, encoded = plan.resolve(SamplingParams(), tokenizer)
    ended = 0
    for seed in range(4):
        output = draw(tokenizer, grammar, seed)
        if output[-1] != EOS:
            continue
        ended += 1
        found, _ = answer(tokenizer, encoded, output)
        assert found.content.strip() == ""
        assert found.calls, tokenizer.decode(output)
        for call in found.calls:
            assert choice in ("required", call.name)
            arguments = json.loads(call.arguments)
            inside = MESSAGES[name].calls if name in MESSAGES else CALLS[name]
            if inside and inside.syntax in ("tags", "pairs"):  # texts without their bounds
                arguments |= {key: text[:8] for key, text in arguments.items() if key == "city"}
            jsonschema.validate(arguments, dict(TOOLS)[call.name])
        if choice != "required":
            assert len(found.calls) == 1
    assert ended >= 2 or not has_tokens  # a random text without marks seldom ends


def test_pairs_follow_the_schema(tokenizer: Tokenizer) -> None:
    """Objects in lists, references, choices, texts and numbers as choices, free objects."""
    place = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "next": {"anyOf": [{"$ref": "#/$defs/place"}]}},
        "required": ["name"],
        "additionalProperties": False,
    }
    schema = {
        "type": "object",
        "properties": {
            "places": {"type": "array", "items": {"$ref": "#/$defs/place"}, "minItems": 1},
            "mode": {"enum": ["fast", 3, None, {"a": ["b"]}]},
            "limit": {"type": ["integer", "null"], "minimum": 0, "maximum": 99},
            "free": {"type": "object"},
            "one": {"type": "array", "items": {"type": "boolean"}, "maxItems": 1},
        },
        "required": ["places", "mode", "limit"],
        "additionalProperties": False,
        "$defs": {"place": place},
    }
    form = AnswerForm(calls="gemma4")
    plan = AnswerPlan(form=form, tools=(("go", schema),), choice="go")
    grammar, encoded = plan.resolve(SamplingParams(), tokenizer)
    ended = 0
    for seed in range(20):
        output = draw(tokenizer, grammar, seed)
        if output[-1] == EOS:
            ended += 1
            found, _ = answer(tokenizer, encoded, output)
            assert [call.name for call in found.calls] == ["go"]
            jsonschema.validate(json.loads(found.calls[0].arguments), schema)
    assert ended >= 5


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{"$ref": "#/$defs/base"}, {"properties": {"b": FLAG}, "required": ["b"]}]},
        {"properties": {"own": FLAG}, "allOf": [{"$ref": "#/$defs/base"}], "required": ["own"]},
        {"$ref": "#/$defs/base", "properties": {"own": FLAG}, "required": ["own"]},
        {"properties": {"a": FLAG, "b": FLAG}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        {
            "properties": {"kind": {"enum": ["x", "y"]}},
            "required": ["kind"],
            "oneOf": [
                {"properties": {"kind": {"const": "x"}, "x": FLAG}, "required": ["x"]},
                {"properties": {"kind": {"const": "y"}, "y": FLAG}, "required": ["y"]},
            ],
        },
        {"properties": {"to": {"anyOf": [{"$ref": "#/$defs/base"}, {"type": "null"}]}}},
    ],
    ids=["allOf", "beside allOf", "beside $ref", "anyOf", "oneOf", "inside"],
)
@pytest.mark.parametrize("name", ["gemma4", "hermes"])
def test_several_schemas_may_describe_the_arguments(
    schema: dict[str, Any], name: str, tokenizer: Tokenizer
) -> None:
    base = {"type": "object", "properties": {"id": FLAG}, "required": ["id"]}
    schema = {"type": "object", **schema, "$defs": {"base": base}}
    plan = AnswerPlan(form=AnswerForm(calls=name), tools=(("go", schema),), choice="go")
    grammar, encoded = plan.resolve(SamplingParams(), tokenizer)
    ended = 0
    for seed in range(12):
        output = draw(tokenizer, grammar, seed)
        if output[-1] == EOS:
            ended += 1
            found, _ = answer(tokenizer, encoded, output)
            given = json.loads(found.calls[0].arguments)
            jsonschema.validate(given, schema)
            assert given.keys() <= {"id", "a", "b", "own", "kind", "x", "y", "to"}
    assert ended >= 8


@pytest.mark.parametrize(
    ("defs", "says"),
    [
        ({"l": {"type": "object", "allOf": [{"$ref": "#/$defs/l"}]}}, "circle|text|large|sibling"),
        (
            {
                **{f"l{i}": {"type": "object", "anyOf": [{"$ref": f"#/$defs/l{i + 1}"}] * 9}
                   for i in range(9)},
                "l9": {"type": "object"}, "l": {"$ref": "#/$defs/l0"},
            },
            "too large|0.3 s",
        ),
    ],
    ids=["circle", "9^9"],
)  # fmt: skip
def test_references_that_multiply_are_refused(defs: Any, says: str, tokenizer: Tokenizer) -> None:
    schema = {"type": "object", "properties": {"to": {"$ref": "#/$defs/l"}}, "$defs": defs}
    plan = AnswerPlan(form=AnswerForm(calls="gemma4"), tools=(("go", schema),), choice="go")
    with pytest.raises(RequestError, match=says):
        plan.resolve(SamplingParams(), tokenizer)
    with pytest.raises(RequestError, match=r"circle|too large"):  # without llguidance's own check
        pairs_call(AnswerGrammar(token_id=lambda text: None), [("go", schema)], "", "", "'")


def test_pairs_refuse_a_name_that_they_cannot_write(tokenizer: Tokenizer) -> None:
    tools = (("go", {"properties": {"a b": {}}}),)
    plan = AnswerPlan(form=AnswerForm(calls="gemma4"), tools=tools, choice="go")
    with pytest.raises(RequestError, match="cannot write the name 'a b'"):
        plan.resolve(SamplingParams(), tokenizer)


@pytest.mark.parametrize("names", ["city unit days spots", "city days", "city days spots", "unit"])
def test_optional_arguments_may_be_missing(names: str) -> None:
    plan = AnswerPlan(form=AnswerForm(calls="qwen3_coder"), tools=TOOLS, choice="get_weather")
    grammar, _ = plan.resolve(SamplingParams(), without_marks())
    values = {"city": "Bonn", "unit": "C", "days": "3", "spots": "[true]"}
    items = [f"<parameter={name}>\n{values[name]}\n</parameter>\n" for name in names.split()]
    text = f"<tool_call>\n<function=get_weather>\n{''.join(items)}</function>\n</tool_call>"
    assert matches(grammar, text) == ("city" in names)


def matches(grammar: str, text: str) -> bool:
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar)
    return bool(matcher.consume_tokens(list(text.encode())) and matcher.is_accepting())


@pytest.mark.parametrize(
    ("form", "call", "before"),
    [
        (
            AnswerForm(calls="hermes"),
            '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
            "",
        ),
        (AnswerForm(calls="mistral"), "[TOOL_CALLS]now[ARGS]{}", ""),
        (AnswerForm(calls="llama3"), '{"name": "now", "parameters": {}}', ""),
        (
            AnswerForm(calls="harmony", reasoning="harmony"),
            "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}",
            "<|channel|>final<|message|>",
        ),
    ],
    ids=["hermes", "mistral", "llama3", "harmony"],
)
def test_a_form_leaves_the_choice_to_call(form: AnswerForm, call: str, before: str) -> None:
    """Agents whose last answer has a schema offer their tools beside it; one that must call has no
    text, so no form."""
    sampling = SamplingParams(structured_outputs={"json": WEATHER})
    said = before + '{"city": "Bonn", "days": 3}'
    for choice in ("auto", "required"):
        plan = AnswerPlan(form=form, tools=TOOLS, choice=choice)
        grammar, _ = plan.resolve(sampling, without_marks())
        assert matches(grammar, call)
        assert matches(grammar, said) == (choice == "auto")
        assert not matches(grammar, call.replace("now", "later"))
        assert not matches(grammar, f"{before}It is sunny.")
    grammar, _ = AnswerPlan(form=form).resolve(sampling, without_marks())
    assert not matches(grammar, call)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("hermes", '<tool_call>{"name": "go", "arguments": {"to": ["a", "a"]}}</tool_call>'),
        ("qwen3_coder", "<function=go>\n<parameter=to>\n[1]\n</parameter>\n</function>"),
    ],
)
def test_beside_a_form_tools_may_have_any_schema(name: str, call: str) -> None:
    """As without one: a model that need not call writes its arguments freely."""
    listed = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
    schema = {"type": "object", "properties": {"to": listed, "at": {}}, "required": ["to"]}
    plan = AnswerPlan(form=AnswerForm(calls=name), tools=(("go", schema),))
    grammar, _ = plan.resolve(SamplingParams(structured_outputs={"json": WEATHER}), without_marks())
    if name == "qwen3_coder":
        call = f"<tool_call>\n{call}\n</tool_call>"
    assert matches(grammar, call)
    assert not matches(grammar, call.replace('"to"', '"from"').replace("=to>", "=from>"))
    assert matches(grammar, '{"city": "Bonn", "days": 3}')


def test_beside_a_form_a_tool_may_have_an_empty_list_as_properties() -> None:
    """PHP writes an empty object so."""
    plan = AnswerPlan(form=AnswerForm(calls="hermes"), tools=(("go", {"properties": []}),))
    grammar, _ = plan.resolve(SamplingParams(structured_outputs={"json": WEATHER}), without_marks())
    assert matches(grammar, '<tool_call>{"name": "go", "arguments": {}}</tool_call>')
    assert matches(grammar, '{"city": "Bonn", "days": 3}')


def arguments(to: Any, defs: Any = None, **others: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {**others, "to": to},
        "required": ["to"],
        "additionalProperties": False,
        "$defs": defs or {},
    }


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"name": "go", "arguments": {"to": VALUE}}</tool_call>'),
        ("mistral_v3", '[TOOL_CALLS][{"name": "go", "arguments": {"to": VALUE}}]'),
        ("mistral", '[TOOL_CALLS]go[ARGS]{"to": VALUE}'),
        ("glm", "<tool_call>go\n<arg_key>to</arg_key>\n<arg_value>VALUE</arg_value>\n</tool_call>"),
        ("gemma", "<start_function_call>call:go{to:VALUE}<end_function_call>"),
    ],
)
@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (arguments({"$ref": "#/$defs/a~01~1b"}, defs={"a~1/b": {"type": "integer"}}), "7", "true"),
        (arguments({"$ref": "#/$defs/a%20b"}, defs={"a b": {"type": "integer"}}), "7", "true"),
        (arguments({"$ref": "#/properties/at"}, at={"type": "integer"}), "7", "true"),
        (
            arguments({"type": "array", "items": {"$ref": "#"}}),
            '[{"to": []}]',
            '[{"name": "go", "arguments": {"to": []}}]',
        ),
        (
            {"$ref": "#/$defs/all", "$defs": {"all": arguments({"type": "integer"})}},
            "7",
            "true",
        ),
    ],
    ids=["escapes", "space", "property", "whole", "at the top"],
)
def test_arguments_may_have_references(
    name: str, text: str, schema: dict[str, Any], right: str, wrong: str
) -> None:
    tools = (("go", {"type": "object", **schema}),)
    plan = AnswerPlan(form=AnswerForm(calls=name), tools=tools, choice="go")
    grammar, _ = plan.resolve(SamplingParams(), without_marks())
    if name == "gemma":
        right, wrong = (value.replace('"', "").replace(" ", "") for value in (right, wrong))
    assert matches(grammar, text.replace("VALUE", right))
    assert not matches(grammar, text.replace("VALUE", wrong))


@pytest.mark.parametrize("budget", [None, 20])
def test_reasoning_ends_at_the_first_mark_that_is_text(budget: int | None) -> None:
    form = AnswerForm(reasoning="think", is_open=True)
    plan = AnswerPlan(form=form, thinking_budget=budget)
    sampling = SamplingParams(structured_outputs={"regex": "[0-9]"})
    grammar, _ = plan.resolve(sampling, without_marks())
    assert matches(grammar, "Hm</think>\n7")
    assert matches(grammar, "</think>7")
    assert not matches(grammar, "Hm</think>Hm</think>7")
    assert matches(grammar, "Is 1 < 2?</think>7") == (budget is None)
    assert matches(grammar, f"{'a' * 20}</think>7")
    assert matches(grammar, f"{'a' * 21}</think>7") == (budget is None)


@pytest.mark.parametrize("budget", [None, 20])
@pytest.mark.parametrize(
    ("name", "thought", "final"),
    [
        (
            "harmony",
            "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant",
            "<|channel|>final",
        ),
        ("muse_glimmer", " to=self<|message|>Hm<|eom|><|start|>assistant", " to=user"),
    ],
)
def test_a_form_applies_to_the_final_message(
    name: str, thought: str, final: str, budget: int | None
) -> None:
    plan = AnswerPlan(form=AnswerForm(reasoning=name), thinking_budget=budget)
    sampling = SamplingParams(structured_outputs={"regex": "[0-9]"})
    grammar, _ = plan.resolve(sampling, without_marks())
    assert matches(grammar, f"{thought}{final}<|message|>7")
    assert matches(grammar, f"{final}<|message|>7")
    assert not matches(grammar, f"{thought}{final}<|message|>seven")
    assert not matches(grammar, f"{thought}7")


@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize("budget", [None, 0, 5])
@pytest.mark.parametrize("content", [{"json": WEATHER}, None])
@pytest.mark.parametrize("has_tokens", [True, False])
def test_reasoning_comes_first(
    is_open: bool, budget: int | None, content: Any, has_tokens: bool, tokenizer: Tokenizer
) -> None:
    if not has_tokens:
        tokenizer = without_marks()
    form = AnswerForm(reasoning="think", is_open=is_open)
    plan = AnswerPlan(form=form, thinking_budget=budget)
    grammar, encoded = plan.resolve(SamplingParams(structured_outputs=content), tokenizer)
    if not grammar:
        assert budget is None
        assert content is None
        return
    for seed in range(6):
        output = draw(tokenizer, grammar, seed, most=150)
        found, end = answer(tokenizer, encoded, output)
        thinking = found.reasoning
        if output[-1] == EOS and content:
            jsonschema.validate(json.loads(found.content), WEATHER)
        if budget is not None and has_tokens:
            assert end.num_reasoning_tokens <= budget + 2 + (budget == 0)
        if budget == 0 and output[-1] == EOS:
            assert not thinking
        assert is_open or not thinking or end.num_reasoning_tokens > 0


def test_a_budget_of_reasoning_needs_all_tokens(tokenizer: Tokenizer) -> None:
    """Where the budget ends, only the end of the reasoning is allowed."""
    form = AnswerForm(reasoning="think", is_open=True)
    plan = AnswerPlan(form=form, thinking_budget=3)
    with pytest.raises(RequestError, match="cannot be combined with thinking_budget"):
        plan.resolve(SamplingParams(allowed_token_ids=(5,)), tokenizer)


TEMPLATES = {
    "plain": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
    "hermes": "{% if tools %}<tool_call>{{ tools | tojson }} arguments{% endif %}"
    "{% for m in messages %}{{ m.content }}{% endfor %}",
    "think": "{% for m in messages %}{{ m.content }}{% endfor %}{% if enable_thinking is defined "
    "and not enable_thinking %}<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}",
    "plain_think": "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}",
    "granite": "{% for m in messages %}{{ m.content }}{% endfor %}{% if thinking %}<think>\n"
    "{% else %}<think></think>{% endif %}",
    "hybrid": "{% for m in messages %}{{ m.content }}{% endfor %}{% if enable_thinking is defined "
    "and not enable_thinking %}<think>\n\n</think>{% endif %}",
    "muse": "{% if tools %}{{ tools }}<atem:function_calls>{% endif %}"
    "Strength {{ reasoning_strength }}.{% for m in messages %}<|start|>{{ m.role }}<|message|>"
    "{{ m.content }}<|eom|>{% endfor %}<|start|>assistant",
}


def planned(template: str, tokenizer: Tokenizer, **fields: Any) -> tuple[AnswerPlan | None, str]:
    encoder = PromptEncoder(tokenizer=tokenizer, folder=Path())
    encoder.__dict__["template"] = ChatTemplate({"default": TEMPLATES[template]}, {})
    messages = fields.pop("messages", [{"role": "user", "content": "Hi"}])
    prompt = ChatPrompt(messages=messages, is_split=True, **fields)
    encoded: Any = encoder.encode(prompt)
    text = tokenizer.decode(np.frombuffer(encoded.ids, "<i4").tolist(), skip_special_tokens=False)
    return encoded.plan, text


def tool(name: str, schema: Any = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema or NOW}}


def test_plans(tokenizer: Tokenizer) -> None:
    assert planned("plain", tokenizer)[0] is None
    plan, text = planned("plain", tokenizer, tools=[tool("now")])
    assert plan
    assert plan.form == AnswerForm(calls="hermes", types={"now": {}})
    assert text.startswith("system: You can call functions")
    assert '"name": "now"' in text
    plan, text = planned("hermes", tokenizer, tools=[tool("get_weather", WEATHER)])
    assert plan
    assert plan.form
    assert plan.form.types["get_weather"]["days"] == "integer"
    assert "You can call functions" not in text
    plan, _ = planned("think", tokenizer)
    assert plan
    assert plan.form == AnswerForm(reasoning="think", is_open=True)
    assert planned("think", tokenizer, template_args={"enable_thinking": False})[0] is None
    assert planned("think", tokenizer, template_args={"reasoning_effort": "none"})[0] is None
    for args in ({"enable_thinking": True}, {"reasoning_effort": "low"}, {"thinking": True}):
        plan, text = planned("granite", tokenizer, template_args=args)
        assert plan
        assert text.endswith("<think>\n")
    assert planned("granite", tokenizer, template_args={"enable_thinking": False})[0] is None
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hel"}]
    args = {"continue_final_message": True, "add_generation_prompt": False}
    continued = planned("plain_think", tokenizer, messages=turns, template_args=args)
    assert continued[0] is None  # the text goes on behind its reasoning
    plan, _ = planned("hybrid", tokenizer, template_args={"reasoning_effort": "high"})
    assert plan
    assert plan.form == AnswerForm(reasoning="think")


@pytest.mark.parametrize(
    ("effort", "strength"), [("high", "high"), ("low", "low"), ("none", "low"), ("minimal", "low")]
)
def test_muse_glimmer_has_strengths(effort: str, strength: str, tokenizer: Tokenizer) -> None:
    """They cannot be switched off."""
    name = "muse_glimmer"
    plan, text = planned("muse", tokenizer, template_args={"reasoning_effort": effort})
    assert plan
    assert plan.form == AnswerForm(reasoning=name)
    assert f"Strength {strength}." in text
    plan, text = planned("muse", tokenizer, tools=[tool("now")])
    assert plan
    assert plan.form == AnswerForm(calls=name, reasoning=name, types={"now": {}})
    assert "You can call functions" not in text


@pytest.mark.parametrize(
    ("template", "fields", "says"),
    [
        ("plain", {"tool_choice": "required"}, "there are no tools"),
        ("plain", {"tools": [tool("a")], "tool_choice": "b"}, "'b', and no tool has that name"),
        ("plain", {"tools": [tool("a"), tool("a")]}, "same name"),
        ("plain", {"tools": [tool("a", {"type": "array"})]}, r"tools\.a\.parameters"),
        ("plain", {"thinking_budget": 5}, "no.e"),
        (
            "plain",
            {"template_args": {"reasoning_effort": "low"}},
            "^reasoning_effort: the chat template of this model reads no effort",
        ),
    ],
)
def test_refusals(template: str, fields: Any, says: str, tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match=says):
        planned(template, tokenizer, **fields)


def test_a_wrong_schema_of_a_required_tool_is_named(tokenizer: Tokenizer) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    plan = AnswerPlan(form=AnswerForm(calls="hermes"), tools=(("f", schema),), choice="required")
    with pytest.raises(RequestError, match=r"tools\.f\.parameters\.properties\.a cannot be used"):
        plan.resolve(SamplingParams(), tokenizer)
    with pytest.raises(RequestError, match="cannot be combined with a tool_choice"):
        plan.resolve(SamplingParams(ignore_eos=True), tokenizer)


def test_reasoning_tokens_are_counted(tokenizer: Tokenizer) -> None:
    form = '{"reasoning": "think"}'
    ids = tokenizer.encode("<think>one two</think>three", add_special_tokens=False)
    end = tokenizer.backend.token_to_id("</think>")
    found, finished = answer(tokenizer, form, ids)
    assert (found.reasoning, found.content) == ("one two", "three")
    assert finished.num_reasoning_tokens == ids.index(end) + 1


def test_a_router_gets_the_ids_of_a_prompt_with_tools(tokenizer: Tokenizer) -> None:
    encoder = PromptEncoder(tokenizer=tokenizer, folder=model_path())
    tool = {"type": "function", "function": {"name": "now", "parameters": NOW}}
    messages = [{"role": "user", "content": "What time is it?"}]
    prompt = ChatPrompt(messages=messages, tools=[tool], is_split=True)
    reply = answer_codec(encoder, EncodeMsg(seq=1, prompt=prompt))
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(reply), type=CodecReply)
    assert sent.ids == encoder.encode(prompt).ids


@pytest.mark.parametrize("calls", ["hermes", "lfm2"])
@pytest.mark.parametrize("content", ["I look.", [{"type": "text", "text": "I look."}], "", None])
def test_calls_follow_the_text_beside_them(calls: str, content: Any) -> None:
    """Where the template writes no calls, they become content."""
    source = "{% for message in messages %}{{ message.content }};{% endfor %}"
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    asks = {"role": "assistant", "content": content, "tool_calls": [call]}
    user = {"role": "user", "content": "a"}
    _, said = plain_messages([user, asks], [], ChatTemplate({"default": source}, {}), calls)
    begin = CALLS[calls].begin
    assert said["content"].startswith(f"I look.\n{begin}" if content else begin)


def test_the_type_of_an_argument_of_several_types_is_unknown() -> None:
    schema = {"properties": {"a": {"type": ["string", "null"]}, "b": {"type": "integer"}}}
    assert _types(schema) == {"a": "", "b": "integer"}
