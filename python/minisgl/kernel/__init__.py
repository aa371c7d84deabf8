"""Math ops: a plain-torch specification of each, and its fast twins.

What it is for: `Ops` (the specification and fallback), `CpuOps` (C++), `CudaOps` (Triton),
the choice between them (`registry`), the compiler (`jit`), and the comparison of token ids for the
prefix tree (`radix`). What it does not know: models, batches, schedules. Import its modules by
name: the package itself imports no torch, because host code uses `radix`. Read next:
`minisgl.kernel.ops`.
"""
