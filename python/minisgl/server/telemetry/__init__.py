"""The API process's measurements, and their readers: the Prometheus page, log lines, spans.

What it is for: `Observer` counts what clients see; `metrics`, `tracing` and `otel` export it. What
it does not know: how a request is answered. Read next: `minisgl.server.telemetry.observe`.
"""
