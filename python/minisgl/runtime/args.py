"""The options of an engine in processes of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from minisgl.core.args import EngineConfig
from minisgl.core.options import SWITCH, Rule, option, whole

POSITIVE: Final = Rule(
    words="a number above 0",
    accepts=lambda value: type(value) in (int, float) and 0 < value < float("inf"),
    parse=float,
)

_HANG_TIMEOUT: Final = Rule(
    words="a number from 2 to 86400",  # a heartbeat and its check may each be 0.5 s late
    accepts=lambda value: type(value) in (int, float) and 2 <= value <= 86400,
    parse=float,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeArgs(EngineConfig):
    """The options that the supervisor and the ranks read, checked one by one. Raises ConfigError.

    offline: set by an `LLM`; the queue then has no limit, because it sends all requests at once,
    and stalls have no bound.
    """

    max_queued_requests: int = option(
        1024,
        whole(1),
        "scheduling",
        "requests waiting at most; further ones are answered with HTTP 429, and a call of more "
        "prompts than this with 400",
    )
    max_stall_ms: float | None = option(
        None,
        POSITIVE,
        "scheduling",
        "milliseconds for which the prompts of a step may hold up running streams; less makes "
        "streams steadier, more computes prompts faster; one page of tokens is computed, and one "
        "image read, however little it is",
        metavar="MS",
        unset="what the smallest chunk with 0.95 of the best prefill rate takes; the log says it",
    )
    hang_timeout: float = option(
        10.0,
        _HANG_TIMEOUT,
        "running",
        "seconds after which a process of the server that gives no sign of life, or whose loop "
        "makes no progress beyond what its step may take, ends the server with an error to each "
        "open request",
        metavar="S",
    )
    dry_run: bool = option(
        False,
        SWITCH,
        "running",
        "check config.json, the tokenizer and which tensors the weights' files hold, print where "
        "the memory would go, and exit",
    )
    offline: bool = False
