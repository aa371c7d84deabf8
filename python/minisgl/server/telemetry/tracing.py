"""The door to OpenTelemetry: nothing of it is imported unless ``--otlp-endpoint`` asks for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol
from urllib.parse import urlsplit

from minisgl.core import Finished, SamplingParams
from minisgl.errors import ConfigError

if TYPE_CHECKING:
    from minisgl.server.keys import Key

TRACES_PATH = "/v1/traces"  # OTLP/HTTP's default path for traces


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a prompt comes from. path: the endpoint; trace*: the headers of W3C Trace Context. key:
    the API key, if the server has keys. address: the client's."""

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


class Tracer(Protocol):
    """Is told of each prompt once, when it has ended. Never raises, never waits."""

    def ended(
        self,
        origin: Origin,
        uid: int,
        sampling: SamplingParams,
        *,
        seconds: float,
        first_text_s: float | None,
        reason: str,
        code: str | None,
        end: Finished | None,
    ) -> None:
        """It ended now and was submitted `seconds` ago, its first text came `first_text_s` after
        that. reason, code and end: as for `Observer.ended`."""

    def close(self) -> None:
        """Send what is left, in bounded time."""


def create_tracer(endpoint: str, model: str) -> Tracer:
    """A tracer that exports to `endpoint`, a collector's URL; without a path, to `/v1/traces`.

    Raises ConfigError if OpenTelemetry is not installed.
    """
    url = urlsplit(endpoint)
    try:
        from minisgl.server.telemetry.otel import OtlpTracer
    except ImportError as error:
        raise ConfigError(
            "--otlp-endpoint needs OpenTelemetry's SDK and its OTLP exporter over HTTP "
            f"({error}): pip install 'minisgl[otel]'"
        ) from error
    path = TRACES_PATH if url.path in ("", "/") else url.path
    return OtlpTracer(url._replace(path=path).geturl(), model)
