"""Triton kernels, one file per op; `minisgl.kernel.triton` has the base ones."""
