"""A plain chat in a terminal or a pipe: `minisgl serve --shell`.

What it is for: it sends messages to a server over HTTP, and prints answers to stdout and all else
to stderr. `minisgl_gateway.shell`, which has settings, a history and more commands, takes its place
if it is installed. What it does not know: how the server works.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from http.client import HTTPException
from io import TextIOWrapper
from typing import Any, Final
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

from minisgl.utils.files import forget

Messages = list[dict[str, str]]

_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Characters of an answer that a terminal would obey: all but line feeds and tabs."""


class Refused(Exception):
    """The server refuses or fails. The message is a sentence for the user."""


def run_shell(url: str) -> int:
    """Chat with the server at `url` until the user leaves.

    Returns the exit code: 0; 1 if a message from a pipe was not answered. Raises KeyboardInterrupt
    after Ctrl-C in a pipe.
    """
    is_terminal = sys.stdin.isatty()
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # a pipe may have any bytes
    all_answered = True
    turns: Messages = []
    _say("Chatting. /reset starts again; exit, quit or Ctrl-D leave; Ctrl-C stops an answer.")
    try:
        while (text := _read(is_terminal)) not in (None, "exit", "quit", "/exit", "/quit"):
            if text == "/reset":
                turns.clear()
                _say("A new chat.")
            elif text:
                all_answered &= _ask(url, turns, text, is_terminal)
    except BrokenPipeError:  # the reader of stdout has left, as in `| head`
        forget(sys.stdout)
        return 1
    return 0 if all_answered or is_terminal else 1


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _read(is_terminal: bool) -> str | None:
    """Return the next line; "" after Ctrl-C in a terminal; None at the end."""
    try:
        return input("> " if is_terminal else "").strip()
    except EOFError:
        return None
    except KeyboardInterrupt:
        if not is_terminal:
            raise
        print()
        return ""


def _ask(url: str, turns: Messages, text: str, is_terminal: bool) -> bool:
    """Print the answer while it arrives, and add both to `turns`. Returns whether there is one."""
    question = {"role": "user", "content": text}
    pieces: list[str] = []
    try:
        for piece in _answer(url, [*turns, question]):
            pieces.append(piece)
            print(_CONTROL.sub("", piece), end="", flush=True)
    except KeyboardInterrupt:
        if not is_terminal:
            raise
    except BrokenPipeError:
        raise
    except (Refused, OSError, HTTPException) as error:
        _say(str(error))
        return False
    finally:
        if pieces:
            print(flush=True)
    turns += [question, {"role": "assistant", "content": "".join(pieces)}]
    return True


def _answer(url: str, messages: Messages) -> Iterator[str]:
    """Stream the text of the answer. Raises Refused, and OSError if the server is gone."""
    request = Request(
        f"{url}/v1/chat/completions",
        json.dumps({"messages": messages, "stream": True}).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        # No timeout: on a CPU the prefill of a long prompt may take minutes, and the end of a
        # server closes the connection. No proxy: the server is of this machine.
        response = build_opener(ProxyHandler({})).open(request)
    except HTTPError as error:
        raise Refused(json.load(error)["error"]["message"]) from error
    with response:
        for line in response:
            field, _, data = line.decode().partition(":")
            if field != "data" or data.strip() == "[DONE]":
                continue  # empty lines, comments
            chunk: dict[str, Any] = json.loads(data)
            if "error" in chunk:
                raise Refused(chunk["error"]["message"])
            for choice in chunk["choices"]:
                if text := choice["delta"].get("content"):
                    yield text
