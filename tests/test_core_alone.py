"""The core, the other four folders deleted: it imports, answers, and refuses the rest by name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from scripts.core_alone import copy_core, copy_tests, environment

IMPORTS = """
import importlib, pkgutil, sys
import minisgl

for found in pkgutil.walk_packages(minisgl.__path__, "minisgl."):
    try:
        importlib.import_module(found.name)
    except ImportError as error:  # packages of a GPU
        needs = (error.name or "").partition(".")[0]
        if needs not in ("triton", "sgl_kernel", "flashinfer", "cuda", "aiohttp"):
            raise
print(sorted(name for name in sys.modules if name.startswith("minisgl_")))
"""
ANSWERS = """
from minisgl import LLM, SamplingParams
from minisgl.errors import InvalidSampling

with LLM(device="cpu", num_pages=64, progress=False) as llm:
    print(llm.chat([{"role": "user", "content": "What is 12 + 30?"}])[0].text)
    for fields in (
        {"structured_outputs": {"regex": "a"}}, {"bad_words": ("a",)}, {"frequency_penalty": 0.5}
    ):
        try:
            llm.generate("Hello", SamplingParams(**fields))
        except InvalidSampling as error:
            print(error)
"""
REFUSES = """
from minisgl import LLM
from minisgl.errors import MinisglError
from minisgl.models import get_model_class, read_config
import json, pathlib

from minisgl.distributed import SingleRank
from minisgl.kernel.ops import Ops
from minisgl.models import build_model
import torch

folder = pathlib.Path("model")
folder.mkdir(exist_ok=True)
sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1}
more = {"intermediate_size": 64, "max_position_embeddings": 64, "num_key_value_heads": 2}
mistral = {"vocab_size": 9, **more, **sizes}
fp8 = {"quantization_config": {"quant_method": "fp8"}, **sizes}
for values in (
    {"architectures": ["Gemma3ForCausalLM"]},
    {"text_config": {}},
    {"architectures": ["LlamaForCausalLM"], **fp8},
    {"architectures": ["MistralForCausalLM"], "sliding_window": 8, **mistral},
):
    (folder / "config.json").write_text(json.dumps(values))
    try:
        config = read_config(folder)
        build_model(config, dtype=torch.float32, ops=Ops(), comm=SingleRank())
    except MinisglError as error:
        print(error)
for keyword in ({"quantization": "int8"}, {"dummy_weight": True}):
    try:
        LLM(device="cpu", num_pages=64, progress=False, **keyword)
    except MinisglError as error:
        print(error)
"""


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that has the core, and none of the other packages."""
    folder = tmp_path_factory.mktemp("alone")
    copy_core(folder)
    return folder


@pytest.fixture(scope="module")
def said(alone: Path) -> dict[str, list[str]]:
    """The lines of each of the three scripts, in one process: most of it is the import of torch."""
    scripts = {"answers": ANSWERS, "refuses": REFUSES, "imports": IMPORTS}
    done = run(alone, "-c", "".join(f"print('# {name}')\n{scripts[name]}" for name in scripts))
    assert done.returncode == 0, done.stderr
    lines: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        if line.startswith("# "):
            lines[name := line[2:]] = []
        else:
            lines[name].append(line)
    return lines


def run(alone: Path, *words: str, text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        cwd=alone, env=environment(alone), capture_output=True, text=True, timeout=150, input=text,
    )  # fmt: skip


OWN = (
    "tests/core/kvcache",
    "tests/core/scheduler",
    *(f"--ignore=tests/core/scheduler/test_{name}.py" for name in ("random_runs", "drafts")),
    "tests/core/tokenizer/test_detokenize.py",
    "tests/core/server/test_call.py",
    *("-k", "not random_operations and not all_ranks_plan_the_same"),
)
"""The tests that CI runs here as well, in seconds. `scripts/core_alone.py` runs all."""


def test_its_own_tests_pass(tmp_path: Path) -> None:
    packages = copy_tests(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", *OWN],
        cwd=tmp_path, env=environment(packages), capture_output=True, text=True, timeout=170,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:]
    assert " passed" in done.stdout


def test_every_module_imports(said: dict[str, list[str]]) -> None:
    assert said["imports"][-1:] == ["[]"]


def test_a_program_gets_answers_and_refusals_by_name(said: dict[str, list[str]]) -> None:
    answer, *refusals = said["answers"]
    assert answer == "12 + 30 = 42."
    assert len(refusals) == 3
    assert all("minisgl_zoo, which is not installed here" in line for line in refusals)


def test_checkpoints_of_the_zoo_are_refused_by_its_name(said: dict[str, list[str]]) -> None:
    *lines, quantised, dummy = said["refuses"]
    assert len(lines) == 4
    assert all("needs minisgl_zoo, which is not installed here" in line for line in lines), lines
    assert "needs minisgl_zoo, which is not installed here" in quantised
    assert "needs minisgl_bench, which is not installed here" in dummy


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--log-steps steps", "if it is a flag of minisgl, it needs minisgl_gateway, which is not"),
        ("--model a/b --model-source modelscope", "--model-source modelscope needs minisgl_zoo"),
        ("--nnodes 2", "--nnodes; if it is a flag of minisgl, it needs minisgl_gateway, which is"),
    ],
)
def test_what_needs_another_package_is_refused_by_name(alone: Path, flags: str, says: str) -> None:
    done = run(alone, "-m", "minisgl", "serve", "--port", "0", *flags.split())
    assert done.returncode not in (0, -9)
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_it_has_a_plain_chat(alone: Path) -> None:
    """It is `minisgl serve --shell`."""
    words = ["-m", "minisgl.shell", "--num-pages", "64", "--device", "cpu"]
    done = run(alone, *words, text="What is 12 + 30?\n")
    assert (done.returncode, done.stdout) == (0, "12 + 30 = 42.\n"), done.stderr
    assert "Chatting. /reset starts again" in done.stderr


def test_commands_of_other_packages_are_unknown(alone: Path) -> None:
    for command in ("bench", "chat"):
        done = run(alone, "-m", "minisgl", command)
        assert done.returncode == 2
        assert f"there is no command '{command}'" in done.stderr
        assert "needs minisgl_gateway, which is not installed here" in done.stderr
