"""The commands of `minisgl`, each as its own process: with the built-in model, or refused."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from helpers.endless import NUM_TOKENS, endless_flags
from helpers.running_server import RunningServer
from helpers.shells import here, minisgl
from minisgl.__main__ import main
from minisgl.cli import help_text, run_command
from minisgl_gateway.shell.command import client_parser
from minisgl_gateway.shell.repl import HELP

POOL = ("--num-pages", "64")


def test_one_question_to_the_built_in_model() -> None:
    done = minisgl("run", "What is 12 + 30?", *POOL)
    assert (done.returncode, done.stdout) == (0, "12 + 30 = 42.\n"), done.stderr
    first, *start, cost = done.stderr.splitlines()
    assert first == "starting a server"
    assert any(line.startswith("the engine is ready after ") for line in start)
    assert re.fullmatch(r"\d+ tokens; first after .*", cost)
    assert "memory on CPU" in start  # the engine says it, in its own process
    assert "[server]" not in done.stderr  # the log itself has warnings only


def test_a_chat_keeps_its_exit_code() -> None:
    """With a server of its own; --shell is the older name."""
    text = "What is 2 + 2?\n" + "word " * 100
    done = minisgl("--shell", *POOL, "--max-seq-len", "64", text=text)
    assert (done.returncode, done.stdout) == (1, "2 + 2 = 4.\n"), done.stderr
    assert "tokens" in done.stderr


def test_ctrl_c_before_an_answer_has_ended(endless: Path) -> None:
    """Most often before it has begun."""
    flags = [*endless_flags(endless), "--log-level", "info"]
    flags += ["--set", "ignore_eos=true", "--set", f"max_tokens={NUM_TOKENS}"]
    run = subprocess.Popen(
        [sys.executable, "-m", "minisgl", "run", "Hello there", *flags],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert run.stderr
    assert run.stderr.readline()  # the first line of the log: the start has begun
    run.send_signal(signal.SIGINT)
    answer, rest = run.communicate(timeout=60)
    assert run.returncode == 130, (answer, rest)
    assert "Traceback" not in rest


def test_ctrl_c_where_a_dataclass_is_made(tmp_path: Path) -> None:
    """The interrupt lands inside an exec(), after which Python would end by SIGINT."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, types\n"
        "sys.modules['minisgl.cli'] = cli = types.ModuleType('minisgl.cli')\n"
        "cli.run_command = lambda argv, began: exec('raise KeyboardInterrupt')\n"
    )
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", "minisgl", "run", "Hello"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (130, "")


def test_help_fits_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in (help_text(), HELP):
        assert max(map(len, text.splitlines())) <= 80
    monkeypatch.setenv("COLUMNS", "80")
    helped = client_parser("run").format_help().splitlines()
    assert not [line for line in helped if len(line) > 80 and "{" not in line]  # no list of choices


@pytest.mark.parametrize(
    ("line", "code", "says"),
    [
        ("--help", 0, "usage: minisgl COMMAND ..."),
        ("help", 0, "usage: minisgl COMMAND ..."),
        ("help run", 0, "usage: minisgl run "),
        ("--version", 0, "minisgl "),
        ("version", 0, "minisgl "),
        ("serve --help", 0, "usage: minisgl serve "),
        ("chat --help", 0, "usage: minisgl chat "),
        ("run --help", 0, "usage: minisgl run "),
        ("bench --help", 0, "online"),
        ("bench online --help", 0, "usage: minisgl bench online"),
        ("srve", 2, "there is no command 'srve'; did you mean minisgl serve?"),
        ("org/name", 2, "there is no command 'org/name'; minisgl serve org/name serves it"),
        ("xyz", 2, "there is no command 'xyz'; the commands are serve, chat, run, upgrade, pull"),
        ("bench online --prot 1", 2, "minisgl bench online: unrecognized arguments: --prot"),
        ("bench xyz", 2, "there is no benchmark 'xyz'"),
        ("chat --dry-run", 2, "unrecognized arguments: --dry-run"),
        ("chat --node-rank 1 --nnodes 2 --dist-init-addr h:9 --tp 2", 2, "a chat needs the server"),
        ("chat m --model n", 2, "MODEL is given twice: m and --model n"),
        ("list --hlep", 2, "unrecognized arguments: --hlep; did you mean --help?"),
    ],
)
def test_commands(line: str, code: int, says: str, capfd: pytest.CaptureFixture[str]) -> None:
    try:
        returned = run_command(line.split(), time.monotonic())
    except SystemExit as end:  # argparse's
        returned = int(end.code or 0)
    out, err = capfd.readouterr()
    assert returned == code, err
    assert says in (err if code else out)
    assert (out if code else err) == "" or line.startswith("bench")


@pytest.mark.parametrize("line", ["serve ./none", "run ./none hi", "run --model ./none hi there"])
def test_a_missing_folder_is_named(line: str) -> None:
    code, answers, rest = here(*line.split())
    assert (code, answers) == (1, ""), rest
    assert "there is no folder ./none" in rest


def test_the_printed_commands_work_in_any_folder(builtin: RunningServer) -> None:
    """And with a proxy that answers nothing, which the server has, too."""
    proxies = {"http_proxy": "http://127.0.0.1:9", "ALL_PROXY": "socks5://127.0.0.1:9"}
    env = {**os.environ, **proxies}
    env.pop("VIRTUAL_ENV", None)
    builtin.wait_for("(Every endpoint)")
    curl, chat, snippet = re.findall(r"(?ms)^  (\S.*?)\n(?=\n)", builtin.output["out"])
    for command, says in ((curl, '"content"'), (chat, "3 + 4 = 7."), (snippet, "12 + 30 = 42.")):
        done = subprocess.run(
            ["bash", "-c", re.sub("(?m)^  ", "", command)],
            input="What is 3 + 4?\n" if command is chat else "",
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            cwd="/",
            env=env,
        )
        assert done.returncode == 0, (command, done.stderr)
        assert says in done.stdout


@pytest.mark.parametrize(
    ("argv", "code"),
    [([], 0), (["--port", "0"], 0), (["serve"], 0), (["run", "hi"], 130), (["selfcheck"], 130)],
)
def test_ctrl_c_within_the_imports_is_no_success(
    argv: list[str], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("minisgl.cli.run_command", interrupted)
    monkeypatch.setattr(sys, "argv", ["minisgl", *argv])
    assert main() == code
