"""``python -m minisgl.shell --url URL``: chat with a server that is running."""

from __future__ import annotations

import argparse
import sys

from minisgl.shell.repl import run_shell
from minisgl.utils.files import open_closed_streams


def main() -> int:
    open_closed_streams()
    parser = argparse.ArgumentParser(
        prog="python -m minisgl.shell", description="Chat with a running server."
    )
    parser.add_argument(
        "--url",
        default="http://127.0.0.1:1919",
        help="where the server is (default: %(default)s)",
    )
    args = parser.parse_args()
    try:
        return run_shell(args.url)
    except KeyboardInterrupt:  # while nothing is asked, of a pipe or a server that does not answer
        return 130


if __name__ == "__main__":
    sys.exit(main())
