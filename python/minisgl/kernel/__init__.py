"""Math ops: a plain-torch specification of each, and its fast twins.

What it is for: `Ops` (the specification and fallback), `CpuOps` (C++), `CudaOps` (Triton and CUDA),
who chooses (`registry`), the compiler behind them (`jit`), and the token-run comparison of the
prefix tree (`radix`). What it does not know: models, batches, schedules. Import the modules by
name: this package imports no torch by itself, because `radix` is used by host code. Read next:
`minisgl.kernel.ops`.
"""
