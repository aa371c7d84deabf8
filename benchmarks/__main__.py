"""`python -m benchmarks NAME [flags]` runs `main(argv)` of the module NAME."""

from __future__ import annotations

import sys

from minisgl.benchmark.__main__ import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], "benchmarks"))
