"""Conversations and chat templates that are refused, with the reason, and a template's bounds."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from helpers.chat_templates import CALL, CHATML, MISTRAL, USER, folder_with, template_of
from helpers.text_checkpoints import make
from minisgl.errors import CheckpointError, InvalidRequest
from minisgl.tokenizer import template as bounds
from minisgl.tokenizer.template import ChatTemplate, Part

PROMPT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n".format(USER["content"])


def test_a_message_that_cannot_be_continued_is_refused() -> None:
    args = {"continue_final_message": True}
    calls = {"role": "assistant", "tool_calls": [{"type": "function", "function": CALL}]}
    picture = [{"type": "text", "text": "a"}, Part(type="image")]
    for last, match in (
        (USER, "the role 'user'"),
        ({"role": "assistant", "content": picture}, "images"),
        ({"role": "assistant", "content": ""}, "no content"),
        (calls, "no content"),
        (calls | {"content": "x"}, "tool calls"),
    ):
        with pytest.raises(InvalidRequest, match=match) as caught:
            ChatTemplate({"default": CHATML}, {}).render([USER, last], args)
        assert caught.value.param == "continue_final_message"
    with pytest.raises(InvalidRequest, match="does not write"):
        ChatTemplate({"default": "x"}, {}).render([{"role": "assistant", "content": "x"}], args)


@pytest.mark.parametrize(
    ("messages", "match", "param"),
    [
        ([], "at least one message", "messages"),
        ([USER, {"role": "user"}], "content is missing", "messages[1].content"),
        ([{"role": "user", "content": 5}], "got a int", "messages[0].content"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            "text only, got 'image_url'",
            "messages[0].content[0]",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], "got 'text'", "messages[0].content[0]"),
        ([{"role": "user", "content": ["x"]}], "got 'x'", "messages[0].content[0]"),
    ],
)
def test_malformed_messages(messages: Any, match: str, param: str) -> None:
    template = ChatTemplate({"default": CHATML}, {})
    with pytest.raises(InvalidRequest, match=match) as caught:
        template.render(messages)
    assert caught.value.param == param
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("source", "match"),
    [
        (MISTRAL, "roles must alternate"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|not safely callable"),
        ("{{ nothing.at.all }}", "'nothing' is undefined"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ raise_exception(messages[0].tool_calls[0].function.arguments) }}", r"\\ud800"),
    ],
)
def test_templates_that_refuse(source: str, match: str) -> None:
    call = {"function": {"name": "f", "arguments": '"\\ud800"'}}
    chat = [{"role": "assistant", "content": "x", "tool_calls": [call]}]
    with pytest.raises(InvalidRequest, match=match) as caught:
        ChatTemplate({"default": source}, {}).render(chat)
    caught.value.message.encode()


@pytest.mark.parametrize("template", [5, {"a": "b"}, ["x"], [{"name": "default"}]])
def test_no_template_at_all(template: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="must be a string or a list"):
        template_of(folder_with(tmp_path, template))


def test_a_template_that_is_no_text(tmp_path: Path) -> None:
    folder = make(tmp_path, "byte_level")
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja cannot be read as text"):
        template_of(folder)
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.json").write_bytes(b"[" * 100_000)
    with pytest.raises(CheckpointError, match=r"chat_template\.json is not valid JSON"):
        template_of(folder)


def test_checkpoints_that_cannot_chat(tmp_path: Path) -> None:
    none = template_of(make(tmp_path, "byte_level"))
    broken = ChatTemplate({"default": "{% if %}"}, {})
    too_deep = ChatTemplate({"default": "{{ " + "(" * 10_000}, {})
    for template in (none, broken, too_deep):
        assert not template.is_usable
        with pytest.raises(InvalidRequest, match="/v1/completions"):
            template.render([USER])


DOUBLING = "{% set ns = namespace(s='aa') %}{% for i in range(60) %}BODY{% endfor %}"
LISTS = "{% set ns = namespace(l=[1]) %}{% for i in range(60) %}{% set ns.l = ns.l + ns.l %}"
ATTACKS: dict[str, tuple[str, str]] = {
    "loops": (
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "more than 0.2 s",
    ),
    "a macro that calls itself nine times": (
        "{% macro f() %}{% for i in range(9) %}{{ f() }}{% endfor %}{% endmacro %}{{ f() }}",
        "recursion|more than|ends the process",
    ),
    "a macro of filters that calls itself": (
        "{% macro f(x) %}{{ [f(x)]|map('upper')|list|tojson }}{% endmacro %}{{ f(1) }}",
        "recursion|more than|ends the process",
    ),
    "a list in itself": (
        "{% set ns = namespace(l=[]) %}{% for i in range(99999) %}{% set ns.l = [ns.l] %}"
        "{% endfor %}{{ ns.l|tojson }}",
        "recursion|more than|ends the process",
    ),
    "wordwrap": ("{{ (messages[0].role * 9999999)|wordwrap(1)|length }}", "more than"),
    "title": ("{{ ((messages[0].role ~ ' ') * 9999999)|title|length }}", "more than"),
    "tojson": ("{{ [[[[1]]]]|tojson(indent=60000000)|length }}", "more than"),
    "ljust": ("{{ 'x'.ljust(999999999)|length }}", "more than"),
    "a large power": ("{{ ((messages|length + 9) ** (10 ** 9)) % 7 }}", "more than"),
    "a long text": ("{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}", "exceeds 1,000,000"),
    "a text that doubles": (DOUBLING.replace("BODY", "{% set ns.s = ns.s ~ ns.s %}"), "more than"),
    "a text that joins": (
        DOUBLING.replace("BODY", "{% set ns.s = [ns.s, ns.s]|join %}"),
        "more than",
    ),
    "lists that double": (LISTS + "{% endfor %}", "more than"),
    "lipsum": ("{{ lipsum(n=999999999)|length }}", "more than"),
}


@pytest.fixture
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds that an attack reaches soon."""
    monkeypatch.setattr(bounds, "LOAD_S", 1.0)
    monkeypatch.setattr(bounds, "RENDER_S", 0.2)
    monkeypatch.setattr(bounds, "MAX_PROMPT", 10**6)
    monkeypatch.setattr(bounds, "MAX_MEMORY", 2**28 if sys.platform == "linux" else 2**30)


@pytest.mark.usefixtures("little")
def test_a_rendering_ends_at_a_bound_and_others_go_on() -> None:
    """Each attack ends in a 400; the next prompt gets a renderer."""
    for name, (source, match) in ATTACKS.items():
        start = time.monotonic()
        with pytest.raises(InvalidRequest, match=match) as caught:
            ChatTemplate({"default": source}, {}).render([USER])
        assert caught.value.status == 400, name
        print(f"{name}: {time.monotonic() - start:.2f} s, {caught.value.message[-60:]}")
    assert ChatTemplate({"default": CHATML}, {}).render([USER]) == PROMPT


@pytest.mark.usefixtures("little")
@pytest.mark.parametrize(
    "source",
    [
        "{{ 1|round(300000000, 'ceil') }}",
        "{% if 'a' %}" * 60_000 + "{% endif %}" * 60_000,
        "{% if messages %}a{% endif %}" * 60_000,
        "{{ " + "(" * 100_000,
    ],
    ids=["a constant of 300 million digits", "60,000 levels", "60,000 conditions", "brackets"],
)
def test_loading_ends_at_a_bound(source: str, caplog: pytest.LogCaptureFixture) -> None:
    broken = ChatTemplate({"default": source}, {})
    assert not broken.is_usable
    assert "the chat template of this model is broken" in caplog.text
    with pytest.raises(InvalidRequest, match=r"is broken \(.*: send a text prompt"):
        broken.render([USER])
    assert ChatTemplate({"default": CHATML}, {}).render([USER]) == PROMPT


def test_a_template_cannot_leave_its_sandbox() -> None:
    for source in (
        "{{ messages.append(1) }}",
        "{{ messages.__class__() }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__ }}",
    ):
        with pytest.raises(InvalidRequest, match="unsafe"):
            ChatTemplate({"default": source}, {}).render([USER])


def test_a_large_chat_has_a_renderer_of_its_own() -> None:
    """An ordinary chat does not wait for it. Its bound of time grows with its size."""
    chat, large = ChatTemplate({"default": CHATML}, {}), "x" * bounds.LARGE
    assert large in chat.render([{"role": "user", "content": large}])
    helpers = [bounds._renderer(os.getpid(), bounds.MAX_MEMORY, size) for size in (0, 1)]
    with helpers[1]._lock:
        assert chat.render([USER]) == PROMPT


def test_variables_that_are_no_json_are_refused() -> None:
    """In a Python program they can be anything."""
    with pytest.raises(InvalidRequest, match=r"TypeError.*not JSON serializable"):
        ChatTemplate({"default": CHATML}, {}).render([USER], {"when": object()})


def test_products_that_templates_write() -> None:
    source = "{{ '-' * 3 }}{{ 2 * 3 }}{{ 1.5 * 2 }}{{ 2 ** 10 }}{{ messages|length * 2 }}"
    chat = ChatTemplate({"default": source}, {})
    assert chat.render([{"role": "user", "content": "a"}]) == "---63.010242"


def test_formats_that_templates_write() -> None:
    source = (
        "{{ '%s is %05.1f%%' % ('it', 2.25) }} {{ 7 % 4 }} {{ '%(a)-3s|'|format(a=1) }} "
        "{{ '{:>4}'.format(1) }} {{ '{:>{}}'.format(1, 3) }} {{ 'x'.rjust(2) }} "
        "{{ 'x'|center(3) }} {{ 'id 1234567890 on 20260101: %s' % 1 }} {{ '%d' % 1234567890 }}"
    )
    chat = ChatTemplate({"default": source}, {})
    assert chat.render([{"role": "user", "content": "a"}]) == (
        "it is 002.2% 3 1  |    1   1  x  x  id 1234567890 on 20260101: 1 1234567890"
    )
