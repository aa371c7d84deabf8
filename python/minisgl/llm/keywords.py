"""Errors about options, in the keywords of `LLM`."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Final

from minisgl.core.args import EngineConfig
from minisgl.core.options import SWITCH, options_of
from minisgl.errors import ConfigError, EngineError

_FLAG: Final = re.compile(r"--(?P<flag>[a-z]+(-[a-z]+)*)( (?P<value>[\w,.]*\w))?")


def in_keywords(message: str) -> str:
    """Return the message of an error with keywords of `LLM` instead of the flags of a server."""
    options = options_of(EngineConfig)

    def keyword(found: re.Match[str]) -> str:
        name, value = found["flag"].replace("-", "_"), found["value"]
        if name not in options:
            return found[0]
        rule = options[name][1].rule
        with contextlib.suppress(ValueError):
            if value and rule is not SWITCH and rule.accepts(parsed := rule.parse(value)):
                return f"{name}={parsed!r}"
        return f"{name}{' ' + value if value else ''}"

    return _FLAG.sub(keyword, message)


@contextlib.contextmanager
def naming_keywords() -> Iterator[None]:
    """Let the errors of the block name keywords of `LLM` instead of the flags of a server."""
    try:
        yield
    except (ConfigError, EngineError) as error:
        error.args = (in_keywords(str(error)),)
        raise
