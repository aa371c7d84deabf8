"""Makes tests/zoo/gguf/gguf_golden.zip: small random models of each family, as llama.cpp's own
converter writes them, with the logits of llama.cpp and of transformers.

    PYTHONPATH=tests python scripts/gguf_golden.py LLAMA_CPP [NAME ...]

LLAMA_CPP is a source folder of llama.cpp; needs the package llama-cpp-python, too. With names, only
these models are made, and the others stay. Also writes benchmarks/results/gguf_families.json: the
largest difference between the logits of both.
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

if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
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

from gguf_golden_cases import (  # noqa: E402 # behind it
    CASES,
    FULL,
    LINEAR,
    SIZES,
    THETA,
    VOCAB,
)

TOKENS: Final = ["<unk>", "<s>", "</s>", *map(chr, range(33, 29 + VOCAB)), "ab"]
POSITIONS: Final = (19, 39)
"""The positions whose logits are kept."""
LETTERS = {LINEAR: "M", FULL: "*", "mlp": "-", "moe": "E"}


def as_released(name: str, config: dict[str, Any]) -> dict[str, Any]:
    """Return transformers' config.json with the fields that the converter reads in released
    ones."""
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
        "afmoe": {"score_func": "sigmoid", "route_norm": True},
        "dots1": {"scoring_func": "sigmoid"},
        "deepseek2": {"scoring_func": "sigmoid", "first_k_dense_replace": 1},
        "deepseek2-yarn": {"scoring_func": "sigmoid"},
        "deepseek2-v2": {"scoring_func": "softmax"},
    }
    return {**config, **extra.get(name, {})}


def draw(model: torch.nn.Module) -> None:
    """Give the weights few different values, which pack well and are exact in every format."""
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
    root = Path(__file__).parents[1]
    names, file = sys.argv[2:], root / "benchmarks/results/gguf_families.json"
    before = json.loads(file.read_text()) if names else {"errors": {}, "made_later": {}}
    errors: dict[str, Any] = before["errors"]
    ids = np.random.default_rng(3).integers(3, VOCAB, POSITIONS[-1] + 1).tolist()
    target = root / "tests/zoo/gguf/gguf_golden.zip"
    others: dict[str, bytes] = {}
    if names:
        with zipfile.ZipFile(target) as golden:
            others = {name: golden.read(name) for name in golden.namelist()}
    with (
        zipfile.ZipFile(target, "w", zipfile.ZIP_LZMA) as golden,
        tempfile.TemporaryDirectory() as temporary,
        torch.inference_mode(),
    ):
        for name, content in others.items():
            if name.rpartition(".")[0] not in names and name != "ids":
                golden.writestr(name, content)
        for name in names or CASES:
            kind, fields = CASES[name]
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
    result = {
        "what": "largest difference of logits over the largest, llama.cpp to transformers",
        "versions": before.get("versions", versions),
        "made_later": before.get("made_later", {}) | dict.fromkeys(names, versions),
        "cpus": os.cpu_count(),
        "errors": errors,
    }
    file.write_text(json.dumps(result, indent=1) + "\n")


main()
