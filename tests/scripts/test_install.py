"""`make install`: the Python version first, broken environments, and which build of torch."""

from __future__ import annotations

import os
import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(ROOT / "scripts" / "install.py")))


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A folder for PATH: `python3` makes environments whose Python notes pip's commands in `log`.

    An environment is fake, so that nothing is downloaded.
    """
    log = tmp_path / "log"
    inner = f"""#!/bin/sh
case "$*" in
    *"config list"*) echo "$PIP_CONFIG" ;;
    *) echo "$*" >> {log} ;;
esac
"""
    outer = f"""#!/bin/sh
case "$*" in
    "-m venv"*)
        echo "$*" >> {log}
        for last; do :; done
        mkdir -p $last/bin; touch $last/pyvenv.cfg
        cp {tmp_path}/inner $last/bin/python
        ;;
    *) exec {sys.executable} "$@" ;;
esac
"""
    wrapper = tmp_path / "run.py"
    wrapper.write_text(
        f"import runpy, sys\nsys.executable = {str(tmp_path / 'python3')!r}\n"
        "sys.argv = sys.argv[1:]\nrunpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    for name, text in (("inner", inner), ("python3", outer)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return tmp_path


def run(machine: Path, *flags: str, **env: str) -> subprocess.CompletedProcess[str]:
    script = str(ROOT / "scripts" / "install.py")
    return subprocess.run(
        [sys.executable, "run.py", script, "--torch", "torch==9.9", *flags],
        capture_output=True,
        text=True,
        cwd=machine,
        check=False,
        env={**os.environ, "PATH": f"{machine}:/usr/bin:/bin", "PIP_CONFIG": "", **env},
    )


def install(machine: Path, *flags: str, **env: str) -> tuple[str, list[str]]:
    """What the script prints, and the commands that it ran."""
    (machine / "log").write_text("")
    done = run(machine, *flags, **env)
    assert done.returncode == 0, done.stderr
    return done.stdout, (machine / "log").read_text().splitlines()


def test_a_folder_that_cannot_be_written(
    script: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is said before anything is downloaded."""
    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setattr(sys, "argv", ["install.py"])
    assert script.main() == 1
    assert f"{os.getcwd()} is read-only for this user" in capsys.readouterr().err


def test_the_cpu_build_where_there_is_no_gpu(machine: Path) -> None:
    said, commands = install(machine)
    assert "installing torch==9.9 (once; the CPU build, about 0.2 GB to download)" in said
    assert commands[0] == "-m venv .venv"
    torch = next(line for line in commands if "torch==9.9" in line)
    assert torch.endswith(" --index-url https://download.pytorch.org/whl/cpu")
    assert " -q" not in torch  # it shows its progress
    _, again = install(machine)
    assert not any("venv" in line for line in again)  # a usable environment is kept


def test_kernels_are_compiled_while_torch_is_installed(machine: Path) -> None:
    """Nothing but tvm-ffi and ninja is there when it begins. A failed installation ends it."""
    inner = (machine / "inner").read_text()
    compiling = "*load_library*) echo $$ > compiling; exec sleep 60 ;;"
    torch = "*torch==9.9*) while ! [ -s compiling ]; do sleep 0.01; done; exit 3 ;;"
    (machine / "inner").write_text(inner.replace("in\n", f"in\n {compiling}\n {torch}\n", 1))
    done = run(machine)
    assert done.returncode == 3
    assert "failed; the same command continues where it stopped" in done.stdout
    assert not Path("/proc", (machine / "compiling").read_text().strip()).exists()
    first = (machine / "log").read_text().splitlines()[1]
    packages = first.split(" install --no-compile -q ")[1].split()
    assert sorted(re.split("[=<>]", package)[0] for package in packages) == [
        "apache-tvm-ffi",
        "ninja",
    ]


def test_the_kernels_need_no_torch_to_be_compiled() -> None:
    """Python runs it before any package but tvm-ffi and ninja is installed."""
    code = """
import sys
class Missing:
    def find_spec(self, name, *_):
        if name.partition(".")[0] in ("torch", "numpy", "msgspec", "transformers"):
            raise ImportError(name)
sys.meta_path.insert(0, Missing())
from minisgl.kernel.jit import load_library
load_library()
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT / "python")


def test_ctrl_c_is_one_line(machine: Path) -> None:
    (machine / "inner").write_text("#!/bin/sh\nkill -INT $PPID\nexit 1\n")
    done = subprocess.run(
        [sys.executable, "run.py", str(ROOT / "scripts" / "install.py")],
        capture_output=True,
        text=True,
        cwd=machine,
        check=False,
        env={**os.environ, "PATH": f"{machine}:/usr/bin:/bin"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert (done.returncode, done.stderr) == (130, "")
    last = done.stdout.splitlines()[-1]
    assert last == "interrupted; the same command continues where it stopped"


def test_an_index_that_cannot_be_reached(machine: Path) -> None:
    """PyPI's build is ten times as large: that is said before it is taken."""
    inner = (machine / "inner").read_text()
    (machine / "inner").write_text(inner.replace("in\n", "in\n    *--index-url*) exit 1 ;;\n", 1))
    said, commands = install(machine)
    at = said.index("pip got no torch from https://download.pytorch.org/whl/cpu\n")
    assert said[at:].splitlines()[1].startswith("taking PyPI's instead: the CUDA build, about 4.8")
    assert [line for line in commands if line.endswith("torch==9.9")]


def test_the_users_index_decides(machine: Path) -> None:
    said, commands = install(machine, PIP_CONFIG="global.index-url='https://mirror'")
    assert "from the package index that pip is set to" in said
    assert not any("download.pytorch.org" in line for line in commands)


def test_the_cuda_build_where_there_is_a_gpu(machine: Path) -> None:
    smi = machine / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H200'\n")
    smi.chmod(0o755)
    said, commands = install(machine)
    assert "the CUDA build, about 4.8 GB to download" in said
    assert not any("download.pytorch.org" in line for line in commands)
    smi.write_text("#!/bin/sh\necho 'No devices were found'\n")  # the driver without a GPU
    assert "the CPU build" in install(machine)[0]


@pytest.mark.parametrize("broken", ["#!/bin/sh\nexit 1\n", "#!/no/such/python\n", None])
def test_a_broken_environment_is_made_anew(machine: Path, broken: str | None) -> None:
    """Of an older Python, whose interpreter has gone, or without an interpreter."""
    environment = machine / ".venv"
    (environment / "bin").mkdir(parents=True)
    (environment / "pyvenv.cfg").touch()
    if broken:
        (environment / "bin" / "python").write_text(broken)
        (environment / "bin" / "python").chmod(0o755)
    said, commands = install(machine)
    assert ".venv is broken or older than Python 3.11: making it anew" in said
    assert commands[0] == "-m venv --clear .venv"


def test_a_folder_that_is_no_environment_is_not_cleared(machine: Path) -> None:
    (machine / ".venv").mkdir()
    (machine / ".venv" / "mine").touch()
    assert install(machine)[1][0] == "-m venv .venv"


def test_an_old_python_is_refused_before_anything_is_made(
    script: SimpleNamespace, tmp_path: Path
) -> None:
    old = Path(sys.base_prefix).parent / "3.10.13" / "bin" / "python3"
    said = script.too_old("python3", (3, 10, 13))
    assert said.startswith("python3 is Python 3.10, and Mini-SGLang needs 3.11 or newer")
    if not old.exists():
        pytest.skip("there is no older Python on this machine")
    done: Any = subprocess.run(
        ["make", "install", f"PYTHON={old}", f"VENV={tmp_path / 'v'}"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 2
    assert "needs 3.11 or newer; name another one, as in\n  make serve PYTHON=" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_packages_of_an_extra_are_added(machine: Path) -> None:
    whole, commands = install(machine, "--extra", "dev")
    assert commands[-2].endswith("install --no-compile -e .[dev]")
    assert commands[-1] == "-m minisgl.kernel.build"
    said, commands = install(machine, "--extra", "dev", "--added")
    for text in (whole, said):
        assert "installing the packages of [dev] (once)" in text
    assert [line.split("install ")[1] for line in commands] == ["--no-compile -e .[dev]"]


PIP = """
import pathlib, sys, time

def wait(name):
    while not pathlib.Path(sys.argv[2], name).exists():
        time.sleep(0.01)

print("Collecting torch>=2.11")
print("Collecting numpy>=1.26 (from minisgl)", flush=True)
wait("2 packages")
print("Installing collected packages: numpy, torch", flush=True)
wait("all packages")
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize("code", [0, 3])
def test_pip_is_not_silent(code: int, script: SimpleNamespace, tmp_path: Path) -> None:
    """It goes on when the script has told about it."""
    lines: list[str] = []

    def told(line: str) -> None:
        lines.append(line)
        for name in ("2 packages", "all packages"):
            if name in line:
                (tmp_path / name).touch()

    script.run_with_progress.__globals__.update(TICK_S=0.05, print=told)
    command = [sys.executable, "-c", PIP, str(code), str(tmp_path)]
    if code:
        with pytest.raises(SystemExit, match="3"):
            script.run_with_progress(command)
    else:
        script.run_with_progress(command)
    said = "".join(f"{line}\n" for line in lines)
    assert "s: 2 packages, now numpy>=1.26\n" in said
    assert "s: all packages are there, installing them\n" in said
    assert ("failed; the same command continues where it stopped" in said) == bool(code)
    assert ("Collecting torch" in said) == bool(code)
