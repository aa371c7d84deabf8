"""Measurements of the API process, and the routes and exports that show them.

What it is for: `observe` counts what clients see; `metrics` (a Prometheus page), `tracing` and
`otel` (spans) export it. `profile`, `xray` and `replica` are routes that ask the workers. What it
does not know: how a request is answered. Read next: `minisgl.server.observe`.
"""
