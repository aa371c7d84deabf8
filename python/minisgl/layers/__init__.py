"""The layers of a decoder: each holds its weights and says where they are in a checkpoint.

What it is for: embedding, linear, norm, rotary and attention, built on `meta` from a
`BuildContext` (ops, communicator, dtype) and loaded later. What it does not know: families,
config.json, files. Everything of the step comes as the argument `batch`. Read next:
`minisgl.models.decoder`, which puts them together.
"""

from minisgl.layers.attention import AttentionLayer
from minisgl.layers.base import (
    BaseOP,
    BuildContext,
    Identity,
    OPList,
    Parameter,
    Part,
    Stack,
    StateLessOP,
)
from minisgl.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from minisgl.layers.linear import LinearColParallelMerged, LinearQKVMerged, LinearRowParallel
from minisgl.layers.moe import ExpertNames, MoE, SharedExpert
from minisgl.layers.norm import RMSNorm, RMSNormFused
from minisgl.layers.rotary import RotaryConfig, RotaryEmbedding, get_rope

__all__ = [
    "AttentionLayer",
    "BaseOP",
    "BuildContext",
    "ExpertNames",
    "Identity",
    "LinearColParallelMerged",
    "LinearQKVMerged",
    "LinearRowParallel",
    "MoE",
    "OPList",
    "ParallelLMHead",
    "Parameter",
    "Part",
    "RMSNorm",
    "RMSNormFused",
    "RotaryConfig",
    "RotaryEmbedding",
    "SharedExpert",
    "Stack",
    "StateLessOP",
    "VocabParallelEmbedding",
    "get_rope",
]
