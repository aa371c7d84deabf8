"""`minisgl serve`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from minisgl import plugins
from minisgl.cli.clients import chat_client
from minisgl.errors import ConfigError
from minisgl.server.args import ServerArgs
from minisgl.server.flags import parse_args
from minisgl.server.launch import launch_server


def serve(argv: Sequence[str], began: float) -> int:
    """Serve a model, with `--shell` beside a chat. Returns the exit code."""
    args = parse_args(argv)
    if args.shell:
        return launch_server(args, foreground=chat_client({}), began=began)
    if args.dp > 1:
        try:
            serve_replicas: Callable[[ServerArgs], int] = plugins.need(
                "servers", "replicas", "--dp"
            )
        except ConfigError as error:
            print(f"minisgl serve: {error}", file=sys.stderr)
            return 2
        return serve_replicas(args)
    return launch_server(args, began=began)
