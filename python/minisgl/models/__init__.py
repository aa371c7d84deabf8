"""From a checkpoint's config.json to a model that computes logits.

What it is for: `ModelConfig` (what config.json says), a `ModelSpec` per family (what differs
between families, as data), one decoder built from a spec, and the strict loader of its weights.
What it does not know: requests, sampling, where pages are. Read next:
`minisgl.models.spec`, then `minisgl.models.families.dense` and `minisgl.models.blocks.decoder`.
"""

from minisgl.layers import RotaryConfig
from minisgl.models.build import build_model, load_model
from minisgl.models.config import ModelConfig
from minisgl.models.loading.reading import read_config
from minisgl.models.loading.weight import load_weight
from minisgl.models.registry import get_model_class, spec_of, supported_architectures
from minisgl.models.spec import BaseLLMModel, LayerSpec, ModelSpec, PoolBuild, PoolSpec

__all__ = [
    "BaseLLMModel",
    "LayerSpec",
    "ModelConfig",
    "ModelSpec",
    "PoolBuild",
    "PoolSpec",
    "RotaryConfig",
    "build_model",
    "get_model_class",
    "load_model",
    "load_weight",
    "read_config",
    "spec_of",
    "supported_architectures",
]
