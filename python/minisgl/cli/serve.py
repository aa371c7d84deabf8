"""`minisgl serve`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from minisgl import plugins
from minisgl.errors import ConfigError
from minisgl.server.args import ServerArgs
from minisgl.server.flags import parse_args
from minisgl.server.launch import launch_server
from minisgl.shell import run_shell

ServeSo = Callable[[ServerArgs, float], int]
"""A row of the table `servers`: serves, and returns the exit code."""


def serve(argv: Sequence[str], began: float) -> int:
    """Serve a model: one server, with `--shell` beside a chat, or with `--dp` several replicas.
    Returns the exit code."""
    args = parse_args(argv)
    serve_so: ServeSo | None = None
    try:
        if args.shell:
            serve_so = plugins.find("servers", "shell")
        elif args.dp > 1:
            serve_so = plugins.need("servers", "replicas", "--dp")
    except ConfigError as error:
        print(f"minisgl serve: {error}", file=sys.stderr)
        return 2
    if serve_so:
        return serve_so(args, began)
    return launch_server(args, foreground=run_shell if args.shell else None, began=began)
