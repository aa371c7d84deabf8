"""The options of a server, which include those of the engine and its processes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from ssl import SSLContext
from typing import Final, Literal

from minisgl import plugins
from minisgl.core.image import NO_MEDIA, Media
from minisgl.core.options import SWITCH, Rule, one_of, option, row_of, text, whole
from minisgl.runtime.args import RuntimeArgs

DEFAULT_PORT: Final = 1919
FOR_ONE: Final = (
    "a chat's own server is for this machine alone: it takes no keys and no certificate"
)

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]
MaxTokensPolicy = Literal["refuse", "clamp"]


SECONDS: Final = Rule(
    words="a number from 0 to 86400",
    accepts=lambda value: type(value) in (int, float) and 0 <= value <= 86400,
    parse=float,
)
_SECRET: Final = text("a key")  # `keys` checks it; its errors do not show the key


def listed(text: str) -> tuple[str, ...]:
    """Return the parts of a text with commas between them, as of `--cors-origin`."""
    return tuple(filter(None, (part.strip() for part in text.split(","))))


def is_origins(text: str) -> bool:
    """Return whether each origin is "*", or a scheme, a host and perhaps a port, as in browsers."""
    origins = listed(text)
    return bool(origins) and all(o == "*" or _ORIGIN.fullmatch(o) for o in origins)


def is_hosts(text: str) -> bool:
    """Return whether each part is "*", or a host's name or IPv4 address, without a port."""
    hosts = listed(text)
    return bool(hosts) and all(host == "*" or _HOST.fullmatch(host) for host in hosts)


_HOST: Final = re.compile(r"[A-Za-z0-9._-]+")
_ORIGIN: Final = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/?#@,]+")
ORIGINS: Final = text(
    "origins such as https://chat.example.org, with commas between them, or *", is_origins
)
HOSTS: Final = text(
    "names of hosts without ports, such as chat.example.org, with commas between them, or *",
    is_hosts,
)
_NAME: Final = text("a printable name", lambda name: bool(name.strip()) and name.isprintable())


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerArgs(RuntimeArgs):
    """The options of a server. Raises ConfigError if one has a wrong value.

    `conflict` finds options that contradict each other. A package may have further options
    (`server_options`).
    """

    served_model_name: str | None = option(
        None,
        _NAME,
        "model",
        "the model's name in requests, or several with commas between them; an answer has the one "
        "that its request used",
        metavar="NAME",
        unset="what --model says; of a folder, its last part",
    )
    host: str = option(
        "127.0.0.1", text("an address"), "server", "address to listen on; 0.0.0.0 for all networks"
    )
    port: int | None = option(
        None,
        whole(0, 65535),
        "server",
        "port to listen on; 0 for any free one",
        metavar="PORT",
        unset=f"{DEFAULT_PORT}; for a chat: 0",
    )
    tool_call_parser: str | None = option(
        None,
        row_of("chat_formats"),
        "server",
        "how the model writes tool calls",
        unset="what the chat template shows",
    )
    max_tokens_policy: MaxTokensPolicy = option(
        "refuse",
        one_of(MaxTokensPolicy),
        "server",
        "what happens to a request whose max_tokens is more than the context leaves: it is refused "
        "with HTTP 400, or max_tokens is lowered to that (clamp), and a header of the answer says "
        "so",
    )
    num_tokenizer: int = option(
        1,
        whole(0, 64),
        "server",
        "tokenizer processes; with 0 the detokenizer's process does both: one process fewer, but "
        "prompts then take time from the text of running streams",
    )
    api_key: str | None = option(
        None,
        _SECRET,
        "access",
        "serve only requests with this key, or with one of several with commas between them; other "
        "users of this machine can see it in the list of processes, unlike --api-key-file",
        metavar="KEY",
        unset="all requests are served",
    )
    api_key_file: str | None = option(
        None,
        text("a file's name"),
        "access",
        "a TOML file with a table for each key: its name, key, limits and rights (docs/security.md)"
        "; it is read again when it changes",
        metavar="FILE",
    )
    cors_origin: str | None = option(
        None,
        ORIGINS,
        "access",
        "web pages of these origins, with commas between them, may use the server from a browser "
        "(CORS); * is all",
        metavar="ORIGIN",
        unset="its own pages",
    )
    allowed_host: str | None = option(
        None,
        HOSTS,
        "access",
        "names, with commas between them, by which clients ask for the server (the header Host), "
        "besides localhost, IP addresses and --host: of a container, for instance; * is all",
        metavar="NAME",
        unset="with API keys all, else none",
    )
    drain_timeout: float = option(
        8.0,
        SECONDS,
        "running",
        "seconds for which SIGTERM lets running requests finish; new ones get HTTP 503. Docker "
        "waits 10 s before it kills",
        metavar="S",
    )
    shell: bool = option(False, SWITCH, "running", "the same as minisgl chat")
    log_level: LogLevel | None = option(
        None,
        one_of(LogLevel),
        "running",
        "what is logged",
        unset="$MINISGL_LOG_LEVEL or info; for a chat: warning",
    )
    log_format: LogFormat | None = option(
        None,
        one_of(LogFormat),
        "running",
        "one line of text, or one JSON object, per log entry",
        unset="$MINISGL_LOG_FORMAT or text",
    )

    def conflict(self) -> str | None:
        """Return a sentence if two options contradict each other, else None."""
        if self.dry_run and self.shell:
            return "--dry-run serves nothing, so it does not go with --shell"
        return FOR_ONE if self.shell and (self.api_key or self.api_key_file) else None

    @property
    def tls(self) -> SSLContext | None:
        """The settings of HTTPS; None is HTTP."""
        return None

    @property
    def media(self) -> Media:
        """Where images of requests may come from."""
        return NO_MEDIA

    @property
    def adapter_folder(self) -> Path | None:
        """The folder from which adapters are loaded at run time; None if none are."""
        return None

    @property
    def served_by(self) -> str:
        """The row of `servers` that serves; "own" is `minisgl.server.launch`."""
        return "shell" if self.shell else "own"

    @property
    def http_port(self) -> int:
        """The port to listen on; 0 is any free one."""
        default = 0 if self.shell else DEFAULT_PORT
        return default if self.port is None else self.port


def server_options() -> type[ServerArgs]:
    """Return the options of `minisgl serve`, which are more with the row `server` of `options`."""
    return plugins.find("options", "server") or ServerArgs
