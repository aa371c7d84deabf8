"""The interface to OpenTelemetry, which is imported only for `--otlp-endpoint`."""

from __future__ import annotations

from urllib.parse import urlsplit

from minisgl.errors import ConfigError
from minisgl.server.args import ServerArgs
from minisgl.server.observe import PromptWatcher
from minisgl_gateway.args import ours


def create_tracer(endpoint: str, model: str) -> PromptWatcher:
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
    path = "/v1/traces" if url.path in ("", "/") else url.path
    return OtlpTracer(url._replace(path=path).geturl(), model)


def tracer_of(args: ServerArgs, model: str) -> PromptWatcher | None:
    """Return the tracer of `--otlp-endpoint`, if it is given. Raises ConfigError."""
    endpoint = ours(args).otlp_endpoint
    return create_tracer(endpoint, model) if endpoint else None
