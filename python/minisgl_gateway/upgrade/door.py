"""The private socket of a server, at which its user asks for an upgrade.

It is in the folder of the server's sockets, which only its user may enter. Its name has the port.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import msgspec

from minisgl.errors import ConfigError, EngineError
from minisgl.utils.logger import get_logger

logger = get_logger(__name__)

MAX_LINE: Final = 2**16
"""The most bytes of a request, which has flags."""

ASKED_S: Final = 5.0
"""How long a client may take to send its request."""


class Asked(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The request, one line of JSON. flags: they count before the server's own. python,
    python_path: of the code that takes over. drain_s: how long open requests may take before they
    move or end. engines: how many run at a time; None for as many as the memory holds."""

    flags: list[str]
    python: str
    python_path: str
    drain_s: float
    engines: int | None


class Said(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the answer. The last one has `code`, the exit code of the command."""

    text: str
    code: int | None = None


Say = Callable[[str], None]
Upgrade = Callable[[Asked, Say, "asyncio.Task[bytes]"], Awaitable[str]]
"""Upgrades, and returns the last line. Its last argument ends when the client leaves. Raises
ConfigError, EngineError."""


def path_of(folder: Path, port: int) -> Path:
    return folder / f"upgrade-{port}"


async def open_door(path: Path, upgrade: Upgrade) -> asyncio.Server:
    """Listen, and answer each client with `Said`."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        def say(text: str, code: int | None = None) -> None:
            if not writer.is_closing():
                writer.write(msgspec.json.encode(Said(text=text, code=code)) + b"\n")

        left: asyncio.Task[bytes] | None = None
        try:
            async with asyncio.timeout(ASKED_S):
                asked = msgspec.json.decode(await reader.readline(), type=Asked)
            left = asyncio.create_task(reader.read(1))
            say(await upgrade(asked, say, left), 0)
        except (ConfigError, EngineError) as error:
            say(str(error), 1)
        except (msgspec.DecodeError, ValueError, TimeoutError) as error:
            say(f"this is no request for an upgrade: {str(error) or 'it did not come in time'}", 2)
        except Exception as error:
            logger.error("the upgrade has failed", exc_info=error)
            say(f"the upgrade has failed ({type(error).__name__}: {error})", 1)
        finally:
            if left:
                left.cancel()
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    return await asyncio.start_unix_server(answer, path, limit=MAX_LINE)
