"""Page bookkeeping of models with window and state groups (`minisgl_zoo.cache_groups.groups`).

What it is for: it extends the core's prefix tree and cache manager, which know one full group. What
it does not know: the order of requests, what a step computes, tensors. It imports no torch. Read
next: `minisgl_zoo.cache_groups.tree`, which has a drawing.
"""
