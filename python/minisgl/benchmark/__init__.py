"""A client that measures a server, and the times of work on a GPU.

What it is for: `client` and `perf`. What it does not know: the benchmarks, which are in
`minisgl_bench`. Read next: `minisgl.benchmark.client`.
"""
