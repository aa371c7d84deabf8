"""Runs a checkpoint's template in jinja's immutable sandbox, in bounded time and memory.

A template is a program: loops can nest, and a few characters can ask for a text of a gigabyte. The
checks here miss some large texts, for example one that a loop doubles. In a server's workers
`MAX_MEMORY` stops those.
"""

from __future__ import annotations

import re
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Final

import jinja2
from jinja2 import nodes
from jinja2.filters import do_format
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_TEMPLATE_S: Final = 10.0
"""The most CPU seconds of one rendering. A chat of a million tokens takes a tenth of a second."""

MAX_PROMPT: Final = 64 * 2**20
"""The most characters of a rendered prompt: four times the largest body of a request."""

MAX_MEMORY: Final = 2**30
"""The most bytes that rendering may allocate. The largest prompt takes a quarter of them."""

MAX_FACTOR: Final = 1024
"""The largest base or exponent of a power."""

MAX_WIDTH: Final = 2**16
"""The largest width of a padding, and the largest list that a filter may make."""

_TICK: Final = "minisgl_tick"
_WIDTH: Final = re.compile(r"\d+(?=[^\W\d]|[.,%{}])")
_WIDTH_IS_ARGUMENT: Final = re.compile(r"%[^a-zA-Z%]*\*|:[^}]*\{")


class Sandbox(ImmutableSandboxedEnvironment):
    """A jinja environment in which loops, products and widths are bounded."""

    intercepted_binops = frozenset(("*", "**", "%"))

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        del self.globals["lipsum"]  # makes any number of words
        self.filters["format"] = _format
        for name in ("center", "indent", "batch", "slice"):
            self.filters[name] = _bounded(self.filters[name])

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            tick = nodes.Call(nodes.Name(_TICK, "load"), [], [], None, None)
            loop.body.insert(0, nodes.ExprStmt(tick, lineno=loop.lineno))
        return tree

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        if operator == "%":
            if isinstance(left, str | bytes):
                _check_widths(left, right)
            return super().call_binop(context, operator, left, right)
        size = max((len(side) for side in (left, right) if hasattr(side, "__len__")), default=1)
        times = max((abs(side) for side in (left, right) if isinstance(side, int)), default=1)
        is_large = times > MAX_FACTOR if operator == "**" else size * times > MAX_PROMPT
        if is_large and not isinstance(left, float) and not isinstance(right, float):
            raise _too_large()
        return super().call_binop(context, operator, left, right)

    def call(
        self, context: jinja2.runtime.Context, function: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if isinstance(getattr(function, "__self__", None), str | bytes):  # ljust, zfill, ...
            _check_numbers(args, kwargs)
        return super().call(context, function, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        call = wrapped

        def limited(*args: Any, **kwargs: Any) -> str:
            _check_widths(value.__self__, (args, kwargs))
            return call(*args, **kwargs)

        return limited


def rendered(template: jinja2.Template, variables: dict[str, Any]) -> str:
    """Return the text of the template. Raises TemplateError beyond `MAX_PROMPT` characters or
    `MAX_TEMPLATE_S`."""
    end = time.thread_time() + MAX_TEMPLATE_S

    def tick() -> str:
        if time.thread_time() > end:
            raise jinja2.TemplateError(f"it computes for more than {MAX_TEMPLATE_S:g} s")
        return ""

    pieces: list[str] = []
    size = 0
    for piece in template.generate(variables | {_TICK: tick}):
        pieces.append(piece)
        size += len(piece)
        tick()
        if size > MAX_PROMPT:
            raise jinja2.TemplateError(f"its text exceeds {MAX_PROMPT:,} characters")
    return "".join(pieces)


@contextmanager
def bounded_memory() -> Iterator[None]:
    """Let the process take at most `MAX_MEMORY` more in the block; beyond it raises TemplateError.

    This has an effect on Linux only, and counts what other threads take.
    """
    if sys.platform != "linux":
        yield
        return
    with open("/proc/self/statm") as statm:
        used = int(statm.read().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limits = [limit for limit in (soft, used + MAX_MEMORY) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))
    try:
        yield
    except MemoryError:
        raise jinja2.TemplateError(f"it takes more than {MAX_MEMORY:,} bytes") from None
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _too_large() -> jinja2.TemplateError:
    return jinja2.TemplateError("it computes something far too large")


def _check_widths(format: str | bytes, values: Any) -> None:
    """Raise TemplateError if the sum of the widths and precisions in a format is too large.

    Any number before a letter or a dot counts as one.
    """
    text = format.decode(errors="replace") if isinstance(format, bytes) else format
    numbers = _WIDTH.findall(text)
    if _WIDTH_IS_ARGUMENT.search(text):
        numbers += re.findall(r"\d+", repr(values))
    if sum(int(number) if len(number) < 20 else MAX_PROMPT + 1 for number in numbers) > MAX_PROMPT:
        raise _too_large()


def _check_numbers(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise TemplateError if an argument is a large number."""
    if any(isinstance(each, int) and each > MAX_WIDTH for each in (*args, *kwargs.values())):
        raise _too_large()


def _format(value: Any, *args: Any, **kwargs: Any) -> str:
    """jinja's filter `format`, with bounded widths."""
    _check_widths(str(value), kwargs or args)
    return do_format(value, *args, **kwargs)


def _bounded(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the filter `function`, which then refuses large numbers."""

    @wraps(function)
    def bounded(value: Any, *args: Any, **kwargs: Any) -> Any:
        _check_numbers(args, kwargs)
        return function(value, *args, **kwargs)

    return bounded
