"""A base model, which has no chat template, in `minisgl chat` and `minisgl run`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.scripted_server import ScriptedServer
from helpers.shells import ask, chat
from minisgl.builtin import model_path
from minisgl.message import TextPrompt


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    folder = tmp_path_factory.mktemp("base")
    (folder / "config.json").write_text((model_path() / "config.json").read_text())
    with ScriptedServer(folder=folder) as server:
        yield server


def test_run_completes_the_text(base: ScriptedServer) -> None:
    code, text, rest = ask(base.url, "one two")
    assert (code, text) == (0, "one two .\n")
    assert rest.startswith("scripted is a base model: it completes the text.\n2 tokens;")
    message = base.received[-1]
    assert isinstance(message.prompt, TextPrompt)
    assert (message.prompt.text, message.sampling.max_tokens) == ("one two", 200)
    assert ask(base.url, "one two", "--set", "max_tokens=1")[1] == "one \n"


def test_run_refuses_a_system_prompt(base: ScriptedServer) -> None:
    code, text, rest = ask(base.url, "one", "--system", "Be brief.")
    assert (code, text) == (1, "")
    assert "a base model, which has no system prompt: write its text before" in rest


def test_chat_completes_each_text_alone(base: ScriptedServer, tmp_path: Path) -> None:
    code, text, rest = chat(base.url, f"one\ntwo\n/retry\n/save {tmp_path / 'c.json'}\n")
    assert (code, text) == (1, "one .\ntwo .\ntwo .\n")  # nothing can be saved
    assert rest.startswith("scripted is a base model: it completes single texts. ")
    assert "there is no conversation to save" in rest
    prompts = [message.prompt for message in base.received[-3:]]
    assert [prompt.text for prompt in prompts if isinstance(prompt, TextPrompt)] == [
        "one",
        "two",
        "two",
    ]


def test_a_server_without_the_field_chats(server: ScriptedServer) -> None:
    """Such as a router of other servers: only a clear `false` is a base model."""
    code, text, rest = ask(server.url, json.dumps("one"))
    assert (code, text) == (0, '"one" .\n')
    assert "base model" not in rest
