"""``python -m minisgl.kernel.build`` compiles the C++ kernels ahead of the first start."""

from __future__ import annotations

import sys

from minisgl.kernel.jit import JitUnavailable, load_library
from minisgl.utils.logger import setup_logging


def main() -> int:
    setup_logging("build")
    try:
        load_library()
    except JitUnavailable as error:
        print(
            f"minisgl: the C++ kernels are not available: {error}\n"
            "The server runs without them, on plain torch and slower.",
            file=sys.stderr,
        )
        return 1
    print("minisgl: the C++ kernels are ready.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
