"""As `families`, for the architectures with recurrent layers."""

from __future__ import annotations

from minisgl_zoo.gguf.values import (
    Fields,
    GgufValues,
    experts,
    grouped_experts,
    per_layer,
    shared_expert,
)


def qwen35(file: GgufValues) -> Fields:
    value_heads = file.get("ssm.time_step_rank")
    interval = file.get("full_attention_interval", 4)
    types = ["linear_attention"] * (interval - 1) + ["full_attention"]
    fields: Fields = {
        "hidden_act": "silu",
        "layer_types": [types[i % interval] for i in range(file.num_layers)],
        "linear_num_key_heads": file.get("ssm.group_count"),
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": file.get("ssm.state_size"),
        "linear_value_head_dim": file.get("ssm.inner_size") // value_heads,
        "linear_conv_kernel_dim": file.get("ssm.conv_kernel"),
        "mtp_num_hidden_layers": 0,  # that of a GGUF file is not read
    }
    if file.get("expert_count", 0):
        fields |= experts(file) | shared_expert(file)
    return fields


def lfm2(file: GgufValues) -> Fields:
    kv_heads = per_layer(file, "attention.head_count_kv")
    fields: Fields = {
        "hidden_act": "silu",
        "layer_types": ["full_attention" if count else "conv" for count in kv_heads],
        "conv_L_cache": file.get("shortconv.l_cache"),
        "conv_bias": file.has("blk.0.shortconv.conv.bias"),
        "block_auto_adjust_ff_dim": False,
    }
    if file.get("expert_count", 0):
        fields |= experts(file)
        fields["num_dense_layers"] = file.get("leading_dense_block_count", 0)
        fields["routed_scaling_factor"] = file.get("expert_weights_scale", 1.0)
    return fields


def granite_hybrid(file: GgufValues) -> Fields:
    """Granite 4, including the sizes without recurrent layers. If the key `rope.scaling.finetuned`
    is false, the model has no rotary embedding."""
    kv_heads = per_layer(file, "attention.head_count_kv")
    width = file.get("expert_shared_feed_forward_length", 0) or file.get("feed_forward_length")
    fields: Fields = {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "layer_types": ["attention" if count else "mamba" for count in kv_heads],
        "position_embedding_type": "rope" if file.get("rope.scaling.finetuned", True) else "nope",
        "shared_intermediate_size": width,
        "num_local_experts": file.get("expert_count", 0),
        "num_experts_per_tok": file.get("expert_used_count", 0),
    }
    return {**fields, **_mamba(file)} if 0 in kv_heads else fields


def falcon_h1(file: GgufValues) -> Fields:
    """The file's tensors are already multiplied by the config's multipliers, so there are none."""
    return {
        **_mamba(file),
        "mamba_d_ssm": file.get("ssm.inner_size"),
        "mamba_rms_norm": file.has("blk.0.ssm_norm.weight"),
        "mamba_norm_before_gate": False,
        "projectors_bias": file.has("blk.0.ssm_out.bias"),
        "attention_bias": file.has("blk.0.attn_q.bias"),
        "mlp_bias": file.has("blk.0.ffn_up.bias"),
    }


def _mamba(file: GgufValues) -> Fields:
    heads, inner = file.get("ssm.time_step_rank"), file.get("ssm.inner_size")
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_expand": inner // file.get("embedding_length"),
        "mamba_n_groups": file.get("ssm.group_count"),
        "mamba_d_state": file.get("ssm.state_size"),
        "mamba_d_conv": file.get("ssm.conv_kernel"),
        "mamba_proj_bias": any(name.endswith("ssm_in.bias") for name in file.tensors),
    }


def nemotron_h(file: GgufValues) -> Fields:
    """A layer without KV heads and without an MLP is Mamba2."""
    kv_heads = per_layer(file, "attention.head_count_kv")
    widths = per_layer(file, "feed_forward_length")
    mlp = "E" if file.get("expert_count", 0) else "-"
    kinds = [
        "*" if kv else mlp if width else "M" for kv, width in zip(kv_heads, widths, strict=True)
    ]
    heads = file.get("ssm.time_step_rank")
    fields: Fields = {
        "hybrid_override_pattern": "".join(kinds),
        "mamba_num_heads": heads,
        "mamba_head_dim": file.get("ssm.inner_size") // heads,
        "n_groups": file.get("ssm.group_count"),
        "ssm_state_size": file.get("ssm.state_size"),
        "conv_kernel": file.get("ssm.conv_kernel"),
        "use_bias": any(name.endswith("ssm_in.bias") for name in file.tensors),
        "mlp_bias": any(name.endswith("ffn_up.bias") for name in file.tensors),
    }
    if mlp == "E":
        fields |= grouped_experts(file, num_shared=1)
        fields |= {
            "moe_shared_expert_intermediate_size": file.get("expert_shared_feed_forward_length"),
            "moe_latent_size": file.get("moe_latent_size", 0) or None,
        }
    return fields
