"""Checks the commands and snippets of README.md and docs/.

    python scripts/check_docs.py [--list] [FILE...]

A fenced block of bash or python says after its language how it is checked:

run      it is run, in an empty folder
server   it is run beside a server with the built-in model
serve    each line starts a server (or ends with 0); lines with --tp need GPUs and are parsed only
gpu, install, parse   its commands are parsed; they need GPUs, make an environment, or need files

Blocks run with the built-in model instead of any other one, and with a free port instead of 1919.
All commands of all blocks are parsed: names and flags must exist. So must commands, scripts and
links in the text (`check_prose.py`). --list prints the blocks and runs nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from unittest.mock import patch

import check_prose
from minisgl.builtin import model_path
from own_server import free_port

ROOT: Final = Path(__file__).resolve().parents[1]
KINDS: Final = ("run", "server", "serve", "gpu", "install", "parse")
TIMEOUT_S: Final = 300

_BLOCK: Final = re.compile(r"^```(bash|python)\b *([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_UNMARKED: Final = re.compile(r"^```\n((?:minisgl|python|pip|make|curl) .*)", re.MULTILINE)
_MODELS: Final = re.compile(r"\b(?:Qwen|ORG)/[\w.-]+(?::\w+)?|~/models/[\w-]+")

OTHERS: Final = ("curl", "git", "cd", "echo", "source", "scripts/gpu_check.sh", "docker", "claude")
"""Commands that are not ours, and are not parsed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced block. kind: how it is checked."""

    where: str
    language: str
    kind: str
    text: str

    @property
    def lines(self) -> list[str]:
        """The block's commands, without comments."""
        text = re.sub(r"<<'EOF'\n.*?^EOF$", "", self.text, flags=re.MULTILINE | re.DOTALL)
        lines = text.replace("\\\n", " ").splitlines()
        return [line for line in lines if shlex.split(line, comments=True)]


def documents() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(path: Path) -> list[Block]:
    """Return the blocks of a document. Raises ValueError for one that does not say its kind."""
    text = path.read_text(encoding="utf-8")
    if match := _UNMARKED.search(text):
        raise ValueError(
            f"{path.relative_to(ROOT)}: commands in a block without a language: {match[1]}"
        )
    found = []
    for match in _BLOCK.finditer(text):
        where = f"{path.relative_to(ROOT)}:{text[: match.start()].count(chr(10)) + 1}"
        if match[2] not in KINDS:
            raise ValueError(f"{where}: say how it is checked: ```{match[1]} {' | '.join(KINDS)}")
        found.append(Block(where=where, language=match[1], kind=match[2], text=match[3]))
    return found


def parse(line: str) -> None:
    """Check that a command and its flags exist. Raises ValueError."""
    words = shlex.split(line, comments=True)
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        del words[0]
    if "|" in words:
        for part in line.split(" | "):
            parse(part)
        return
    words = [word for word in words if word not in ("&", "-")]
    name, *rest = words
    name = name.removeprefix(".venv/bin/")
    if name == "minisgl":
        _parse_minisgl(rest)
    elif name == "python" and rest[:2] == ["-m", "minisgl_bench.studies"]:
        _parse_benchmark("minisgl_bench.studies", rest[2:])
    elif name == "python" and rest[:1] == ["-m"]:
        if rest[1].startswith("minisgl") and rest[1] != "minisgl.kernel.build":
            raise ValueError("say minisgl, without python -m")
        if importlib.util.find_spec(rest[1]) is None:
            raise ValueError(f"no module {rest[1]}")
    elif name == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        if unknown := {word for word in rest if "=" not in word} - set(targets):
            raise ValueError(f"no target of the Makefile: {unknown}")
    elif name == "pip":
        extras = re.findall(r"\[([\w,]+)\]", " ".join(rest))
        known = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
        if unknown := {name for extra in extras for name in extra.split(",")} - {*known, "socks"}:
            raise ValueError(f"no extra of pyproject.toml: {unknown}")
    elif name not in OTHERS and name != "python":
        raise ValueError("an unknown command")


class _Parsed(Exception):
    """The flags are fine; nothing is run."""


def _parse_minisgl(words: list[str]) -> None:
    from minisgl.server.flags import parse_args
    from minisgl_bench.selfcheck import selfcheck_parser
    from minisgl_gateway.downloads import models_parser
    from minisgl_gateway.shell.command import client_parser

    command = words[0] if words and not words[0].startswith("-") else "serve"
    if command == "bench":
        _parse_benchmark("minisgl_bench", words[1:])
    elif command == "replay":
        _parse_benchmark("minisgl_bench", words)
    elif command == "serve":
        parse_args(words[words[:1] == ["serve"] :])
    elif command in ("chat", "run"):
        client_parser(command).parse_all(words[1:])
    elif command == "route":
        from minisgl_gateway.router.serve import route_parser

        route_parser().parse_all(words[1:])
    elif command == "upgrade":
        from minisgl_gateway.upgrade.command import upgrade_parser

        asked, _, flags = " ".join(words[1:]).partition("-- ")
        upgrade_parser().parse_all(asked.split())
        parse_args(flags.split())
    elif command == "gateway":
        from minisgl_gateway.upstream.serve import gateway_parser

        gateway_parser().parse_all(words[1:])
    elif command in ("pull", "list", "rm"):
        models_parser(command).parse_args(words[1:])
    elif command == "selfcheck":
        selfcheck_parser().parse_all(words[1:])
    else:
        raise ValueError(f"no command of minisgl: {command}")


def _parse_benchmark(package: str, words: list[str]) -> None:
    if not words:
        return
    module = importlib.import_module(f"{package}.{words[0]}")
    real = argparse.ArgumentParser.parse_args

    def parsed(parser: argparse.ArgumentParser, argv: list[str]) -> None:
        real(parser, argv)
        raise _Parsed

    with patch.object(argparse.ArgumentParser, "parse_args", parsed), contextlib.suppress(_Parsed):
        module.main(words[1:])


def check(block: Block) -> None:
    """Parse all commands of a block. Raises ValueError with the line and what is wrong."""
    for line in block.lines if block.language == "bash" else ():
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):
                parse(line)
        except (ValueError, SystemExit, ImportError) as error:
            text = said.getvalue().strip() or error
            raise ValueError(f"{block.where}: {line.strip()}\n{text}") from error
    if block.language == "python":
        compile(block.text, block.where, "exec")


class Runner:
    """Runs blocks in a folder of its own, with `minisgl` and `python` of this interpreter."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._port = free_port()
        scripts = folder / "bin"
        scripts.mkdir()
        url = f"http://127.0.0.1:{self._port}"
        texts = {
            "python": f'exec {sys.executable} "$@"',
            "minisgl": f'case "$*" in "bench online"*) set -- "$@" --url {url};; esac\n'
            f'exec {sys.executable} -m minisgl "$@"',
        }
        for name, text in texts.items():
            (scripts / name).write_text(f"#!/bin/sh\n{text}\n")
            (scripts / name).chmod(0o755)
        (scripts / "activate").touch()
        (folder / ".venv").mkdir()
        (folder / ".venv" / "bin").symlink_to(scripts)
        self._env = {
            **os.environ,
            "PATH": f"{scripts}:{os.environ['PATH']}",
            "PYTHONPATH": f"{ROOT / 'python'}:{ROOT}",
            "MPLBACKEND": "Agg",
        }

    def run(self, block: Block) -> None:
        """Raises ValueError if a command fails."""
        text = self._adapted(block.text)
        if block.kind == "serve":
            for line in block.lines:
                if line.startswith("minisgl") and "--tp" not in line:
                    with self._server(self._adapted(line)):
                        pass
            return
        command = (
            ["bash", "-euc", text] if block.language == "bash" else [sys.executable, "-c", text]
        )
        with self._server("minisgl") if block.kind == "server" else contextlib.nullcontext():
            done = subprocess.run(
                command, cwd=self._folder, env=self._env, stdin=subprocess.DEVNULL,
                capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
            )  # fmt: skip
        if done.returncode:
            raise ValueError(f"{block.where} ended with {done.returncode}:\n{done.stderr[-2000:]}")

    def _adapted(self, text: str) -> str:
        return _MODELS.sub(str(model_path()), text).replace("1919", str(self._port))

    @contextlib.contextmanager
    def _server(self, line: str) -> Iterator[None]:
        """Start a server and wait until it serves; a command that ends with 0 is fine, too."""
        words = shlex.split(line, comments=True)
        with (self._folder / "log").open("w+") as log:
            server = subprocess.Popen(
                ["sh", "-c", f'exec "$@" --port {self._port}', "sh", *words],
                cwd=self._folder, env=self._env, stdout=subprocess.PIPE, stderr=log, text=True,
            )  # fmt: skip
            assert server.stdout
            try:
                is_ready = any(text.startswith("Serving ") for text in server.stdout)
                if not is_ready and server.wait(TIMEOUT_S):
                    log.seek(0)
                    raise ValueError(
                        f"{line} ended with {server.returncode}:\n{log.read()[-2000:]}"
                    )
                yield
            finally:
                if server.poll() is None:
                    server.send_signal(signal.SIGTERM)
                server.stdout.close()
                server.wait(60)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("files", nargs="*", type=Path, help="documents (default: all)")
    parser.add_argument("--list", action="store_true", help="print the blocks and run nothing")
    args = parser.parse_args()
    failed = 0
    found = []
    for path in [file.resolve() for file in args.files] or documents():
        try:
            found += blocks(path)
        except ValueError as error:
            failed += 1
            print(error, file=sys.stderr)
    for block in found:
        print(f"{block.where} ({block.language}, {block.kind})", flush=True)
        try:
            check(block)
            if block.kind in ("run", "server", "serve") and not args.list:
                with tempfile.TemporaryDirectory() as folder:
                    Runner(Path(folder)).run(block)
        except (ValueError, subprocess.TimeoutExpired) as error:
            failed += 1
            print(error, file=sys.stderr)
    for path in [] if args.files else check_prose.documents():
        for fault in check_prose.faults(path, parse):
            failed += 1
            print(fault, file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
