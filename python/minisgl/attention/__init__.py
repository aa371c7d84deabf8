"""Attention over the paged KV cache, behind one small protocol.

What it is for: `BaseAttnBackend` with its implementations, chosen once by
`create_attention_backend`. What it does not know: models, who owns which page, what runs next.
Read next: `minisgl.attention.torch_backend`, which says in plain torch what every backend computes.
"""

from minisgl.attention.base import (
    ATTENTION_BACKENDS,
    AttnLayer,
    BaseAttnBackend,
    BaseAttnMetadata,
    QKVSteps,
    Sinks,
)
from minisgl.attention.registry import create_attention_backend

__all__ = [
    "ATTENTION_BACKENDS",
    "AttnLayer",
    "BaseAttnBackend",
    "BaseAttnMetadata",
    "QKVSteps",
    "Sinks",
    "create_attention_backend",
]
