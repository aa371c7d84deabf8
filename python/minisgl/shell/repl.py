"""The loop: read a line, obey a command or stream an answer, say what it cost.

With a terminal, lines come through prompt_toolkit (history, editing); with a pipe, from stdin as
they are, so that a script can chat too.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from contextlib import closing
from typing import Final

from prompt_toolkit import PromptSession
from rich.console import Console

from minisgl.shell.client import Chat, ChatError

HELP: Final = """\
/system TEXT   start again, with TEXT as what the model is told first
/reset         start again
/help          show this
/exit          leave (so does Ctrl-D)
Ctrl-C         stop the answer"""


_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Characters that a terminal obeys instead of showing them; lines and tabs are no harm."""


def run_shell(url: str) -> int:
    """Chat with the server at `url` until the user leaves; the exit code. That is 1 if there is no
    server, or if what came through a pipe was not answered in full."""
    console = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
    all_answered = True
    try:
        with closing(Chat(url)) as chat:
            console.print(f"Chatting with {chat.model()}. /help lists commands.", style="bold")
            read = _reader()
            while (line := read()) is not None:
                if line.startswith("/"):
                    if not _obey(line, chat, console):
                        break
                elif line:
                    all_answered &= _answer(line, chat, console)
    except ChatError as error:
        console.print(str(error), style="red")
        return 1
    return 0 if all_answered or sys.stdin.isatty() else 1


def _reader() -> Callable[[], str | None]:
    """A function that gives the next line, or None when there is none any more."""
    if not sys.stdin.isatty():
        lines = sys.stdin.buffer  # of whatever encoding: what is not UTF-8 shows as U+FFFD
        return lambda: (
            line.decode("utf-8", "replace").strip() if (line := lines.readline()) else None
        )
    session: PromptSession[str] = PromptSession()

    def read() -> str | None:
        while True:
            try:
                return session.prompt("> ").strip()
            except KeyboardInterrupt:  # Ctrl-C clears the line
                continue
            except EOFError:
                return None

    return read


def _obey(line: str, chat: Chat, console: Console) -> bool:
    """Do what a command says; False if that is to leave."""
    command, _, argument = line.partition(" ")
    if command == "/exit":
        return False
    if command == "/reset":
        chat.reset()
        console.print("A new chat.", style="dim")
    elif command == "/system" and argument.strip():
        chat.reset(argument.strip())
        console.print("A new chat with this system prompt.", style="dim")
    elif command == "/system":
        console.print("/system needs the text: /system TEXT", style="red")
    else:
        if command != "/help":
            console.print(f"There is no command {line}.", style="red")
        console.print(HELP, style="dim")
    return True


def _answer(line: str, chat: Chat, console: Console) -> bool:
    """Print the answer as it comes; whether all of it did."""
    pieces = chat.ask(line)
    has_begun = False
    try:
        for piece in pieces:
            # Not through rich, which would make spaces of tabs.
            console.file.write(_CONTROL.sub("", piece) if console.is_terminal else piece)
            console.file.flush()
            has_begun = True
        console.print()
        if chat.cost:
            console.print(str(chat.cost), style="dim")
        return True
    except KeyboardInterrupt:
        pieces.close()  # closes the connection, which frees the request's pages
        console.print("\nstopped", style="dim")
    except ChatError as error:
        if has_begun:
            console.print()
        console.print(str(error), style="red")
    return False
