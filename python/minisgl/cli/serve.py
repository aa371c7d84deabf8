"""`minisgl serve`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from minisgl import plugins
from minisgl.server.args import ServerArgs
from minisgl.server.flags import parse_args
from minisgl.server.launch import launch_server
from minisgl.shell import run_shell

ServeSo = Callable[[ServerArgs, float], int]
"""A row of the table `servers`: serves, and returns the exit code."""


def serve(argv: Sequence[str], began: float) -> int:
    """Serve a model: one server, with `--shell` beside a chat, or as a row of `servers` does.
    Returns the exit code."""
    args = parse_args(argv)
    is_own = args.served_by == "own"
    serve_so: ServeSo | None = None if is_own else plugins.find("servers", args.served_by)
    if serve_so:
        return serve_so(args, began)
    return launch_server(args, foreground=run_shell if args.shell else None, began=began)
