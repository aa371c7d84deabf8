"""Measures: the engine, the scheduler, kernels, start-up, and any OpenAI-compatible server.

What it is for: numbers that others can reproduce; each writes JSON with hardware, versions and
commit. What it does not know: nobody imports it. `python -m minisgl.benchmark` lists what there
is; each name is a module here with a `main(argv)`. Read next: `docs/performance.md`.
"""
