"""`python -m minisgl_bench NAME`: the same as `minisgl bench NAME`."""

from __future__ import annotations

import sys

from minisgl_bench.run import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
