"""Arguments of `LLM` and `SamplingParams` that are refused before a model runs."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from minisgl.builtin import model_path
from minisgl.errors import ConfigError, InvalidSampling
from minisgl.llm import LLM, SamplingParams


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "1"),
        ("top_p", None),
        ("top_k", 2.5),
        ("top_k", True),
        ("seed", "1"),
        ("max_tokens", 1.5),
        ("stop", "abc"),  # three stop strings, if it were taken for a sequence
        ("stop", (1,)),
        ("stop_token_ids", 5),
        ("stop_token_ids", ("a",)),
        ("stop_token_ids", (True,)),
        ("ignore_eos", "no"),
        ("skip_special_tokens", 0),
    ],
)
def test_params_of_a_wrong_type_are_refused(name: str, value: object) -> None:
    with pytest.raises(InvalidSampling, match=f"{name} must be"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        pytest.param("temperature", 10**400, id="temperature"),
        ("top_k", 2**31),
        ("max_tokens", 2**31),
        ("seed", 2**64),
        ("stop", ("\ud800",)),
    ],
)
def test_params_beyond_the_bounds_of_a_record_are_refused(name: str, value: object) -> None:
    with pytest.raises(InvalidSampling) as refused:
        SamplingParams(**{name: value})
    assert refused.value.param == name


def test_unknown_model() -> None:
    for model in ("/no/such/folder", "\u00e9"):
        with pytest.raises(ConfigError, match=f"there is no folder {model}, and it is no model id"):
            LLM(model, progress=False)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"model": 5}, "model must be a folder or a model id, got 5"),
        ({"tp": "2"}, "tp must be a whole number from 1 to 1024, got '2'"),
        ({"num_pages": 1.5}, "num_pages must be a whole number"),
        ({"num_pages": True}, "num_pages must be a whole number"),
        ({"page_size": 0}, "page_size must be a whole number from 1 to 1024, got 0"),
        ({"page_size": 2048}, "page_size must be a whole number from 1 to 1024, got 2048"),
        ({"max_seq_len": 1}, "max_seq_len must be a whole number of at least 2, got 1"),
        ({"max_running_requests": 0}, "max_running_requests must be"),
        ({"max_prefill_length": "8"}, "max_prefill_length must be"),
        ({"cuda_graph_max_bs": -1}, "cuda_graph_max_bs must be a whole number of at least 0"),
        ({"memory_ratio": "0.5"}, "memory_ratio must be a number above 0"),
        ({"memory_ratio": True}, "memory_ratio must be a number above 0 and at most 1, got True"),
        ({"num_pages": 64, "max_running_requests": 10**9}, "lower .*or max_running_requests"),
        ({"memory_ratio": 0.5, "num_pages": 64}, "num_pages and memory_ratio both size"),
        ({"dummy_weight": "no"}, "dummy_weight must be True or False, got 'no'"),
        ({"lora": ["a"]}, "lora must be NAME=PATH_OR_ID"),
        ({"ep": 1}, "ep must be True or False, got 1"),
        ({"disable_pynccl": None}, "disable_pynccl must be True or False, got None"),
        ({"progress": "off"}, "progress must be True or False, got 'off'"),
        ({"attn": 5}, "attn must be auto, torch, cpu, triton or fa, or PREFILL,DECODE .*, got 5"),
        ({"attn": "fa"}, "'fa' is for a GPU.*; on a CPU choose one of auto, cpu, torch"),
        ({"attn": "triton,trtllm"}, "'triton,trtllm' is for a GPU"),
    ],
)
def test_options_of_a_wrong_kind_are_refused(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        LLM(**({"model": str(model_path()), "progress": False} | wrong))


@pytest.mark.parametrize("option", ["cache", "dtype", "device", "attn", "model_source"])
def test_unknown_choices_are_refused(option: str) -> None:
    before = threading.active_count()
    wrong: dict[str, Any] = {option: "none such"}
    with pytest.raises(ConfigError, match="'none such'"):
        LLM(progress=False, num_pages=64, **wrong)
    assert threading.active_count() == before
