"""``python -m minisgl``: the server, or with --shell the server and a chat in this terminal.

Spawned workers import this module again, so it imports nothing until it is called.
"""

from __future__ import annotations

import sys


def main() -> int:
    import time

    began = time.monotonic()
    from minisgl.server.flags import parse_args
    from minisgl.server.launch import launch_server
    from minisgl.utils.files import open_closed_streams

    open_closed_streams()
    args = parse_args()
    if not args.shell:
        return launch_server(args, began=began)

    from minisgl.shell import run_shell

    return launch_server(args, foreground=run_shell, began=began)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # within the imports: later ones are the server's to translate
        sys.exit(0)
