"""GPU kernels in Triton: they need no package beside torch, and run on several generations of GPUs.

What it is for: the launches of `minisgl.kernel.cuda` and `minisgl.attention.triton_backend`. What
it does not know: layers, plans. Each kernel is the twin of an op of `minisgl.kernel.ops` (or of the
torch attention backend) and rounds at the same places. Read next: `minisgl.kernel.triton.launch`.
"""
