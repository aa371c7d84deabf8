"""Standard streams that a process was started without."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import os, subprocess, sys
from minisgl.utils.files import open_closed_streams
open_closed_streams()
assert sys.stdin.read() == ""
print("nobody reads this", file=sys.stderr, flush=True)
child = "import sys; print(sys.stdin is not None and sys.stderr is not None)"
report = os.dup(1)
os.write(report, subprocess.run([sys.executable, "-c", child], stdout=subprocess.PIPE).stdout)
"""


def _close_stdin_and_stderr() -> None:
    os.close(0)
    os.close(2)


def test_closed_streams_go_to_dev_null_here_and_in_children(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        preexec_fn=_close_stdin_and_stderr,
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "True\n")
