"""Math ops: a plain-torch specification of each, and its fast twins.

What it is for: `Ops` (the specification and fallback), `CpuOps` (C++), `CudaOps` (Triton and CUDA),
the choice between them (`registry`), the compiler (`jit`), and the comparison of token ids for the
prefix tree (`radix`). What it does not know: models, batches, schedules. Import the modules by
name: this package imports no torch by itself, because `radix` is used by host code. Read next:
`minisgl.kernel.ops`.
"""
