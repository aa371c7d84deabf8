"""Conversations and chat templates that are refused, with the reason, and a template's bounds."""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers.chat_templates import CALL, CHATML, MISTRAL, USER, folder_with, template_of
from helpers.text_checkpoints import make
from minisgl.errors import CheckpointError, InvalidRequest
from minisgl.tokenizer import sandbox
from minisgl.tokenizer.template import ChatTemplate


def test_a_message_that_cannot_be_continued_is_refused() -> None:
    args = {"continue_final_message": True}
    calls = {"role": "assistant", "tool_calls": [{"type": "function", "function": CALL}]}
    for last, match in (
        (USER, "the role 'user'"),
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
        ([{"content": "x"}], "role must be a string", "messages[0].role"),
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


@pytest.mark.parametrize(
    ("source", "match"),
    [
        (
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            "more than",
        ),
        (
            "{% macro f() %}{% for i in range(9) %}{{ f() }}{% endfor %}{% endmacro %}{{ f() }}",
            "recursion",
        ),
        ("{{ 'x' * 10 ** 9 }}", "far too large"),
        ("{{ 'x' * 999999999 }}", "far too large"),
        ("{{ [1, 2] * 999999999 }}", "far too large"),
        ("{{ 10 ** 10 ** 10 }}", "far too large"),
        ("{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}", "exceeds"),
        ("{{ ('%999999999d' % 1)|length }}", "far too large"),
        ("{{ ('%(a(b))999999999d' % {'a(b)': 1})|length }}", "far too large"),
        ("{{ ('%.999999999f' % 1.5)|length }}", "far too large"),
        ("{{ ('%*d' % (999999999, 1))|length }}", "far too large"),
        ("{{ ('%999999s%999999s' % (1, 1))|length }}", "far too large"),
        ("{{ '%999999999s'|format(1)|length }}", "far too large"),
        ("{{ '%999999999s'|safe|format(1)|length }}", "far too large"),
        ("{{ '{:>999999999}'.format(1)|length }}", "far too large"),
        ("{{ '{:>{}}'.format(1, 999999999)|length }}", "far too large"),
        ("{{ '{a:>{b}}'.format_map({'a': 1, 'b': '999999999'})|length }}", "far too large"),
        ("{{ 'x'.ljust(999999999)|length }}", "far too large"),
        ("{{ 'x'|center(width=999999999)|length }}", "far too large"),
        ("{{ 'x'|indent(999999999, true)|length }}", "far too large"),
        ("{{ [1]|slice(999999999)|list|length }}", "far too large"),
        ("{{ lipsum(n=999999999)|length }}", "undefined"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ messages.__class__() }}", "unsafe"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ cycler.__init__.__globals__ }}", "unsafe"),
    ],
)
def test_a_template_has_bounds_of_time_and_size(
    source: str, match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "MAX_TEMPLATE_S", 5.0 if match == "recursion" else 0.2)
    monkeypatch.setattr(sandbox, "MAX_PROMPT", 10**6)
    chat = ChatTemplate({"default": source}, {})
    with pytest.raises(InvalidRequest, match=match):
        chat.render([{"role": "user", "content": "a"}])


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not bound memory")
@pytest.mark.parametrize(
    "body",
    ["{% set ns.s = ns.s ~ ns.s %}", "{% set ns.s %}{{ ns.s }}{{ ns.s }}{% endset %}",
     "{% set ns.s = [ns.s, ns.s]|join %}", "{% set ns.s = ns.s.replace('a', ns.s[:99]) %}"],
)  # fmt: skip
def test_a_text_that_a_loop_doubles_ends_at_a_bound(
    body: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "MAX_MEMORY", 2**28)
    source = "{% set ns = namespace(s='aa') %}{% for i in range(60) %}" + body + "{% endfor %}"
    chat = ChatTemplate({"default": source}, {})
    chat.is_alone = True
    before = resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises(InvalidRequest, match="more than 268,435,456 bytes"):
        chat.render([{"role": "user", "content": "a"}])
    assert resource.getrlimit(resource.RLIMIT_AS) == before


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
