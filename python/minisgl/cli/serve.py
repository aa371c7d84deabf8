"""`minisgl serve`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from minisgl import plugins
from minisgl.errors import ConfigError
from minisgl.server.args import ServerArgs
from minisgl.server.flags import parse_args
from minisgl.server.launch import launch_server


def serve(argv: Sequence[str], began: float) -> int:
    """Serve a model: one server, with `--shell` beside a chat, or with `--dp` several replicas.
    Returns the exit code."""
    args = parse_args(argv)
    if not args.shell and args.dp == 1:
        return launch_server(args, began=began)
    name, flag = ("shell", "--shell") if args.shell else ("replicas", "--dp")
    try:
        serve_so: Callable[[ServerArgs, float], int] = plugins.need("servers", name, flag)
    except ConfigError as error:
        print(f"minisgl serve: {error}", file=sys.stderr)
        return 2
    return serve_so(args, began)
