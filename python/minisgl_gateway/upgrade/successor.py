"""Starts a successor, and is its main module.

    python -m minisgl_gateway.upgrade.successor FORM DESCRIPTORS FLAGS

FORM is the number of this interface. DESCRIPTORS has four numbers: of the listening socket, the
link, the socket for idle connections, and the family's. FLAGS is JSON: the flags of the first
server, and those of each upgrade.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from minisgl.errors import ConfigError
from minisgl.server.args import ServerArgs
from minisgl.server.flags import Parser, add_model, server_args, server_parser
from minisgl.server.launch import launch_server
from minisgl_gateway.args import GatewayArgs
from minisgl_gateway.upgrade.inherited import Flags, Handed, Inherited
from minisgl_gateway.upgrade.link import NotStarted, packed

FORM: Final = "1"
"""Raised when another version's successor would not understand what it is given."""

PROG: Final = "minisgl upgrade"

END_S: Final = 5.0
"""The longest time that a successor takes to end, as a worker's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Successor:
    """A process that starts. link, handed: this process's ends."""

    process: subprocess.Popen[bytes]
    link: socket.socket
    handed: socket.socket

    def end(self) -> int:
        """End it, and return its exit code."""
        self.process.terminate()
        try:
            return self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


def start(
    listening: socket.socket,
    family: socket.socket,
    flags: Flags,
    *,
    python: str,
    python_path: str,
) -> Successor:
    """Start a successor. python, python_path: the interpreter and $PYTHONPATH of its code. Raises
    ConfigError."""
    link, its_link = socket.socketpair()
    handed, its_handed = socket.socketpair()
    handed.setblocking(False)
    given = [each.fileno() for each in (listening, its_link, its_handed, family)]
    command = [python, "-m", __spec__.name, FORM, ",".join(map(str, given)), json.dumps(flags)]
    env = {**os.environ, "PYTHONPATH": python_path}
    try:
        # In a group of its own: the first process passes a terminal's signals on.
        process = subprocess.Popen(command, pass_fds=given, process_group=0, env=env)
    except OSError as error:
        link.close()
        handed.close()
        raise ConfigError(f"{python} does not start: {error.strerror}") from None
    finally:
        its_link.close()
        its_handed.close()
    return Successor(process=process, link=link, handed=handed)


def options_of(flags: Flags) -> ServerArgs:
    """Return the options: later flags count. Raises ConfigError."""
    said = io.StringIO()
    given: dict[str, Any] = {}
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            for argv in flags:
                parser = _parser()
                more = parser.parse_all(argv)
                if more.get("words") or "model" in more:
                    given.pop("words", None)
                    given.pop("model", None)
                given |= {name: value for name, value in more.items() if name != "words" or value}
            args = server_args(_parser(), given)
    except SystemExit:
        why = said.getvalue().partition("\n")[0].removeprefix(f"{PROG}: ")
        raise ConfigError(why or "its flags ask for no server") from None
    is_one = args.served_by == "own" and not args.dry_run
    if not (is_one and isinstance(args, GatewayArgs) and args.nnodes == 1):
        raise ConfigError("only a server of one machine takes over: no --shell, --dp, --nnodes")
    return args


def _parser() -> Parser:
    parser = server_parser(PROG, "")
    add_model(parser)
    return parser


def main(argv: Sequence[str]) -> int:
    """Serve in the place of the old server. Returns the exit code."""
    began = time.monotonic()
    form, descriptors, flags = argv
    fds = [int(each) for each in descriptors.split(",")]
    bound = Inherited(fileno=fds[0])
    bound.link = socket.socket(fileno=fds[1])
    bound.handed = Handed(fileno=fds[2])
    bound.kin = socket.socket(fileno=fds[3])
    bound.flags = json.loads(flags)
    told = _Told()
    logging.getLogger("minisgl.server.command").addHandler(told)
    try:
        if form != FORM:
            raise ConfigError(f"the running server hands over in the form {form}, not {FORM}")
        args = options_of(bound.flags)
        code = launch_server(args, began=began, on_url=lambda url: None, bound=bound)
    except ConfigError as error:
        told.why, code = str(error), 1
    with contextlib.suppress(OSError):
        if told.why and bound.link.fileno() >= 0:
            bound.link.sendall(packed(NotStarted(why=told.why)))
    with contextlib.suppress(OSError):
        bound.kin.sendall(b"ends %d %d\n" % (os.getpid(), code))
    return code


class _Told(logging.Handler):
    """Keeps the error with which the server ends."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.why = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.why = record.getMessage()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
