"""`scripts/gpu_check.sh` with a Python that only records its calls."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from minisgl_bench.run import benchmarks

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu_check.sh"


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A folder with `python` and `nvidia-smi`, and with `calls` once they were called."""
    python = f"""#!/bin/sh
case "$*" in
    *device_count*) echo "${{GPUS:-1}}" ;;
    "-m "*) echo "$*" >> {tmp_path}/calls ;;
esac
case "$*" in *"${{FAILS:-nothing fails}}"*) exit 3 ;; esac
"""
    for name, text in (("python", python), ("nvidia-smi", "#!/bin/sh\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return tmp_path


def _check(machine: Path, **variables: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    environment = {
        **os.environ,
        "PATH": f"{machine}:/usr/bin:/bin",
        "PYTHON": str(machine / "python"),
        **variables,
    }
    done = subprocess.run(
        [SCRIPT, machine / "results"], env=environment, capture_output=True, text=True, timeout=60
    )
    calls = machine / "calls"
    return done, calls.read_text().splitlines() if calls.exists() else []


def test_all_parts_run_and_name_benchmarks_that_exist(machine: Path) -> None:
    done, calls = _check(machine, GPUS="2")
    assert done.returncode == 0, done.stderr
    assert calls[0].startswith("-m pytest")
    named = [call.split()[1:3] for call in calls if "bench" in call.split()[1]]
    names = [name for _, name in named]
    kernels = ["attention", "moe", "gemms"]
    one_gpu = ["batch_invariance", *["offline"] * 3, *kernels, *["serving"] * 4]
    assert names == [*one_gpu, "serving"]
    assert "-m minisgl selfcheck" in calls
    assert [call.split("-- ")[1] for call in calls if "max-stall" in call] == [
        f"--max-stall-ms {ms}" for ms in (5, 10, 20)
    ]
    assert all(name in benchmarks(package) for package, name in named)
    assert (machine / "results").is_dir()


def test_one_gpu_has_no_ranks(machine: Path) -> None:
    done, calls = _check(machine, PARTS="ranks")
    assert done.returncode == 0, done.stderr
    assert calls == []


def test_parts_run_alone_and_in_order(machine: Path) -> None:
    done, calls = _check(machine, PARTS="serving tests", REPEATS="5")
    assert done.returncode == 0, done.stderr
    assert "--repeats 5" in calls[0]
    assert "pytest" in calls[1]
    assert len(calls) == 2


def test_an_unknown_part_is_named_before_anything_runs(machine: Path) -> None:
    done, calls = _check(machine, PARTS="tests speed")
    assert done.returncode == 2
    assert "no part 'speed'; there are: tests memcheck" in done.stderr
    assert calls == []


def test_the_first_failure_ends_it(machine: Path) -> None:
    done, calls = _check(machine, FAILS="tests/gpu")
    assert done.returncode != 0
    assert len(calls) == 1
