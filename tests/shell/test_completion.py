"""`minisgl completion`: the scripts in the shells that they are for."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from minisgl.cli import COMMANDS, completed
from minisgl.server.flags import server_parser
from minisgl_gateway.completion import SHELLS


def script(shell: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "minisgl", "completion", shell],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    return done.stdout


@pytest.fixture(scope="module")
def bash_script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "minisgl.bash"
    path.write_text(script("bash"))
    return path


def bash_completes(path: Path, folder: Path, *words: str) -> list[str]:
    """What bash offers for the last of the words."""
    line = " ".join(f"'{word}'" for word in words)
    code = (
        f"source {path}; COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _minisgl; "
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ["bash", "--norc", "-c", code],
        capture_output=True, text=True, timeout=30, check=True, cwd=folder,
    )  # fmt: skip
    return done.stdout.split()


def test_bash_completes_commands_flags_choices_and_files(bash_script: Path, tmp_path: Path) -> None:
    (tmp_path / "my-model").mkdir()

    def offered(*words: str) -> list[str]:
        return bash_completes(bash_script, tmp_path, "minisgl", *words)

    assert offered("se") == ["serve", "selfcheck"]
    assert offered("serve", "--kv-c") == ["--kv-cache-dtype"]
    assert offered("serve", "--log-level", "w") == ["warning"]
    assert offered("--log-l") == ["--log-level"]
    assert offered("serve", "my") == ["my-model"]
    assert offered("serve", "--model", "my") == ["my-model"]
    assert offered("serve", "--port", "1") == []
    assert offered("chat", "--sys") == ["--system"]
    assert offered("serve", "--sys") == []
    assert offered("bench", "onl") == ["online"]
    assert offered("completion", "z") == ["zsh"]


def test_every_command_and_flag_is_there() -> None:
    commands = completed()
    assert sorted(command.name for command in commands) == sorted(COMMANDS)
    parser = server_parser("minisgl serve", "")
    flags = {option for action in parser._actions for option in action.option_strings}
    assert {flag.name for flag in commands[0].flags} == flags - {"-h"}
    for make in SHELLS.values():
        text = make(commands)
        assert all(flag[2:] in text for flag in flags if flag != "-h")


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_take_the_script(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    path = tmp_path / f"minisgl.{shell}"
    path.write_text(script(shell))
    subprocess.run([shell, "-n", path], check=True, timeout=30)
    if shell == "fish":
        code = f"source {path}; complete -C 'minisgl serve --log-level w'"
        done = subprocess.run(
            ["fish", "-c", code],
            capture_output=True, text=True, timeout=30, check=True,
            env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
        )  # fmt: skip
        assert done.stdout.split()[:1] == ["warning"]
        assert done.stdout.count("\n") == 1


def test_an_unknown_shell_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "minisgl", "completion", "tcsh"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "'tcsh'" in done.stderr
