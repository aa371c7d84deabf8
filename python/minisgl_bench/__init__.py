"""Benchmarks that a user runs against a model or a server.

What it is for: numbers that others can reproduce. Each benchmark writes JSON with the hardware,
the versions and the commit. `minisgl bench` lists them; each is a module here with a `main(argv)`.
`studies` has those of single parts: kernels, the scheduler, the prefix tree. `fakes` has the parts
that tests and studies put in place of an engine. No other package imports it. Read next:
`docs/performance.md`.
"""
