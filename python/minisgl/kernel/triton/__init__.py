"""GPU kernels in Triton: they need nothing but torch, and run on cards of several generations.

What it is for: the launches that `minisgl.kernel.cuda` and `minisgl.attention.triton_backend` make.
What it does not know: layers, plans. Each kernel is the twin of an op of `minisgl.kernel.ops` (or
of the torch attention backend) and rounds where that one rounds.
"""
