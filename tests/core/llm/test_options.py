"""The keywords of `LLM` are the fields of `EngineConfig`, and docs/python.md names them all."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from minisgl.builtin import model_path
from minisgl.core import SamplingParams
from minisgl.core.args import EngineConfig
from minisgl.core.options import options_of
from minisgl.errors import ConfigError
from minisgl.llm import LLM, RequestOutput
from minisgl.runtime.args import RuntimeArgs
from minisgl.server.args import ServerArgs
from minisgl.server.flags import GROUPS

PAGE = (Path(__file__).parents[3] / "docs" / "python.md").read_text(encoding="utf-8")


def test_llm_has_a_keyword_for_each_option() -> None:
    keywords = dict(inspect.signature(LLM.__init__).parameters)
    assert keywords.pop("original").kind == inspect.Parameter.VAR_KEYWORD
    assert set(keywords) - {"self", "progress"} == set(options_of(EngineConfig))
    for field in fields(EngineConfig):
        if field.name not in keywords:
            continue  # the rank's place
        # A server measures its steps anyway. For drafts alone a program's start would be longer.
        default = "off" if field.name == "drafts" else field.default
        assert keywords[field.name].default == default, field.name
        path = "str | Path | None"
        paths = {"model": path, "draft_model": path, "lora": "Mapping[str, str | Path] | None"}
        type_ = paths.get(field.name, field.type)
        assert keywords[field.name].annotation == type_, field.name
    for name in set(keywords) - {"self", "model", "progress"}:
        assert f"`{name}`" in PAGE, name


@pytest.mark.parametrize("record", [SamplingParams, RequestOutput])
def test_the_page_has_a_row_for_each_field(record: type[Any]) -> None:
    table = PAGE.partition(f"## `{record.__name__}`")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("|")]
    assert set(inspect.signature(record).parameters) == set(re.findall(r"`(\w+)`", " ".join(rows)))


@pytest.mark.parametrize("cls", [EngineConfig, RuntimeArgs, ServerArgs])
def test_every_default_keeps_its_own_rule(cls: type[EngineConfig]) -> None:
    for name, (default, option) in options_of(cls).items():
        assert default is None or option.rule.accepts(default), name
        assert option.group in GROUPS, name
        assert not option.rule.accepts(object()), name


def test_the_engine_gets_the_options_of_llm(monkeypatch: pytest.MonkeyPatch) -> None:
    """One record travels: an option needs its field and its reader."""
    given: dict[str, Any] = {
        "dtype": "float32", "page_size": 1, "cache": "naive", "max_prefill_length": 8,
        "max_running_requests": 3, "max_seq_len": 99, "device": "cpu", "attn": "torch",
        "num_pages": 5, "cuda_graph_max_bs": 7, "dummy_weight": True, "ep": True,
        "disable_pynccl": True, "quantization": "int8", "kv_cache_dtype": "fp8", "threads": 3,
    }  # fmt: skip
    started: list[EngineConfig] = []

    def start(config: EngineConfig, **_: Any) -> None:
        started.append(config)
        raise ConfigError("enough")

    monkeypatch.setattr("minisgl.llm.engines.start_engine", start)
    with pytest.raises(ConfigError, match="enough"):
        LLM(**given)
    (config,) = started
    assert {name: getattr(config, name) for name in given} == given
    assert (config.folder, config.rank, config.num_local) == (model_path(), 0, 1)


def test_a_refusal_states_the_allowed_values() -> None:
    with pytest.raises(ConfigError) as raised:
        EngineConfig(max_seq_len=1)
    assert str(raised.value) == "max_seq_len must be a whole number of at least 2, got 1"
    with pytest.raises(ConfigError, match=r"page_size must be .*, got None"):
        EngineConfig(page_size=None)
    with pytest.raises(ConfigError, match=r"got 'x+\.\.\.x+'$"):
        EngineConfig(attn="x" * 10_000)
