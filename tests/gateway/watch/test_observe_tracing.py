"""Spans that a collector on loopback gets, decoded with OpenTelemetry's own protobuf records."""

from __future__ import annotations

import builtins
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from helpers.scripted_server import MODEL, ScriptedServer
from minisgl.core import SamplingParams
from minisgl.errors import ConfigError
from minisgl.server.clients import Origin
from minisgl.server.observe import EndedPrompt, Observer, PromptWatcher
from minisgl_gateway.watch.tracing import create_tracer

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector:
    """An OTLP/HTTP collector. Mutable: it keeps what it gets, until `broken` says to refuse it."""

    def __init__(self) -> None:
        self.requests: list[ExportTraceServiceRequest] = []
        self.paths: set[str] = set()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector.paths.add(self.path)
                collector.requests.append(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *args: Any) -> None:
                pass

        self._http = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,))
        self._thread.start()

    def close(self) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()

    @property
    def spans(self) -> list[Span]:
        return [
            span
            for request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


def attributes(span: Span) -> dict[str, Any]:
    found = {}
    for item in span.attributes:
        kind = item.value.WhichOneof("value")
        assert kind is not None
        value = getattr(item.value, kind)
        found[item.key] = [x.string_value for x in value.values] if kind == "array_value" else value
    return found


def ask(tracer: PromptWatcher, prompt: str, **headers: str) -> httpx.Response:
    with ScriptedServer(observer=Observer(watchers=[tracer])) as server:
        body = {"prompt": prompt, "max_tokens": 9, "temperature": 0.5, "stop": ["#"]}
        response = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers)
    tracer.close()
    return response


def test_a_span_and_its_phases(collector: Collector) -> None:
    before = time.time_ns()
    traceparent = f"00-{TRACE_ID}-{PARENT_ID}-01"
    tracer = create_tracer(collector.url, MODEL)
    answer = ask(tracer, "one two", traceparent=traceparent, **{"X-Request-Id": "me-1"})
    assert answer.status_code == 200
    assert collector.paths == {"/v1/traces"}
    [resource] = collector.requests[0].resource_spans
    assert ("service.name", "minisgl") in [
        (item.key, item.value.string_value) for item in resource.resource.attributes
    ]
    spans = {span.name: span for span in collector.spans}
    assert set(spans) == {f"text_completion {MODEL}", "queued", "prefill", "decode"}
    whole = spans[f"text_completion {MODEL}"]
    assert (whole.trace_id.hex(), whole.parent_span_id.hex()) == (TRACE_ID, PARENT_ID)
    assert whole.kind == Span.SPAN_KIND_SERVER
    assert whole.status.code == Status.STATUS_CODE_UNSET
    found = attributes(whole)
    assert found.pop("gen_ai.response.time_to_first_chunk") > 0
    assert found == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "minisgl",
        "gen_ai.request.model": MODEL,
        "gen_ai.response.model": MODEL,
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.stop_sequences": ["#"],
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.usage.input_tokens": 2,
        "gen_ai.usage.output_tokens": 2,
        "gen_ai.usage.cache_read.input_tokens": 1,
        "minisgl.num_chunks": 3,
        "minisgl.num_retractions": 1,
        "minisgl.request_id": "me-1",
        "minisgl.uid": 0,
    }
    assert before <= whole.start_time_unix_nano <= whole.end_time_unix_nano <= time.time_ns()
    at = whole.start_time_unix_nano
    for name in ("queued", "prefill", "decode"):  # of 1.75 s that the script invents
        child = spans[name]
        assert child.parent_span_id == whole.span_id
        assert at <= child.start_time_unix_nano <= child.end_time_unix_nano
        assert child.end_time_unix_nano <= whole.end_time_unix_nano
        at = child.end_time_unix_nano


@pytest.mark.parametrize(
    ("prompt", "code", "status"),
    [("!refuse", "context_length_exceeded", 400), ("a !fail", "engine_error", 500)],
)
def test_an_error_is_marked(collector: Collector, prompt: str, code: str, status: int) -> None:
    assert ask(create_tracer(collector.url, MODEL), prompt).status_code == status
    [span] = collector.spans
    assert (span.status.code, attributes(span)["error.type"]) == (Status.STATUS_CODE_ERROR, code)
    assert not span.parent_span_id
    assert "gen_ai.usage.input_tokens" not in attributes(span)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/api/chat"])
def test_messages_are_a_chat(collector: Collector, path: str) -> None:
    tracer = create_tracer(collector.url, MODEL)
    body = {"model": MODEL, "messages": [{"role": "user", "content": "one"}]}
    body |= {"max_tokens": 9} if path.startswith("/v1") else {}
    with ScriptedServer(observer=Observer(watchers=[tracer])) as server:
        assert httpx.post(server.url + path, json=body).status_code == 200
    tracer.close()
    assert f"chat {MODEL}" in {span.name for span in collector.spans}


def test_embedded_texts_are_no_chat(collector: Collector) -> None:
    tracer = create_tracer(collector.url, MODEL)
    tracer.ended(
        EndedPrompt(
            origin=Origin(request_id="me-2", path="/v1/embeddings"),
            uid=1,
            sampling=SamplingParams(pooling="mean", max_tokens=0),
            seconds=0.1,
            first_text_s=None,
            reason="length",
            code=None,
            end=None,
        )
    )
    tracer.close()
    [span] = collector.spans
    assert span.name == f"embeddings {MODEL}"
    assert attributes(span) == {  # nothing of sampling, and no reason that a text ended
        "gen_ai.operation.name": "embeddings",
        "gen_ai.provider.name": "minisgl",
        "gen_ai.request.model": MODEL,
        "gen_ai.response.model": MODEL,
        "minisgl.request_id": "me-2",
        "minisgl.uid": 1,
    }


def test_a_trace_that_is_not_sampled(collector: Collector) -> None:
    tracer = create_tracer(collector.url, MODEL)
    assert ask(tracer, "x", traceparent=f"00-{TRACE_ID}-{PARENT_ID}-00").status_code == 200
    assert not collector.spans


def test_a_missing_collector(caplog: pytest.LogCaptureFixture) -> None:
    tracer = create_tracer("http://127.0.0.1:9/x", MODEL)
    start = time.monotonic()
    assert ask(tracer, "one", traceparent="nonsense").status_code == 200
    assert time.monotonic() - start < 60
    assert any(record.getMessage().startswith("OTLP: ") for record in caplog.records)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    plain_import = builtins.__import__

    def no_otel(name: str, *args: Any) -> Any:
        if name == "minisgl_gateway.watch.otel":
            raise ImportError("No module named 'opentelemetry'")
        return plain_import(name, *args)

    monkeypatch.setattr(builtins, "__import__", no_otel)
    with pytest.raises(ConfigError, match=r"pip install 'minisgl\[otel\]'"):
        create_tracer("http://localhost:4318", MODEL)
