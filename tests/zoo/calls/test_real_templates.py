"""The chat templates of released models: prompts, calls and results, and clients' special tokens.

tests/templates/README.md says where they are from.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from transformers.utils.chat_template_utils import render_jinja_template

from minisgl.builtin import model_path
from minisgl.core.answer import collect
from minisgl.message import ChatPrompt
from minisgl.tokenizer import PromptEncoder, Tokenizer
from minisgl.tokenizer.chat import ChatEncoder
from minisgl.tokenizer.template import ChatTemplate
from minisgl_zoo.calls import AnswerForm, AnswerParser
from minisgl_zoo.calls.known import detect_calls, detect_reasoning
from minisgl_zoo.calls.tool_text import plain_messages, takes_tools
from minisgl_zoo.grammar.constraint import AnswerPlan

FOLDER = Path(__file__).parents[2] / "templates"
FORMATS = {
    "deepseek-r1-distill": ("deepseek_v3", "think"),
    "deepseek-v3.1": ("deepseek_v31", "think"),
    "gemma-4": ("gemma4", "gemma4"),
    "glm-4.6": ("glm", "think"),
    "glm-4.7": ("glm", "think"),
    "gpt-oss": ("harmony", ""),
    "granite-3.3": ("granite", "think"),
    "granite-4.0": ("hermes", ""),
    "ministral-3-reasoning": ("mistral", "mistral"),
    "minimax-m2": ("minimax", "think"),
    "mistral-nemo": ("mistral_v3", ""),
    "mistral-small-3.2": ("mistral", ""),
    "phi-3.5": ("", ""),
    "qwen2.5": ("hermes", ""),
    "qwen3": ("hermes", "think"),
    "qwen3-coder": ("qwen3_coder", ""),
    "qwq": ("hermes", "think"),
    "seed-oss": ("seed", "seed"),
    "smollm3": ("", "think"),
}
NO_TOOLS = {"phi-3.5", "smollm3", "deepseek-r1-distill", "deepseek-v3.1"}
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def tool(name: str, **types: str) -> dict[str, Any]:
    properties = {key: {"type": type, "description": "d"} for key, type in types.items()}
    schema = {"type": "object", "properties": properties, "required": list(types)}
    function = {"name": name, "description": f"does {name}", "parameters": schema}
    return {"type": "function", "function": function}


TOOLS = [tool("weather", city="string", days="integer"), tool("find", text="string", more="object")]
TYPES = {"weather": {"city": "string", "days": "integer"}, "find": {"text": "string"}}
WANTED = [
    ("weather", {"city": "Zürich 🏔", "days": 3}),
    ("find", {"text": 'a "b" }\n<x>', "more": {"deep": [1, {"a": "]"}], "yes": True}}),
]
USER = {"role": "user", "content": "Hello?"}


def call(index: int) -> dict[str, Any]:
    name, arguments = WANTED[index]
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"id": f"abcdefgh{index}", "type": "function", "function": function}


def asked(*calls: int) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": [call(index) for index in calls]}


def loaded(name: str) -> ChatTemplate:
    source = (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    return ChatTemplate({"default": source}, TOKENS)


def theirs(template: ChatTemplate, messages: list[dict[str, Any]], **args: Any) -> str:
    """What transformers renders; it takes the arguments of calls as objects."""
    shown = json.loads(json.dumps(messages))
    for message in shown:
        for each in message.get("tool_calls", ()):
            each["function"]["arguments"] = json.loads(each["function"]["arguments"])
    variables = {"add_generation_prompt": True, **TOKENS, **args}
    texts, _ = render_jinja_template([shown], chat_template=template.source, **variables)
    text: str = texts[0]
    return text


def test_every_template_is_tested() -> None:
    assert {path.stem for path in FOLDER.glob("*.jinja")} == set(FORMATS)
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `([\w.-]+)\.jinja`", readme, re.MULTILINE)) == set(FORMATS)


@pytest.mark.parametrize("name", FORMATS)
def test_prompts_are_those_of_transformers(name: str) -> None:
    template = loaded(name)
    assert (detect_calls(template.source), detect_reasoning(template.source)) == FORMATS[name]
    assert takes_tools(template) == (name not in NO_TOOLS)
    result = {"role": "tool", "tool_call_id": "abcdefgh0", "name": "weather", "content": "sunny"}
    last = {"role": "assistant", "content": "It is sunny."}
    chats = [[USER], [USER, asked(0), result, last, USER], [USER, last, USER]]
    for chat in chats:
        for args in ({"tools": TOOLS}, {"tools": None, "enable_thinking": False}):
            assert template.render(chat, args) == theirs(template, chat, **args)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("calls", [(0,), (1,), (0, 1)], ids=["weather", "find", "both"])
def test_the_calls_that_a_template_writes_are_read(name: str, calls: tuple[int, ...]) -> None:
    template = loaded(name)
    kind = (detect_calls(template.source) if takes_tools(template) else "") or "hermes"
    chat = plain_messages([USER, asked(*calls)], TOOLS, template, kind)
    args = {"tools": TOOLS if takes_tools(template) else None, "add_generation_prompt": False}
    first = next(i for i, message in enumerate(chat) if message["role"] == "assistant")
    before, text = template.render(chat[:first], args), template.render(chat, args)
    parser = AnswerParser(AnswerForm(calls=kind, types=TYPES))
    answer = collect([*parser.feed(text[len(before) :]), *parser.flush()])
    found = [(each.name, json.loads(each.arguments)) for each in answer.calls]
    wanted = [WANTED[index] for index in calls]
    assert found == wanted, text[len(before) :]


@pytest.mark.parametrize("name", FORMATS)
def test_calls_of_another_server_and_their_results_are_in_the_prompt(name: str) -> None:
    """Two calls with OpenAI's ids, without content; each result stands behind its call where each
    is alone."""
    template = loaded(name)
    asks = asked(0, 1) | {"content": None}
    asks["tool_calls"] = [{**each, "id": f"call_{i}"} for i, each in enumerate(asks["tool_calls"])]
    results = [
        {"role": "tool", "tool_call_id": f"call_{i}", "name": WANTED[i][0], "content": f"471{i}"}
        for i in (1, 0)
    ]
    kind = (detect_calls(template.source) if takes_tools(template) else "") or "hermes"
    chat = plain_messages([USER, asks, *results], TOOLS, template, kind)
    text = template.render(chat, {"tools": TOOLS if takes_tools(template) else None})
    for part in ("Zürich", '"b"', "4710", "4711"):
        assert part in text or json.dumps(part)[1:-1] in text, part
    if name == "gpt-oss":
        order = [text.rindex(part) for part in ("weather<|channel|>", "4710", "find<|", "4711")]
        assert order == sorted(order)


def test_a_template_that_refuses_two_calls_in_a_message_gets_one_in_each() -> None:
    """As Llama 3's does. Each call stands before its result; a result of no call stays."""
    source = (
        "{% for m in messages %}{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}"
        "{{ raise_exception('one call at once') }}{% endif %}{{ m.tool_calls[0].function.name }} "
        "{% else %}{{ m.content }} {% endif %}{% endfor %}"
    )
    results = [
        {"role": "tool", "tool_call_id": f"abcdefgh{i}", "content": f"471{i}"} for i in (0, 1, 2)
    ]
    template = ChatTemplate({"default": source}, TOKENS)
    chat = plain_messages([USER, asked(0, 1), *results], [], template, "llama3")
    assert template.render(chat).split()[-5:] == ["weather", "4710", "find", "4711", "4712"]


@pytest.mark.parametrize("name", FORMATS)
def test_results_and_tools_are_in_the_prompt(name: str, tmp_path: Path) -> None:
    template = loaded(name)
    encoder = PromptEncoder(tokenizer=plain_tokenizer(), folder=tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template.source, encoding="utf-8")
    result = {"role": "tool", "tool_call_id": "abcdefgh0", "name": "weather", "content": "4711"}
    prompt = ChatPrompt(messages=[USER, asked(0), result], tools=TOOLS, is_split=True)
    encoded = encoder.encode(prompt)
    assert isinstance(encoded.plan, AnswerPlan)
    form = encoded.plan.form
    assert form
    assert form.calls == ((FORMATS[name][0] if name not in NO_TOOLS else "") or "hermes")
    text = encoder.tokenizer.backend.decode(memoryview(encoded.ids).cast("i").tolist(), False)
    for part in ("does weather", "does find", "4711"):
        assert part in text


@pytest.mark.parametrize("name", FORMATS)
def test_a_tool_may_have_only_a_name(name: str, tmp_path: Path) -> None:
    """Seed-OSS's template wants a schema with properties, gpt-oss's a description."""
    encoder = PromptEncoder(tokenizer=plain_tokenizer(), folder=tmp_path)
    (tmp_path / "chat_template.jinja").write_text(loaded(name).source, encoding="utf-8")
    bare = {"type": "function", "function": {"name": "refresh"}}
    empty = {"type": "function", "function": {"name": "reset", "parameters": {"type": "object"}}}
    ids = encoder.encode(ChatPrompt(messages=[USER], tools=[bare, empty], is_split=True)).ids
    text = encoder.tokenizer.backend.decode(memoryview(ids).cast("i").tolist(), False)
    assert "refresh" in text
    assert "reset" in text


@pytest.mark.parametrize("name", FORMATS)
def test_special_tokens_of_clients_stay_text(name: str) -> None:
    template = loaded(name)
    marks = sorted(set(re.findall(r"<[|｜/\w:▁]+>|\[/?[A-Z_]+\]", template.source)))
    tokenizer = plain_tokenizer(marks)
    encoder = ChatEncoder(tokenizer, template)

    def num_special(text: str) -> int:
        tools = json.loads(json.dumps(TOOLS))
        tools[0]["function"]["description"] = text
        result = {"role": "tool", "tool_call_id": "abcdefgh0", "name": "weather", "content": text}
        chat = [{"role": "user", "content": text}, asked(0), result]
        ids = encoder.encode(chat, {"tools": tools})
        return sum(token in tokenizer.special_ids for token in ids)

    harmless = num_special("x y")
    for mark in marks:
        if mark not in ("<think>", "</think>"):  # templates cut contents there
            assert num_special(f"x {mark} y") == harmless, mark


def plain_tokenizer(special: list[str] | None = None) -> Tokenizer:
    """The built-in model's, with these special tokens."""
    backend = tokenizers.Tokenizer.from_file(str(model_path() / "tokenizer.json"))
    backend.add_special_tokens(special or [])
    return Tokenizer(backend, TOKENS)
