"""Sends a span for each prompt, with its phases as children, to an OpenTelemetry collector.

Names of attributes follow the semantic conventions for generative AI, or begin with `minisgl.`. A
span is made when its prompt has ended, so a running request costs nothing. The SDK queues spans,
and its thread sends them. If the collector is slow or gone, spans are lost; requests do not wait.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import Final

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from minisgl.server.observe import EndedPrompt
from minisgl.utils.logger import get_logger
from minisgl.version import __version__

logger = get_logger(__name__)

EXPORT_TIMEOUT_S: Final = 5.0  # of one batch with its retries; the SDK's own is 10
CLOSE_S: Final = 2.0  # the longest delay of a shutdown by the last spans; a worker has 5 s to end

_TEXT_PATHS: Final = ("/v1/completions", "/generate", "/api/generate")
"""Paths of prompts without messages. Texts that are embedded or ranked are "embeddings", and the
operation of all others is "chat"."""


class OtlpTracer:
    """A `PromptWatcher` that sends a span for each. It reads the environment's OTEL_* variables."""

    def __init__(self, endpoint: str, model: str) -> None:
        # The SDK logs every failure with a traceback; `_Exporter` logs the first one.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        ours = Resource({"service.name": "minisgl", "service.version": __version__})
        self._provider = TracerProvider(
            resource=Resource.create().merge(ours).merge(OTELResourceDetector().detect()),
            shutdown_on_exit=False,  # `close` does it, in bounded time
        )
        exporter = _Exporter(endpoint)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("minisgl", __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._model = model

    def ended(self, prompt: EndedPrompt) -> None:
        origin, sampling, code, end = prompt.origin, prompt.sampling, prompt.code, prompt.end
        try:
            carrier = {"traceparent": origin.traceparent, "tracestate": origin.tracestate}
            parent = self._propagator.extract({k: v for k, v in carrier.items() if v is not None})
            operation = "text_completion" if origin.path in _TEXT_PATHS else "chat"
            operation = "embeddings" if sampling.pooling else operation
            now = time.time_ns()
            start = now - round(prompt.seconds * 1e9)
            attributes: dict[str, AttributeValue | None] = {
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "minisgl",
                "gen_ai.request.model": self._model,
                "gen_ai.response.model": self._model,
                "error.type": code,
                "minisgl.request_id": origin.request_id,
                "minisgl.uid": prompt.uid,
            }
            if not sampling.pooling:
                attributes |= {
                    "gen_ai.request.max_tokens": sampling.max_tokens,
                    "gen_ai.request.temperature": sampling.temperature,
                    "gen_ai.request.top_p": sampling.top_p,
                    "gen_ai.request.top_k": sampling.top_k or None,
                    "gen_ai.request.seed": sampling.seed,
                    "gen_ai.request.stop_sequences": sampling.stop or None,
                    "gen_ai.response.time_to_first_chunk": prompt.first_text_s,
                    "gen_ai.response.finish_reasons": None if code else [prompt.reason],
                }
            if end is not None:
                attributes |= {
                    "gen_ai.usage.input_tokens": end.num_prompt_tokens,
                    "gen_ai.usage.output_tokens": end.num_output_tokens,
                    "gen_ai.usage.cache_read.input_tokens": end.num_cached_tokens,
                    "minisgl.num_chunks": end.num_chunks,
                    "minisgl.num_retractions": end.num_retractions,
                }
            span = self._tracer.start_span(
                f"{operation} {self._model}",
                parent,
                SpanKind.SERVER,
                {name: value for name, value in attributes.items() if value is not None},
                start_time=start,
            )
            if code is not None:
                span.set_status(StatusCode.ERROR, code)
            if end is not None:
                # The scheduler has its own clock, so only the lengths of the phases are known. They
                # follow one another, and the last one ends with the request.
                phases = {"queued": end.queued_s, "prefill": end.prefill_s, "decode": end.decode_s}
                inside = set_span_in_context(span)
                at = max(now - round(sum(phases.values()) * 1e9), start)
                for name, phase_s in phases.items():
                    child = self._tracer.start_span(name, inside, start_time=at)
                    at = min(at + round(phase_s * 1e9), now)
                    child.end(at)
            span.end(now)
        except Exception:  # a request must not fail because of its span
            logger.exception("OTLP: no span of request %d", prompt.uid)

    def close(self) -> None:
        # The SDK's shutdown waits until all exports and their retries end.
        thread = threading.Thread(target=self._provider.shutdown, daemon=True)
        thread.start()
        thread.join(CLOSE_S)
        if thread.is_alive():
            logger.warning("OTLP: the last spans were not sent within %g s", CLOSE_S)


class _Exporter(SpanExporter):
    """Exports spans. Logs when the first is lost, and when they arrive again. Mutable."""

    def __init__(self, endpoint: str) -> None:
        self._inner = OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT_S)
        self._endpoint = endpoint
        self._num_lost = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._inner.export(spans)
        if result is SpanExportResult.SUCCESS:
            if self._num_lost:
                logger.info("OTLP: %s takes spans again; %d lost", self._endpoint, self._num_lost)
            self._num_lost = 0
        else:
            if not self._num_lost:
                logger.warning("OTLP: %s takes no spans; they are lost", self._endpoint)
            self._num_lost += len(spans)
        return result

    def shutdown(self) -> None:
        self._inner.shutdown()  # type: ignore[no-untyped-call] # OpenTelemetry's, not annotated
