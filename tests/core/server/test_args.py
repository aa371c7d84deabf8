"""The flags of `minisgl serve`. A wrong value ends the command with a sentence and exit code 2."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import pickle
import re
import shlex
import subprocess
import sys

import pytest

from minisgl.attention import registry
from minisgl.core.options import flag_of, options_of
from minisgl.server.args import ServerArgs, server_options
from minisgl.server.flags import Parser, parse_args


def test_defaults_and_every_flag() -> None:
    assert parse_args([]) == server_options()()
    args = parse_args(
        shlex.split(
            "--model m --model-source modelscope --served-model-name n --dtype float32 --host ::1 "
            "--port 0 --num-tokenizer 2 --page-size 1 --cache naive --max-prefill-length 8 "
            "--max-stall-ms 2.5 --max-running-requests 3 --max-queued-requests 4 --max-seq-len 99 "
            "--device cpu --hang-timeout 3 --quantization int8 --drain-timeout 9 "
            "--restart --max-restarts 8 --max-queue-wait 7 --api-key k --api-key-file f "
            "--cors-origin https://a.b:1,* --allowed-host a.b,* --ssl-certfile f --ssl-keyfile f "
            "--attn torch --num-pages 5 --threads 3 --cuda-graph-max-bs 7 --dummy-weight --dry-run "
            "--log-level debug --log-format json --log-requests --log-steps f --profile-dir d "
            "--otlp-endpoint http://u --tp 2 --ep --disable-pynccl --record f "
            "--tool-call-parser hermes --kv-cache-dtype int8 --xray-text "
            "--max-tokens-policy clamp --drafts off --lora a=x --lora b=y --max-loras 3 "
            "--max-lora-rank 9"
        )
    )
    # They exclude others of these; the last three are none.
    same = {"shell", "memory_ratio", "draft_model", "offline", "rank", "store"}
    for field in dataclasses.fields(ServerArgs):
        assert (getattr(args, field.name) == field.default) == (field.name in same), field.name
    assert parse_args(["--memory-ratio", "0.25"]).memory_ratio == 0.25
    assert parse_args(["--shell"]).shell
    assert parse_args(["--draft-model", "a/b"]).draft_names == "auto,draft"
    assert args.loras == {"a": "x", "b": "y"}
    assert (args.num_slots, parse_args(["--max-loras", "3"]).num_slots) == (3, 0)
    assert pickle.loads(pickle.dumps(args)) == args


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--port 70000", "--port: must be a whole number from 0 to 65535, got '70000'"),
        ("--port x", "from 0 to 65535"),
        ("--page-size 0", "from 1 to 1024"),
        ("--num-tokenizer -1", "from 0 to 64"),
        ("--max-seq-len 1", "at least 2"),
        ("--memory-ratio 1.1", "above 0 and at most 1"),
        ("--memory-ratio nan", "above 0 and at most 1"),
        ("--attn fa,cpu", "or PREFILL,DECODE with triton, fa, fa2 or fi, and triton, fa or trtllm"),
        ("--attn fi", "got 'fi'"),
        ("--attn trtllm,triton", "got 'trtllm,triton'"),
        ("--attn fa,", "got 'fa,'"),
        ("--dtype int4", "invalid choice: 'int4'"),
        ("--served-model-name ", "printable name"),
        ("--cors-origin example.org", "origins such as"),
        ("--allowed-host https://example.org", "names of hosts without ports"),
        ("--allowed-host example.org:80", "such as chat.example.org, with commas between them"),
        ("--allowed-host ,", "names of hosts"),
        ("--num-pages 5 --memory-ratio 0.5", "give one of them"),
        ("--max-stall-ms 0", "must be a number above 0, got '0'"),
        ("--max-stall-ms nan", "must be a number above 0, got 'nan'"),
        ("--max-stall-ms inf", "must be a number above 0, got 'inf'"),
        ("--dry-run --shell", "serves nothing"),
        ("--ssl-keyfile k", "needs --ssl-certfile"),
        ("--shell --api-key k", "takes no keys"),
        ("--record no/such/f", "--record: must be a file in a folder that exists, got 'no/such/f'"),
        ("--log-steps no/such/f", "--log-steps: must be a file in a folder that exists"),
        ("--mod x", "unrecognized arguments: --mod"),
        ("--max-seqlen 5", "unrecognized arguments: --max-seqlen; did you mean --max-seq-len?"),
        ("--tensor-parallel-size 2", "--tensor-parallel-size; that is --tp here\n"),
        ("m --max-model-len=9", "--max-model-len; that is --max-seq-len here\n"),
        ("-c 4096", "unrecognized arguments: -c; that is --max-seq-len here\n"),
        (
            "-tp 2 --enforce-eager",
            "-tp; that is --tp here; unrecognized arguments: --enforce-eager",
        ),
        ("--gpu-memory-utilization 0.8", "that is --memory-ratio here"),
        ("--mem-fraction-static 0.8", "that is --memory-ratio here"),
        ("--trust-remote-code", "code of a checkpoint is never run here: leave it out"),
        ("--temperature 0", "sampling settings are fields of a request"),
        ("a --model b", "MODEL is given twice: a and --model b"),
        ("a b c", "unrecognized arguments: b c; MODEL is a (of a GGUF file in parts, name one)"),
        ("--tensor-parallel 2", "unrecognized arguments: --tensor-parallel"),
    ],
)
def test_wrong_flags_are_refused_with_a_sentence(
    line: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        parse_args(line.split(" "))
    assert exit_.value.code == 2
    said = capsys.readouterr().err
    assert says in said
    assert "Traceback" not in said
    assert said.count("\n") == 2


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("", "the following arguments are required: MODEL, --replica"),
        ("m", "the following arguments are required: --replica"),
        ("-h", "usage: minisgl pull [-h] --replica REPLICA MODEL"),
        ("--hlep", "unrecognized arguments: --hlep; did you mean --help?"),
        ("--replica 1 m --hlep", "unrecognized arguments: --hlep; did you mean --help?"),
    ],
)
def test_an_unknown_flag_is_named_before_a_missing_one(
    line: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = Parser("minisgl pull")
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--replica", action="append", required=True)
    with pytest.raises(SystemExit):
        parser.parse_all(line.split())
    said = capsys.readouterr()
    assert (said.out + said.err).startswith(f"{'' if line == '-h' else 'minisgl pull: '}{says}")


def test_any_number_of_words_may_be_none() -> None:
    """argparse calls them required. With `minisgl run` a pipe may ask."""
    parser = Parser("minisgl run", argument_default=argparse.SUPPRESS)
    parser.add_argument("words", nargs="*")
    assert parser.parse_all([]).get("words", []) == []
    assert parser.parse_all(["a", "b"]) == {"words": ["a", "b"]}


def test_help_has_each_flags_meaning_and_default(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    actions: list[argparse.Action] = []
    add = argparse._ActionsContainer._add_action

    def keep(self: argparse._ActionsContainer, action: argparse.Action) -> argparse.Action:
        actions.append(action)
        return add(self, action)

    monkeypatch.setattr(argparse._ActionsContainer, "_add_action", keep)
    with pytest.raises(SystemExit):
        parse_args(["--help"])
    assert "Serve a language model" in capsys.readouterr().out
    shown = [a for a in {id(a): a for a in actions}.values() if a.help != argparse.SUPPRESS]
    flags = [a for a in shown if a.option_strings]
    values = [a for a in flags if a.nargs != 0]
    assert len(values) > 40
    for action in values:
        help_ = action.help or ""
        assert "(default: " in help_, action.option_strings
        default = dataclasses.asdict(server_options()())[action.dest]
        if default is not None:
            assert re.search(rf"\(default: {re.escape(str(default))}\)", help_), action.dest


def test_the_model_is_an_argument_or_a_flag() -> None:
    for line in ("m --port 0", "--port 0 m", "--model m --port 0", "--dry-run m --port 0"):
        assert parse_args(line.split()).model == "m"


@pytest.mark.needs("minisgl_gateway")
def test_flags_of_other_engines_map_to_flags_that_exist() -> None:
    from minisgl_gateway import other_engines

    ours = {flag_of(name) for name in options_of(server_options())} | {"minisgl"}
    assert {line.split()[0] for line in other_engines.OURS} <= ours
    tables = (other_engines.OURS, other_engines.NONE)
    theirs = [flag for table in tables for flags in table.values() for flag in flags]
    assert len(theirs) == len(set(theirs))
    assert not ours & set(theirs)


@pytest.mark.parametrize(
    ("flag", "says"),
    [
        ("--max-model-len", "that is --max-seq-len here"),  # vLLM
        ("--mem-fraction-static", "that is --memory-ratio here"),  # SGLang
        ("-ngl", "that is --device here"),  # llama-server
        ("--max-batch-prefill-tokens", "that is --max-prefill-length here"),  # TGI
        ("--json-output", "that is --log-format json here"),
        ("--speculative-config", "--drafts takes auto, off, or some of"),
        ("--model-draft", "that is --draft-model here"),
        ("--enable-lora", "--lora NAME=PATH, or --lora-folder DIR, is enough here"),
        ("--lora-modules", "that is --lora here"),
    ],
)
def test_a_flag_of_each_engine_is_answered(
    flag: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_args([flag, "1"])
    assert says in capsys.readouterr().err


def test_each_attention_backend_can_be_chosen() -> None:
    """The command line has its own list of names, because the backends' list imports torch."""
    for name in (*registry.ATTENTION_BACKENDS, *registry.CUDA_BACKENDS):
        assert parse_args(["--attn", name]).attn == name
    firsts = (*registry.CUDA_BACKENDS, *registry.PREFILL_BACKENDS)
    seconds = (*registry.CUDA_BACKENDS, *registry.DECODE_BACKENDS)
    for pair in itertools.product(firsts, seconds):
        assert parse_args(["--attn", ",".join(pair)]).attn == ",".join(pair)


def test_neither_the_api_process_nor_the_shell_imports_torch() -> None:
    """Nor do the types of observers, which `minisgl replay` needs."""
    check = (
        "import sys, minisgl.cli, minisgl.server.launch, minisgl.server.api_server, "
        "minisgl.server.web.http, minisgl.shell, minisgl.runtime.observers; "
        "print(sorted({'torch', 'transformers', 'huggingface_hub'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
