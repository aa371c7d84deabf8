"""The loop of `minisgl chat`, and the one question of `minisgl run`.

Each turn reads a message. It runs a command, or streams the answer and prints its cost. In a
terminal, prompt_toolkit reads messages (history, editing). From a pipe they are read line by line,
so that a script can chat, too. Only answers go to stdout.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Final

from rich.console import Console

from minisgl.errors import MinisglError
from minisgl.utils.files import forget
from minisgl.utils.text import counted
from minisgl_gateway import env
from minisgl_gateway.shell.client import Chat, ChatError
from minisgl_gateway.shell.words import WordWriter

if TYPE_CHECKING:
    from prompt_toolkit.history import History

HELP: Final = '''\
/set NAME VALUE   a sampling setting (temperature 0.2); no VALUE: its default
/set              show the settings
/system TEXT      start again, with TEXT as the system prompt
/reset            start again
/retry            ask the last question again, for another answer
/save FILE        write the conversation to FILE
/load FILE        continue the conversation of FILE
/help             show this
exit, quit        leave (as Ctrl-D and /exit do)
"""               begins and ends several lines; Alt-Enter begins a new line
Ctrl-C            stop the answer'''

FENCE: Final = '"""'
INTERRUPTED: Final = 130  # the exit code after Ctrl-C, as in shells


def run_shell(begin: Callable[[], Chat]) -> int:
    """Chat until the user leaves. begin: makes the conversation.

    Returns the exit code: 0; 1 if there is no server, or if a message from a pipe was not answered;
    130 after Ctrl-C in a pipe.
    """
    return _client(begin, lambda chat, console: _Loop(chat, console).run())


def run_question(begin: Callable[[], Chat], question: str) -> int:
    """Print one answer. Returns the exit code: 0, 1 without an answer, 130 after Ctrl-C. begin: as
    for `run_shell`."""

    def ask(chat: Chat, console: Console) -> int:
        if chat.is_base:
            console.print(f"{chat.model} is a base model: it completes the text.", style="dim")
        result = _answer(question, chat, console)
        return INTERRUPTED if result is None else int(not result)

    return _client(begin, ask)


def _client(begin: Callable[[], Chat], use: Callable[[Chat, Console], int]) -> int:
    console = Console(stderr=True, highlight=False, soft_wrap=True, markup=False, emoji=False)
    try:
        with closing(begin()) as chat:
            return use(chat, console)
    except ChatError as error:
        console.print(str(error), style="red")
        return 1
    except OSError as error:  # of stdout: its reader has left, as in `| head`, or its disk is full
        forget(sys.stdout)
        if not isinstance(error, BrokenPipeError):
            console.print(f"the answer cannot be written: {error.strerror}", style="red")
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED


class _Loop:
    """Reads messages and prints answers. Mutable: it remembers whether all were answered."""

    def __init__(self, chat: Chat, console: Console) -> None:
        self._chat, self._console = chat, console
        self._all_answered = True

    def run(self) -> int:
        name = self._chat.model
        greeting = f"Chatting with {name}. /help lists commands."
        if self._chat.is_base:
            greeting = f"{name} is a base model: it completes single texts. /help lists commands."
        self._console.print(greeting, style="bold")
        is_terminal = sys.stdin.isatty()
        read = _reader(self._console) if is_terminal else _read_pipe
        while (message := read()) is not None:
            if message in ("exit", "quit", "/exit", "/quit", "/bye"):
                break
            if message == "/retry":
                message = self._chat.take_back() or self._wrong("There is no question yet.")
            elif message.startswith("/") and "\n" not in message:
                self._obey(message)
                continue
            if message:
                self._all_answered &= bool(_answer(message, self._chat, self._console))
        return 0 if self._all_answered or is_terminal else 1

    def _obey(self, line: str) -> None:
        """Run a command."""
        command, _, argument = map(str.strip, line.partition(" "))
        try:
            if command == "/reset":
                self._chat.reset()
                self._say("A new chat.")
            elif command == "/set":
                name, *value = re.split(r"[\s=]", argument, maxsplit=1)
                if name:
                    self._chat.settings.set(name, "".join(value).strip())
                self._say(f"Settings: {self._chat.settings}.")
            elif command == "/help":
                self._say(HELP)
            elif command not in ("/system", "/save", "/load"):
                self._wrong(f"There is no command {line}.")
                self._say(HELP)
            elif not argument:
                what = "the text: /system TEXT" if command == "/system" else f"a file: {line} FILE"
                self._wrong(f"{command} needs {what}")
            elif command == "/system":
                self._chat.reset(argument)
                self._say("A new chat with this system prompt.")
            elif command == "/save":
                self._chat.save(argument)
                self._say(f"Saved to {argument}.")
            else:
                questions = counted(self._chat.load(argument), "question")
                self._say(f"The conversation of {argument}, {questions} long, goes on.")
        except (ChatError, MinisglError) as error:
            self._wrong(str(error))

    def _say(self, text: str) -> None:
        self._console.print(text, style="dim")

    def _wrong(self, text: str) -> str:
        """Print an error. Returns "", which is no message."""
        self._console.print(text, style="red")
        self._all_answered = False
        return ""


def _read_pipe() -> str | None:
    """Return the next message of stdin, None at its end. Bytes that are not UTF-8 become U+FFFD."""
    lines = sys.stdin.buffer
    if not (line := lines.readline()):
        return None
    text = line.decode("utf-8", "replace").strip()
    while text.startswith(FENCE) and not _is_closed(text) and (line := lines.readline()):
        text += "\n" + line.decode("utf-8", "replace").rstrip()
    return _unfenced(text)


def _is_closed(text: str) -> bool:
    return len(text) >= 2 * len(FENCE) and text.endswith(FENCE)


def _unfenced(text: str) -> str:
    """Return the message without the marks around several lines. If the input ended first, there is
    no closing mark."""
    return text.removeprefix(FENCE).removesuffix(FENCE).strip() if text.startswith(FENCE) else text


def _reader(console: Console) -> Callable[[], str | None]:
    """Return a function that reads the next message from the terminal; it returns None at the
    end."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    session: PromptSession[str] = PromptSession(history=_history(console), key_bindings=keys)

    def read() -> str | None:
        text = ""
        while True:
            try:
                text += session.prompt("... " if text else "> ").strip()
            except KeyboardInterrupt:  # Ctrl-C clears the message
                text = ""
                continue
            except EOFError:
                return None
            if not text.startswith(FENCE) or _is_closed(text):
                return _unfenced(text)
            text += "\n"

    return read


def _history(console: Console) -> History:
    """Return the history of earlier chats: a file that only this user can read, or memory."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    class Kept(FileHistory):
        def store_string(self, string: str) -> None:
            with suppress(OSError):  # its disk is full
                super().store_string(string)

    path = env.chat_history()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        path.open("a").close()
    except OSError as error:
        console.print(f"{path} cannot be written ({error.strerror}): no history", style="dim")
        return InMemoryHistory()
    return Kept(str(path))


def _answer(question: str, chat: Chat, console: Console) -> bool | None:
    """Print the answer while it arrives. Returns whether it is complete; None after Ctrl-C."""
    words = WordWriter(sys.stdout, lambda: console.width) if sys.stdout.isatty() else None
    pieces = chat.ask(question)
    has_begun = False
    try:
        for piece in pieces:
            has_begun = True
            if words:
                words.write(piece)
            else:
                print(piece, end="", flush=True)
        _end_line(words, has_begun=True)
        if chat.cost:
            console.print(str(chat.cost), style="dim")
        return True
    except KeyboardInterrupt:
        pieces.close()  # closes the connection, which frees the request's pages
        _end_line(words, has_begun=has_begun)
        console.print("stopped", style="dim")
        return None
    except ChatError as error:
        _end_line(words, has_begun=has_begun)
        console.print(str(error), style="red")
        return False


def _end_line(words: WordWriter | None, *, has_begun: bool) -> None:
    if words:
        words.flush()
    if has_begun:
        print(flush=True)
