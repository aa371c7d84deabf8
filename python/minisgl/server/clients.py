"""Who asks: API keys and routers, as the server sees them, and the HTTP request of a prompt.

Keys are a plugin (the table `keys`). A server without them has no `Keys`, and its requests no key.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from minisgl.core import SamplingParams
from minisgl.message import KeyShare, Prompt, RequestReply


class Job(Protocol):
    """One prompt of a key. share: its tag and the key's number, by which the scheduler orders
    requests."""

    share: KeyShare

    def count(self, reply: RequestReply) -> None:
        """Charge the key for an accepted prompt, or for a piece of an answer."""

    def end(self) -> None:
        """Called once, when the prompt has ended in any way."""


class Key(Protocol):
    """A key that may use the server, and what it has used."""

    name: str
    num_requests: int
    num_refused: int
    num_prompt_tokens: int
    num_output_tokens: int

    @property
    def number(self) -> int:
        """From 1; by it keys take turns in the workers."""

    def namespace(self, salt: str) -> str:
        """Return the namespace of the prefix cache for requests with this `cache_salt`."""

    def check(self, priority: int) -> None:
        """Raise RequestError for a priority that the key may not ask for."""

    def begin(self, prompt: Prompt, params: SamplingParams, *, counts_prompt: bool = True) -> Job:
        """Return a prompt of this key that will be sent. Its `end` must be called.

        counts_prompt: whether its tokens count. Of several choices of a prompt, one counts them.
        """


class Keys(Protocol):
    """All keys of a server. There is at least one. An ASGI application before the others admits
    requests (the row `guard`), and sets `scope["api_key"]` to the key of a request that passes."""

    def __iter__(self) -> Iterator[Key]: ...


class Relay(Protocol):
    """A router that passes a request on, as `scope["relay"]`. If this server ends, another one goes
    on with the answer.

    outputs: by the prompt's index in the call, int32 ids that an earlier server has sent; None for
    a new request.
    """

    outputs: Mapping[int, bytes] | None

    def seeded(self, sampling: SamplingParams) -> SamplingParams:
        """Return the parameters with a seed that the router knows."""

    def shape(self, shape: Any) -> Any:
        """Return a `Shape` that writes the answer as `shape` does, and tells the router its ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The HTTP request of a prompt. path: the endpoint. traceparent, tracestate: the headers of W3C
    Trace Context. key: the API key, if the server has keys. address: the client's."""

    request_id: str = ""
    path: str = ""
    traceparent: str | None = None
    tracestate: str | None = None
    key: Key | None = None
    address: str = ""

    @property
    def client(self) -> str:
        """The name of the client for logs."""
        return f"API key {self.key.name!r}" if self.key else self.address
