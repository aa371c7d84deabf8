"""The interface to OpenTelemetry, which is imported only for `--otlp-endpoint`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol
from urllib.parse import urlsplit

from minisgl.core import Finished, SamplingParams
from minisgl.errors import ConfigError

if TYPE_CHECKING:
    from minisgl_gateway.keys.ring import Key

TRACES_PATH = "/v1/traces"  # OTLP/HTTP's default path for traces


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


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedPrompt:
    """A prompt that ends now.

    seconds: since its submission. first_text_s: from its submission to its first text; None if it
    had none. reason: one of `Observer.ends`. code: of the error, if the reason is "error". end: the
    scheduler's report; None if it was aborted or failed.
    """

    origin: Origin
    uid: int
    sampling: SamplingParams
    seconds: float
    first_text_s: float | None
    reason: str
    code: str | None
    end: Finished | None


class Tracer(Protocol):
    """Records each prompt once, when it ends. It never raises and never waits."""

    def ended(self, prompt: EndedPrompt) -> None: ...

    def close(self) -> None:
        """Send the last spans, in bounded time."""


def create_tracer(endpoint: str, model: str) -> Tracer:
    """Return a tracer for a collector's URL, or for its `/v1/traces` if the URL has no path.

    Raises ConfigError if OpenTelemetry is not installed.
    """
    url = urlsplit(endpoint)
    try:
        from minisgl_gateway.watch.otel import OtlpTracer
    except ImportError as error:
        raise ConfigError(
            "--otlp-endpoint needs OpenTelemetry's SDK and its OTLP exporter over HTTP "
            f"({error}): pip install 'minisgl[otel]'"
        ) from error
    path = TRACES_PATH if url.path in ("", "/") else url.path
    return OtlpTracer(url._replace(path=path).geturl(), model)
