"""Benchmarks that a user runs against a model or a server, and tools that read their results.

What it is for: numbers that others can reproduce. Each benchmark writes JSON with the hardware,
the versions and the commit. `minisgl bench` lists them; each is a module here with a `main(argv)`.
No other package imports it. Benchmarks of kernels and of the scheduler are outside the package, in
`benchmarks/`. Read next: `docs/benchmarks.md`.
"""
