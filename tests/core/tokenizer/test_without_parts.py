"""Without the package of answers' tables: plain chats work, the rest is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from helpers.text_checkpoints import make
from minisgl import manifest, plugins
from minisgl.builtin import model_path
from minisgl.core import SamplingParams
from minisgl.core.options import row_of
from minisgl.errors import CheckpointError, RequestError
from minisgl.llm.prompts import chat_records
from minisgl.message import ChatPrompt
from minisgl.runtime.scheduling import create_grammars
from minisgl.tokenizer import PromptEncoder, load_tokenizer
from minisgl.tokenizer.defaults import FOR_OTHERS, sampling_defaults

HI = [{"role": "user", "content": "Hi"}]
CALL = {"id": "a", "type": "function", "function": {"name": "now", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}


@pytest.fixture
def encoder(monkeypatch: pytest.MonkeyPatch) -> PromptEncoder:
    monkeypatch.setattr(plugins, "_installed", tuple(manifest.ROWS))
    folder = model_path()
    return PromptEncoder(tokenizer=load_tokenizer(folder), folder=folder)


def test_a_plain_chat_has_the_ids_of_its_template(encoder: PromptEncoder) -> None:
    args = {"enable_thinking": False}
    split = encoder.encode(ChatPrompt(messages=HI, is_split=True, template_args=args))
    assert split == encoder.encode(ChatPrompt(messages=HI, template_args=args))
    assert split.plan is None
    assert encoder.request(split, SamplingParams(), "").form == ""


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("tools", {"tools": [TOOL]}),
        ("tools", {"tool_choice": "required"}),
        ("messages", {"messages": [*HI, {"role": "assistant", "tool_calls": [CALL]}]}),
        ("thinking_budget", {"thinking_budget": 3}),
        ("reasoning_effort", {"template_args": {"reasoning_effort": "low"}}),
    ],
)
def test_parts_are_refused(encoder: PromptEncoder, param: str, fields: dict[str, Any]) -> None:
    prompt = ChatPrompt(**{"messages": HI, "is_split": True} | fields)
    with pytest.raises(RequestError, match="needs minisgl_zoo, which is not") as refused:
        encoder.encode(prompt)
    assert refused.value.param == param


@pytest.mark.usefixtures("encoder")
def test_a_form_is_refused() -> None:
    with pytest.raises(RequestError, match="structured_outputs needs minisgl_zoo") as refused:
        SamplingParams(structured_outputs={"regex": "a"})
    assert refused.value.param == "structured_outputs"


def test_tools_of_a_program_are_refused(encoder: PromptEncoder) -> None:
    with pytest.raises(RequestError, match="tools needs minisgl_zoo, which is not") as refused:
        chat_records(HI, {}, [TOOL], "auto")
    assert refused.value.param == "tools"


def test_a_model_without_a_recommendation_has_our_own(
    encoder: PromptEncoder, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"_name_or_path": "smollm2"}')
    assert sampling_defaults(tmp_path) == SamplingParams(**FOR_OTHERS)


@pytest.mark.parametrize("kind", ["sentencepiece", "metaspace"])
def test_the_library_decodes_pieces(encoder: PromptEncoder, tmp_path: Path, kind: str) -> None:
    tokenizer = load_tokenizer(make(tmp_path, kind))
    ids = tokenizer.encode(" Hello 🦜  world\n")
    stream = tokenizer.stream()
    assert "".join([*map(stream.feed, ids), stream.flush()]) == tokenizer.decode(ids)


def test_a_rank_starts_without_grammars(encoder: PromptEncoder) -> None:
    assert create_grammars(lambda: encoder.tokenizer, 8, (), lambda message: None) is None


def test_a_format_and_another_tokenizer_name_the_package(
    encoder: PromptEncoder, tmp_path: Path
) -> None:
    assert (
        row_of("chat_formats").words
        == "left out: it needs minisgl_zoo, which is not installed here"
    )
    with pytest.raises(CheckpointError, match="converting another format needs minisgl_zoo"):
        load_tokenizer(tmp_path)
