"""What was written for the original mini-sglang runs unchanged."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from minisgl.builtin import model_path
from minisgl.core.aliases import FLAGS, KEYWORDS
from minisgl.core.args import EngineConfig
from minisgl.core.options import flag_of, options_of
from minisgl.errors import InvalidSampling, RequestError
from minisgl.llm import LLM, SamplingParams
from minisgl.server.flags import parse_args

PAGE = (Path(__file__).parents[3] / "docs" / "flags.md").read_text(encoding="utf-8")
VALUES = {"model": "m", "cache": "naive", "shell": ""}


@pytest.mark.parametrize("flag", FLAGS)
def test_a_flag_sets_the_same_option(flag: str) -> None:
    value = VALUES.get(FLAGS[flag], "7")
    ours = parse_args(shlex.split(f"{flag_of(FLAGS[flag])} {value}"))
    assert parse_args(shlex.split(f"{flag} {value}")) == ours != parse_args([])
    assert f"| `{flag}` | `{flag_of(FLAGS[flag])}` |" in PAGE


@pytest.mark.needs("minisgl_zoo")
def test_a_wrong_value_names_the_flag_that_was_given(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse_args(["--max-seq-len-override", "many"])
    assert "argument --max-seq-len-override: must be" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        parse_args(["--moe-backend", "fused"])
    assert "unrecognized arguments: --moe-backend; experts have one" in capsys.readouterr().err


def test_keywords_are_options() -> None:
    assert set(KEYWORDS.values()) <= set(options_of(EngineConfig))
    assert not set(KEYWORDS) & set(options_of(EngineConfig))
    named = set(re.findall(r"`(\w+)`", PAGE.partition("\n`LLM` takes ")[2].partition(";")[0]))
    assert named == set(KEYWORDS)
    with pytest.raises(TypeError, match="LLM has no argument max_seq_length"):
        LLM(max_seq_length=8)


def test_a_program_for_the_original() -> None:
    llm = LLM(
        model_path=str(model_path()), max_seq_len_override=128, max_extend_tokens=64,
        cuda_graph_max_bs=4, device="cpu", num_pages=64, progress=False,
    )  # fmt: skip
    params = SamplingParams(temperature=0.6, top_k=-1, ignore_eos=True, max_tokens=5, seed=1)
    with llm:
        outputs = llm.generate([[5, 6, 7], [8, 9]], [params, params])
        again = llm.generate([5, 6, 7], params)
        with pytest.raises(RequestError, match="128"):
            llm.generate([5] * 200, params)
    assert [len(output["token_ids"]) for output in outputs] == [5, 5]
    assert again[0]["text"] == outputs[0]["text"] == outputs[0].text
    with pytest.raises(KeyError, match="'texts'; the fields are text, token_ids, "):
        outputs[0]["texts"]


def test_a_top_k_of_minus_1_is_none() -> None:
    assert SamplingParams(top_k=-1) == SamplingParams()
    with pytest.raises(InvalidSampling, match="or 0 or -1 for no limit, got -2"):
        SamplingParams(top_k=-2)


@pytest.mark.needs("minisgl_gateway")
def test_the_shell_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "minisgl.shell", "--help"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.startswith("usage: minisgl chat ")


@pytest.mark.needs("minisgl_gateway")
def test_settings_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from minisgl_gateway.shell.command import chat_client

    monkeypatch.setenv("MINISGL_SHELL_TOP_K", "3")
    monkeypatch.setenv("MINISGL_SHELL_TEMPERATURE", "0.5")
    seen = {}
    monkeypatch.setattr(
        "minisgl_gateway.shell.command.run_shell",
        lambda begin: seen.update(begin().settings.as_fields()),
    )
    chat_client({"set": [("temperature", "0.25")]})("http://x")
    assert seen == {"top_k": 3, "temperature": 0.25}
