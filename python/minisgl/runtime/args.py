"""The options of an engine in processes of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from minisgl.core.args import SWITCH, EngineConfig, Rule, option, text, whole

_POSITIVE: Final = Rule(
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
    max_queue_wait: float | None = option(
        None,
        _POSITIVE,
        "scheduling",
        "seconds for which a request may wait before its first step; then it ends with HTTP 503",
        metavar="S",
        unset="no limit",
    )
    max_stall_ms: float | None = option(
        None,
        _POSITIVE,
        "scheduling",
        "milliseconds for which the prompts of a step may hold up running streams; less makes "
        "streams steadier, more computes prompts faster; one page of tokens is computed however "
        "little it is",
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
    dp: int = option(
        1,
        whole(1, 64),
        "many devices",
        "data parallelism: N whole servers on this machine behind one port, each with --tp GPUs of "
        "its own; on a CPU they share cores and memory; requests go by prefix and load, and a "
        "server that dies is replaced. For several machines: pip install 'minisgl[ray]' "
        "(docs/replicas.md)",
    )
    dry_run: bool = option(
        False,
        SWITCH,
        "running",
        "check config.json, the tokenizer and which tensors the weights' files hold, print where "
        "the memory would go, and exit",
    )
    log_steps: str | None = option(
        None,
        text("a file's name"),
        "running",
        "write a JSON line per step of the engine to FILE, which is emptied first: times of each "
        "part, rows, tokens",
        metavar="FILE",
    )
    record: str | None = option(
        None,
        text("a file's name"),
        "running",
        "keep a record of arrivals, steps and ends in FILE, which is emptied first, and FILE.1, at "
        "most 32 MiB each, with no text: the page's X-ray opens it, and minisgl replay FILE sends "
        "the same load to a server",
        metavar="FILE",
    )
    xray_text: bool = option(
        False,
        SWITCH,
        "running",
        "the page's X-ray shows the first words of each prefix in the prefix cache, of all users' "
        "prompts, and --record FILE keeps them",
    )
    profile_dir: str = option(
        "minisgl-profiles",
        text("a folder's name"),
        "running",
        "folder for the traces of POST /start_profile and /stop_profile, made when the first is "
        "written",
        metavar="DIR",
    )
    offline: bool = False
