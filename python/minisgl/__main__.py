"""`minisgl` and `python -m minisgl`: the commands are in `minisgl.cli`.

Spawned workers import this module again, so it imports nothing until it is called.
"""

from __future__ import annotations

import sys

SERVERS = ("serve", "route", "gateway")
"""The commands that Ctrl-C ends as it should; it interrupts the others."""


def main() -> int:
    """Run the command of `sys.argv`. Returns the exit code."""
    import time

    began = time.monotonic()
    try:
        from minisgl.cli import run_command
        from minisgl.utils.files import open_closed_streams

        open_closed_streams()
        return run_command(sys.argv[1:], began)
    except KeyboardInterrupt:  # while modules are imported; commands handle later ones themselves
        command = (*sys.argv[1:2], "serve")[0]
        return 0 if command in SERVERS or command.startswith("-") else 130
    finally:
        # A KeyboardInterrupt inside exec(), as where a dataclass is made, sets a flag in Python:
        # with `-m`, it ends by SIGINT whatever the exit code. Another exec() clears the flag.
        exec("")


if __name__ == "__main__":
    sys.exit(main())
