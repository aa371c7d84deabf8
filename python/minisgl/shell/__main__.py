"""`python -m minisgl.shell` is `minisgl chat`, as in the original mini-sglang.

Without `minisgl_gateway` it is `minisgl serve --shell`.
"""

from __future__ import annotations

import runpy
import sys

from minisgl import plugins

if __name__ == "__main__":
    sys.argv[1:1] = ["chat"] if plugins.row_of("commands", "chat") else ["serve", "--shell"]
    runpy.run_module("minisgl", run_name="__main__")
