"""Compile the C++ kernels for aarch64 and run their tests in an emulator.

With and without bfloat16 instructions. Needs Debian's g++-aarch64-linux-gnu and qemu-user. An
emulator shows that the kernels compile and compute the right numbers, but not their speed.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from helpers.emulated import build  # noqa: E402 # below the path to it

COMPILER: Final = "aarch64-linux-gnu-g++"
EMULATOR: Final = ("qemu-aarch64", "-cpu", "max", "-L", "/usr/aarch64-linux-gnu")
SETS: Final = {"neon": "-march=armv8-a", "neon-bf16": "-march=armv8.2-a+bf16"}
GEMMS: Final = ("linear.cpp", "numbers.cpp", "ops.cpp")  # the last has gates that are not fused
ALL: Final = (*GEMMS, "sampling.cpp", "finite.cpp", "moe.cpp")
CPP_FILES: Final = {True: GEMMS, False: ALL}
TESTS: Final = {
    True: (
        "zoo/kernel/test_packed.py::test_no_less_exact_than_torch",
        "zoo/kernel/test_panels.py::test_gemms",
    ),
    False: ("zoo/kernel/test_packed.py", "zoo/kernel/test_panels.py", "core/kernel/test_twins.py"),
}
"""The tests, for the short form and the long one."""
ELSEWHERE: Final = "not test_each_instruction_set and not reference and not tied_model"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--short", action="store_true", help="GEMMs only, less optimised")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS), help="instructions")
    args = parser.parse_args()
    if missing := [each for each in (COMPILER, EMULATOR[0]) if not shutil.which(each)]:
        print(f"{' and '.join(missing)} not found: apt install g++-aarch64-linux-gnu qemu-user")
        return 2
    statuses = [_try(name, args.short) for name in args.sets]
    return max(statuses)


def _try(name: str, is_short: bool) -> int:
    with tempfile.TemporaryDirectory() as folder:
        start = time.monotonic()
        flags = [SETS[name], "-O1" if is_short else "-O3"]
        program = build(COMPILER, flags, CPP_FILES[is_short], Path(folder))
        print(f"{name}: compiled in {time.monotonic() - start:.1f} s", flush=True)
        tests = [str(ROOT / "tests" / test) for test in TESTS[is_short]]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider",
             "-k", ELSEWHERE, *tests],
            cwd=ROOT,
            env={**os.environ, "MINISGL_TEST_EMULATED": shlex.join([*EMULATOR, str(program)])},
        )  # fmt: skip
        return done.returncode


if __name__ == "__main__":
    sys.exit(main())
