"""`python -m minisgl.benchmark NAME`: the same as `minisgl bench NAME`."""

from __future__ import annotations

import sys
import time

from minisgl.cli import run_command

if __name__ == "__main__":
    sys.exit(run_command(["bench", *sys.argv[1:]], time.monotonic()))
