"""Makes tests/models/gguf_golden.zip: small random models of each family, as llama.cpp's own
converter writes them, with the logits of llama.cpp and of transformers.

    PYTHONPATH=tests python scripts/gguf_golden.py LLAMA_CPP

LLAMA_CPP is a source folder of llama.cpp; needs the package llama-cpp-python, too. Also writes
benchmarks/results/gguf_families.json: how far the logits of both are apart.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
    print(__doc__)
    sys.exit(0 if sys.argv[1:] in (["-h"], ["--help"]) else 2)
SOURCE = Path(sys.argv[1])
sys.path[:0] = [str(SOURCE / "gguf-py"), str(SOURCE)]

import gguf  # noqa: E402 # the converter's own
import llama_cpp  # noqa: E402 # behind it
import transformers  # noqa: E402 # behind it
from conversion import get_model_class  # noqa: E402 # behind it
from conversion.base import ModelBase, ModelType, get_model_architecture  # noqa: E402 # behind it
from tokenizers import Tokenizer  # noqa: E402 # behind it
from tokenizers.models import BPE  # noqa: E402 # behind it

VOCAB: Final = 96
TOKENS: Final = ["<unk>", "<s>", "</s>", *map(chr, range(33, 29 + VOCAB)), "ab"]
POSITIONS: Final = (19, 39)
"""Of which the logits are kept."""
FULL, NEAR, CONV, LINEAR = "full_attention", "sliding_attention", "conv", "linear_attention"
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rope_theta": 5e4,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
THETA = {"rope_theta": 5e4}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, **THETA}
MULTIPLIERS = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.2,
    "logits_scaling": 8.0,
}
GEMMA4: dict[str, Any] = {
    "head_dim": 16,
    "sliding_window": 9,
    "tie_word_embeddings": True,
    "final_logit_softcapping": 3.0,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": VOCAB,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "num_hidden_layers": 3,
    "layer_types": [NEAR, FULL, FULL],
    "rope_parameters": {
        NEAR: {"rope_type": "default", "rope_theta": 1e4},
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, **THETA},
    },
}
GRANITE4 = {
    **MULTIPLIERS,
    "layer_types": [LINEAR, FULL, LINEAR],
    "num_hidden_layers": 3,
    "shared_intermediate_size": 40,
    "mamba_n_heads": 4,
    "mamba_d_state": 16,
    "mamba_chunk_size": 8,
    "position_embedding_type": "nope",
}
FALCON = {
    "mamba_d_ssm": 64,
    "mamba_n_heads": 4,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_chunk_size": 8,
    "head_dim": 16,
    "embedding_multiplier": 5.6,
    "lm_head_multiplier": 0.6,
    "mlp_multipliers": [0.9, 0.6],
    "key_multiplier": 1.3,
    "attention_in_multiplier": 0.8,
    "attention_out_multiplier": 0.9,
    "ssm_multipliers": [0.7, 0.8, 0.5, 1.2, 0.9],
    "ssm_in_multiplier": 1.2,
    "ssm_out_multiplier": 0.7,
}
NEMOTRON = {
    "layers_block_type": [LINEAR, "mlp", LINEAR, FULL, "mlp", LINEAR],
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "ssm_state_size": 16,
    "n_groups": 2,
    "head_dim": 16,
    "chunk_size": 8,
}
MIXTURE = {
    **NEMOTRON,
    "layers_block_type": [LINEAR, "moe", LINEAR, FULL, "moe"],
    "n_routed_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
    "routed_scaling_factor": 2.5,
}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LOCAL = {"num_local_experts": 5, "num_experts_per_tok": 2}
PARTLY = {"rope_type": "default", **THETA, "partial_rotary_factor": 0.5}
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2],
    "long_factor": [1.5, 2.2, 2.9],
    "original_max_position_embeddings": 16,
    "partial_rotary_factor": 0.75,
    **THETA,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "mixtral": ("MixtralConfig", LOCAL),
    "mistral3": (
        "Ministral3Config",
        {
            "head_dim": 16,
            "rope_parameters": {
                **YARN,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
    ),
    "gemma": ("GemmaConfig", {"head_dim": 16, "tie_word_embeddings": True, "rope_theta": 1e4}),
    "gemma4": ("Gemma4TextConfig", GEMMA4),
    "gemma4-shared": (
        "Gemma4TextConfig",
        {
            **GEMMA4,
            "attention_k_eq_v": False,
            "num_global_key_value_heads": None,
            "hidden_size_per_layer_input": 12,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "num_hidden_layers": 4,
            "layer_types": [NEAR, FULL, NEAR, FULL],
        },
    ),
    "gemma4-experts": (
        "Gemma4TextConfig",
        {
            **GEMMA4,
            "enable_moe_block": True,
            "num_experts": 5,
            "top_k_experts": 2,
            "moe_intermediate_size": 24,
        },
    ),
    "phi3": ("Phi3Config", {"sliding_window": None, "original_max_position_embeddings": 128}),
    "phi3-longrope": (
        "Phi3Config",
        {
            "rope_parameters": LONG,
            "original_max_position_embeddings": 16,
            "tie_word_embeddings": True,
        },
    ),
    "lfm2": (
        "Lfm2Config",
        {
            "layer_types": [CONV, FULL, CONV],
            "num_hidden_layers": 3,
            "block_multiple_of": 8,
            "tie_word_embeddings": True,
        },
    ),
    "lfm2moe": (
        "Lfm2MoeConfig",
        {
            **EXPERTS,
            "num_dense_layers": 1,
            "layer_types": [CONV, FULL, CONV],
            "num_hidden_layers": 3,
            "tie_word_embeddings": True,
        },
    ),
    "granite": ("GraniteConfig", MULTIPLIERS),
    "granitemoe": ("GraniteMoeConfig", {**MULTIPLIERS, **LOCAL}),
    "granitehybrid": ("GraniteMoeHybridConfig", {**GRANITE4, **LOCAL}),
    "granitehybrid-dense": ("GraniteMoeHybridConfig", {**GRANITE4, "num_local_experts": 0}),
    "granitehybrid-attention": (
        "GraniteMoeHybridConfig",
        {**GRANITE4, **LOCAL, "layer_types": [FULL] * 3, "position_embedding_type": "rope"},
    ),
    "smollm3": ("SmolLM3Config", {"num_hidden_layers": 4, "tie_word_embeddings": True}),
    "olmo2": ("Olmo2Config", {}),
    "olmo3": (
        "Olmo3Config",
        {
            "num_hidden_layers": 4,
            "sliding_window": 9,
            "rope_parameters": {
                FULL: {**YARN, "attention_factor": 1.1386294361119891},
                NEAR: {"rope_type": "default", **THETA},
            },
        },
    ),
    "olmoe": (
        "OlmoeConfig",
        {"num_experts": 5, "num_experts_per_tok": 2, "num_key_value_heads": 4},
    ),
    "glm": ("GlmConfig", {"head_dim": 8, "rope_theta": 1e4, "rms_norm_eps": 1e-5}),
    "glm4": ("Glm4Config", {"head_dim": 16}),
    "glm4moe": (
        "Glm4MoeConfig",
        {
            "n_routed_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "head_dim": 16,
            "num_hidden_layers": 2,
            "routed_scaling_factor": 1.7,
            "use_qk_norm": True,
            "attention_bias": True,
            "num_nextn_predict_layers": 0,
        },
    ),
    "exaone4": (
        "Exaone4Config",
        {"sliding_window": None, "layer_types": [FULL] * 2},
    ),
    "seed_oss": ("SeedOssConfig", {"head_dim": 16}),
    "command-r": (
        "CohereConfig",
        {"logit_scale": 0.25, "tie_word_embeddings": True, "use_qk_norm": False},
    ),
    "cohere2": (
        "Cohere2Config",
        {
            "num_hidden_layers": 4,
            "sliding_window": 9,
            "logit_scale": 0.25,
            "tie_word_embeddings": True,
        },
    ),
    "ernie4_5": ("Ernie4_5Config", {"head_dim": 16, "tie_word_embeddings": True}),
    "hunyuan-dense": ("HunYuanDenseV1Config", {"head_dim": 16, "tie_word_embeddings": True}),
    "falcon-h1": ("FalconH1Config", FALCON),
    "falcon-h1-norm": (
        "FalconH1Config",
        {**FALCON, "mamba_rms_norm": True, "mamba_norm_before_gate": False},
    ),
    "nemotron_h": ("NemotronHConfig", NEMOTRON),
    "nemotron_h_moe": ("NemotronHConfig", MIXTURE),
    "nemotron_h_moe-latent": ("NemotronHConfig", {**MIXTURE, "moe_latent_size": 16}),
    "qwen2moe": ("Qwen2MoeConfig", {**EXPERTS, "shared_expert_intermediate_size": 56}),
    "qwen3next": (
        "Qwen3NextConfig",
        {
            **EXPERTS,
            "norm_topk_prob": True,
            "shared_expert_intermediate_size": 40,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "head_dim": 16,
            "num_hidden_layers": 4,
        },
    ),
    "qwen3vl": ("Qwen3Config", {"head_dim": 16}),
    "minimax-m2": ("MiniMaxM2Config", {**LOCAL, "head_dim": 16, "rope_parameters": PARTLY}),
}
LETTERS = {LINEAR: "M", FULL: "*", "mlp": "-", "moe": "E"}


def as_released(name: str, config: dict[str, Any]) -> dict[str, Any]:
    """transformers' config.json with the fields that the converter reads in released ones."""
    if name.startswith("granitehybrid"):
        names = {LINEAR: "mamba", FULL: "attention"}
        config["layer_types"] = [names[kind] for kind in config["layer_types"]]
        if not config["num_local_experts"]:
            config["num_experts_per_tok"] = 0
            config["intermediate_size"] = config["shared_intermediate_size"]
    if name.startswith("nemotron"):
        kinds = config.pop("layers_block_type")
        config["hybrid_override_pattern"] = "".join(LETTERS[kind] for kind in kinds)
        config["num_hidden_layers"] = len(kinds)
    if name == "nemotron_h":
        for field in [x for x in config if "expert" in x or x in ("n_group", "topk_group")]:
            del config[field]
    extra = {
        "cohere2": {"rotary_pct": 1.0},
        "glm": {"seq_length": 128},
        "qwen3vl": {
            "architectures": ["Qwen3VLForConditionalGeneration"],
            "vision_config": {"deepstack_visual_indexes": [0]},
            "rope_parameters": {**THETA, "rope_type": "default", "mrope_section": [3, 3, 2]},
        },
        "minimax-m2": {"rotary_dim": 8, "scoring_func": "sigmoid"},
    }
    return {**config, **extra.get(name, {})}


def draw(model: torch.nn.Module) -> None:
    """Weights of few values, which pack well, and are exact in every format."""
    rng = torch.Generator().manual_seed(0)
    tensors = [*model.named_parameters()]
    tensors += [
        (name, buffer)
        for name, buffer in model.named_buffers()
        if name.endswith(("layer_scalar", "e_score_correction_bias", "expert_bias"))
    ]
    for name, tensor in tensors:
        steps = torch.randint(-2, 3, tensor.shape, generator=rng).float()
        if "norm" in name or name.endswith("layer_scalar"):
            tensor.copy_(1 + steps / 4)
        elif tensor.dim() == 1:
            tensor.copy_(steps / 4)
        else:
            step = torch.tensor(tensor.shape[1] ** -0.5).log2().round().exp2()
            tensor.copy_(steps * step)


def add_vocab(self: Any) -> None:
    writer = self.gguf_writer
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * 3 + [1] * (VOCAB - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def convert(name: str, folder: Path, path: Path) -> None:
    config = as_released(name, json.loads((folder / "config.json").read_text()))
    (folder / "config.json").write_text(json.dumps(config))
    vocab = {token: index for index, token in enumerate(TOKENS)}
    Tokenizer(BPE(vocab, [("a", "b")])).save(str(folder / "tokenizer.json"))
    ModelBase.load_hparams = staticmethod(lambda *args, **options: dict(config))
    kind = get_model_class(get_model_architecture(config, ModelType.TEXT))
    kind.no_mtp = True
    converter = kind(folder, gguf.LlamaFileType.ALL_F32, path, model_name="golden")
    own: Callable[[], None] = add_vocab.__get__(getattr(converter, "impl", converter))
    getattr(converter, "impl", converter).set_vocab = own
    converter.write()


@llama_cpp.llama_log_callback
def silent(level: int, text: bytes, data: object) -> None:
    sys.stderr.write(text.decode()) if os.environ.get("V") else None


def main() -> None:
    llama_cpp.llama_log_set(silent, None)
    errors: dict[str, Any] = {}
    root = Path(__file__).parents[1]
    ids = np.random.default_rng(3).integers(3, VOCAB, POSITIONS[-1] + 1).tolist()
    target = root / "tests/models/gguf_golden.zip"
    with (
        zipfile.ZipFile(target, "w", zipfile.ZIP_LZMA) as golden,
        tempfile.TemporaryDirectory() as temporary,
        torch.inference_mode(),
    ):
        for name, (kind, fields) in CASES.items():
            folder, path = Path(temporary, name), Path(temporary, f"{name}.gguf")
            model = transformers.AutoModelForCausalLM.from_config(
                getattr(transformers, kind)(**{**SIZES, **fields}),
                dtype=torch.float32,
                attn_implementation="eager",
            ).eval()
            draw(model)
            model.save_pretrained(folder)
            convert(name, folder, path)
            theirs = model(torch.tensor([ids])).logits[0].numpy()
            engine = llama_cpp.Llama(
                str(path),
                n_ctx=128,
                n_batch=128,
                logits_all=True,
                verbose=bool(os.environ.get("V")),
                type_k=0,
                type_v=0,
            )
            engine.eval(ids)
            logits = engine.scores[: len(ids)].copy()
            errors[name] = float(np.abs(logits - theirs).max() / np.abs(theirs).max())
            print(name, f"{errors[name]:.1e}", path.stat().st_size, flush=True)
            kept = np.stack([logits, theirs])[:, list(POSITIONS)].astype(np.float32)
            golden.write(path, path.name)
            golden.writestr(f"{name}.logits", kept.tobytes())
        golden.writestr("ids", json.dumps(ids))
    versions = {
        name: importlib.metadata.version(name) for name in ("llama-cpp-python", "transformers")
    }
    result = {"what": "largest difference of logits over the largest, llama.cpp to transformers"}
    (root / "benchmarks/results/gguf_families.json").write_text(
        json.dumps(
            {**result, "versions": versions, "cpus": os.cpu_count(), "errors": errors}, indent=1
        )
        + "\n"
    )


main()
