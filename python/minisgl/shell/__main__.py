"""`python -m minisgl.shell` is `minisgl chat`, as in the original mini-sglang."""

from __future__ import annotations

import runpy
import sys

if __name__ == "__main__":
    sys.argv.insert(1, "chat")
    runpy.run_module("minisgl", run_name="__main__")
