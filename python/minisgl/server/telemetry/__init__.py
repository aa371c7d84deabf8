"""What the API process measures and who can read it: the Prometheus page, log lines, spans.

What it is for: `Observer` counts what clients see; `metrics`, `tracing` and `otel` export it. What
it does not know: how a request is answered. Read next: `minisgl.server.telemetry.observe`.
"""
