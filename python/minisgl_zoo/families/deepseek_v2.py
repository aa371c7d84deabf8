"""DeepSeek-V2 and DeepSeek-Coder-V2: DeepSeek-V3's attention; all but the first layers have a
mixture, whose router has softmax, and experts that every token takes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from minisgl_zoo.blocks.routers import SoftmaxExperts
from minisgl_zoo.families import deepseek_v3

if TYPE_CHECKING:
    from minisgl.models.config import ModelConfig
    from minisgl.models.spec import ModelSpec

BEST: dict[object, int | None] = {"greedy": None, "group_limited_greedy": 1}
"""`topk_method` of config.json -> see `SoftmaxExperts`."""


def spec(config: ModelConfig) -> ModelSpec:
    fields, made = config.fields, deepseek_v3.spec(config)
    method = str(fields.values["topk_method"])
    if method not in BEST:
        raise fields.error("topk_method", f"one of {', '.join(map(str, BEST))}")
    if fields.flag("norm_topk_prob", False):
        raise fields.error("norm_topk_prob", "false: transformers does not read it")
    assert made.moe
    layer = partial(SoftmaxExperts, config=config, best=BEST[method])
    return replace(made, moe=replace(made.moe, layer=layer, renormalise=False))


FAMILY = replace(
    deepseek_v3.FAMILY,
    architectures=("DeepseekV2ForCausalLM",),
    spec=spec,
    defaults={
        "head_dim": 64,
        "first_k_dense_replace": 0,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "moe_intermediate_size": 1407,
        "topk_method": "greedy",
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "max_position_embeddings": 2048,
    },
)
