"""Benchmarks of kernels and of the scheduler, and comparisons; not part of the package.

Run `python -m minisgl_bench.studies NAME [flags]` in the root of a checkout, with the package
installed or PYTHONPATH=python; without NAME it lists what there is. What a user runs against a
server or a model is `minisgl bench`. Results that the pages quote are in `results/`.
"""
