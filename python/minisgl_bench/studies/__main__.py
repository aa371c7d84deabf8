"""`python -m minisgl_bench.studies NAME [flags]` runs `main(argv)` of the module NAME."""

from __future__ import annotations

import sys

from minisgl_bench.run import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], "minisgl_bench.studies"))
