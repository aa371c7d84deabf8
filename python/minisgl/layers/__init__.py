"""The layers of a decoder: each holds its weights and says where they are in a checkpoint.

What it is for: embedding, linear, norm, rotary and attention (and `minisgl.layers.moe`, imported
only for mixtures), built on `meta` from a `BuildContext` (ops, communicator, dtype, formats) and
loaded later. What it does not know: families, config.json, files, the format of a weight. The
step's data is the argument `batch`. Read next: `minisgl.models.blocks.decoder`, which combines the
layers.
"""

from minisgl.layers.attention import AttentionLayer
from minisgl.layers.base import BaseOP, BuildContext, Identity, OPList, StateLessOP
from minisgl.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from minisgl.layers.linear import LinearColParallelMerged, LinearQKVMerged, LinearRowParallel
from minisgl.layers.norm import RMSNorm, RMSNormFused
from minisgl.layers.rotary import RotaryConfig, RotaryEmbedding, get_rope

__all__ = [
    "AttentionLayer",
    "BaseOP",
    "BuildContext",
    "Identity",
    "LinearColParallelMerged",
    "LinearQKVMerged",
    "LinearRowParallel",
    "OPList",
    "ParallelLMHead",
    "RMSNorm",
    "RMSNormFused",
    "RotaryConfig",
    "RotaryEmbedding",
    "StateLessOP",
    "VocabParallelEmbedding",
    "get_rope",
]
