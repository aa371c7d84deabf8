"""What the client saw of a request."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class Record:
    """One request as the client saw it; seconds of one clock, 0 is the start of the run.

    Mutable: it is filled while the stream runs. due: the scheduled time (None: closed loop).
    chunks: (arrival, tokens) of each chunk with output; tokens is 0 if the chunk does not say.
    num_output: the tokens of the server's usage, None without it. finish_at: arrival of a last
    chunk without text. server_ttft_s: the server's own measurement, if it reports one.
    """

    session: int
    turn: int
    due: float | None
    sent: float = 0.0
    ended: float = 0.0
    chunks: list[tuple[float, int]] = field(default_factory=list)
    finish_at: float | None = None
    finish_reason: str | None = None
    num_prompt: int | None = None
    num_output: int | None = None
    num_cached: int | None = None
    server_ttft_s: float | None = None
    error: str | None = None
