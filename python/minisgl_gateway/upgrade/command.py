"""`minisgl upgrade`: asks a running server of this user to let a new one take over."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import stat
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from minisgl.errors import ConfigError
from minisgl.server.args import SECONDS
from minisgl.server.flags import Parser, flag_type, integer
from minisgl_gateway.upgrade.door import Asked, Said

ADDRESS: Final = ("--host", "--port")


def upgrade_parser() -> Parser:
    """Return the parser of `minisgl upgrade`."""
    parser = Parser(
        prog="minisgl upgrade",
        description="Start a new server with the flags of a running one, and with FLAGS; they "
        "count first. When it is ready, it takes over the port: no connection is refused, and no "
        "request is lost. If it does not start, nothing changes. Run this as the server's user, "
        "with the Python whose code is to serve; both share $TMPDIR.",
        allow_abbrev=False,
        usage="minisgl upgrade [--port PORT] [--drain S] [--engines N] [-- FLAGS]",
    )
    add = parser.add_argument
    add(
        "--port", type=integer(1, 65535), metavar="PORT",
        help="the port of the server (default: the only server's)",
    )  # fmt: skip
    add(
        "--drain", type=flag_type(SECONDS), default=60.0, metavar="S",
        help="seconds for which open requests stay with the old server. Then they go on in the "
        "new one, if the old one has --restart, and both have the same version, weights and "
        "settings; else they end with an error (default: %(default)s)",
    )  # fmt: skip
    add(
        "--engines", type=integer(1, 2), metavar="N",
        help="1: new requests wait, open ones have S seconds, and the old engine ends before the "
        "new one starts; if that fails, the old one starts again. Needs a server with --restart. "
        "2: the old engine runs until its requests have ended (default: 2 if the memory that is "
        "free holds another engine like the old one, else 1)",
    )  # fmt: skip
    return parser


def upgrade(argv: Sequence[str], began: float) -> int:
    """Ask for the upgrade, and print what happens until it is over. Returns the exit code."""
    words = list(argv)
    at = words.index("--") if "--" in words else len(words)
    parser, flags = upgrade_parser(), words[at + 1 :]
    given = parser.parse_all(words[:at])
    if wrong := [word for word in flags if word.partition("=")[0] in ADDRESS]:
        parser.error(f"{wrong[0]}: the new server has the address of the old one")
    asked = Asked(
        flags=flags,
        python=sys.executable,
        python_path=os.environ.get("PYTHONPATH", ""),
        drain_s=given["drain"],
        engines=given["engines"],
    )
    try:
        return _ask(door_of(given["port"]), msgspec.json.encode(asked) + b"\n")
    except ConfigError as error:
        print(f"minisgl upgrade: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("minisgl upgrade: it is off, unless the new server has the port", file=sys.stderr)
        return 130


def door_of(port: int | None) -> Path:
    """Return the socket of this user's server. Raises ConfigError if there is none, or several."""
    folder = tempfile.gettempdir()
    found = []
    for path in Path(folder).glob("minisgl-*/upgrade-*"):
        named = re.fullmatch(r"upgrade-(\d+)", path.name)
        if named and port in (None, int(named[1])):
            with contextlib.suppress(OSError):  # that server has just ended
                if _is_private(path.parent.lstat()):
                    found.append((path.lstat().st_mtime, int(named[1]), path))
    # Two have one port while the old server ends: the newest counts.
    doors = {number: path for _, number, path in sorted(found)}
    what = f"server of this user on port {port}" if port else "server of this user"
    if not doors:
        raise ConfigError(
            f"there is no {what} with its sockets in {folder} (TMPDIR); one that starts, or starts "
            "its engine again, can be upgraded when it is ready"
        )
    if len(doors) > 1:
        ports = ", ".join(map(str, sorted(doors)))
        raise ConfigError(f"there is more than one {what}: choose with --port, of {ports}")
    return next(iter(doors.values()))


def _is_private(folder: os.stat_result) -> bool:
    """Return whether only this user may enter the folder."""
    is_ours = folder.st_uid == os.geteuid()
    return is_ours and stat.S_ISDIR(folder.st_mode) and not folder.st_mode & 0o077


def _ask(door: Path, request: bytes) -> int:
    """Send the request and print the answer. Returns its exit code. Raises ConfigError."""
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(str(door))
            connection.sendall(request)
            with connection.makefile("rb") as lines:
                for line in lines:
                    said = msgspec.json.decode(line, type=Said)
                    if said.code:
                        raise ConfigError(said.text)
                    print(said.text, flush=True)
                    if said.code == 0:
                        return 0
        except OSError as error:
            raise ConfigError(f"the server at {door} does not answer: {error.strerror}") from None
    raise ConfigError("the server has ended before the upgrade was over; its log says why")
