"""Loading needs no more memory than the model plus one layer in bfloat16.

It is measured in a process for each case, forked from one that has the imports: anonymous memory,
since pages of mapped files are the system's. Planted once, and noticed: a whole matrix quantised in
float32 at a time (it took 15 layers), shapes that are found with `torch.stack` on meta (which
imports torch's compiler).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import save_file
from torch import Tensor

from minisgl_zoo.gguf.header import read_header
from minisgl_zoo.gguf.index import write_files

SIZE, INNER, VOCAB, LAYERS = 1280, 5120, 64, 2
MATRICES = {
    "self_attn.q_proj": (SIZE, SIZE),
    "self_attn.k_proj": (SIZE, SIZE),
    "self_attn.v_proj": (SIZE, SIZE),
    "self_attn.o_proj": (SIZE, SIZE),
    "mlp.gate_proj": (INNER, SIZE),
    "mlp.up_proj": (INNER, SIZE),
    "mlp.down_proj": (SIZE, INNER),
}
OF_FILE = (
    "attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down",
)  # fmt: skip
LAYER_BYTES = 2 * sum(rows * columns for rows, columns in MATRICES.values())
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": SIZE,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 10,
    "max_position_embeddings": 64,
    "torch_dtype": "bfloat16",
}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False}

MEASURE = """
import os, re, sys, threading, time
from pathlib import Path
import torch
from minisgl.distributed import SingleRank
from minisgl.kernel.registry import create_ops
from minisgl.models import load_model
import minisgl_zoo.weights.methods, minisgl_zoo.weights.online, minisgl_zoo.weights.panels
import minisgl_zoo.gguf.formats, gguf

def anonymous():
    return 1024 * int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1])

def watch():
    global peak
    while not is_done:
        peak = max(peak, anonymous())
        time.sleep(0.0005)

def measure(folder, quantization):
    global is_done, peak
    is_done, start = False, anonymous()
    peak = start
    thread = threading.Thread(target=watch)
    thread.start()
    model = load_model(
        Path(folder), dtype=torch.bfloat16, device=torch.device("cpu"), ops=ops,
        comm=SingleRank(), quantization=quantization or None,
    )
    is_done = True
    thread.join()
    print(model.num_weight_bytes, peak - start, "sympy" in sys.modules, flush=True)

ops = create_ops(torch.device("cpu"))
for case in sys.argv[1:]:
    if (child := os.fork()) == 0:
        try:
            measure(*case.split("="))
        finally:
            os._exit(0)
    os.waitpid(child, 0)
"""
CASES = (
    ("plain", ""), ("plain", "fp8"), ("plain", "int8"), ("plain", "int4"), ("gptq", ""),
    ("gguf", ""),
)  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    generator = torch.Generator().manual_seed(0)
    plain: dict[str, Tensor] = {}
    gptq: dict[str, Tensor] = {}
    for name, (rows, columns) in MATRICES.items():
        plain[f"{name}.weight"] = torch.randn(rows, columns, generator=generator).bfloat16()
        words = torch.randint(-(2**31), 2**31, (columns // 8, rows), generator=generator)
        gptq |= {
            f"{name}.qweight": words.int(),
            f"{name}.qzeros": torch.full((columns // 128, rows // 8), 0x77777777).int(),
            f"{name}.scales": torch.full((columns // 128, rows), 0.01).half(),
        }
    made = {}
    configs: dict[str, dict[str, Any]] = {
        "plain": CONFIG,
        "gptq": {**CONFIG, "quantization_config": GPTQ},
    }
    for kind, tensors in (("plain", plain), ("gptq", gptq)):
        made[kind] = folder = tmp_path_factory.mktemp(kind)
        (folder / "config.json").write_text(json.dumps(configs[kind]))
        whole = {
            "model.embed_tokens.weight": torch.ones(VOCAB, SIZE).bfloat16(),
            "lm_head.weight": torch.ones(VOCAB, SIZE).bfloat16(),
            "model.norm.weight": torch.ones(SIZE).bfloat16(),
        }
        for layer in range(LAYERS):
            prefix = f"model.layers.{layer}"
            for norm in ("input_layernorm", "post_attention_layernorm"):
                whole[f"{prefix}.{norm}.weight"] = torch.ones(SIZE).bfloat16()
            whole |= {f"{prefix}.{name}": tensor.clone() for name, tensor in tensors.items()}
        save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})
    return {**made, "gguf": gguf_folder(plain, tmp_path_factory.mktemp("gguf"))}


def gguf_folder(plain: dict[str, Tensor], folder: Path) -> Path:
    """Of the same model: matrices in Q8_0, values and down projections in Q4_0."""
    file = folder / "llama.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    types = {}
    for layer in range(LAYERS):
        for name, old in zip(MATRICES, OF_FILE, strict=True):
            kind = Kind.Q4_0 if old in ("attn_v", "ffn_down") else Kind.Q8_0
            values = plain[f"{name}.weight"].float().numpy()
            tensor = f"blk.{layer}.{old}.weight"
            writer.add_tensor(tensor, gguf.quants.quantize(values, kind), raw_dtype=kind)
            types[tensor] = kind.name
        for old in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{old}.weight", np.ones(SIZE, np.float32))
    writer.add_tensor("output_norm.weight", np.ones(SIZE, np.float32))
    for old in ("token_embd", "output"):
        writer.add_tensor(f"{old}.weight", np.ones((VOCAB, SIZE), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    section = {"quant_method": "gguf", "arch": "llama", "types": types}
    config = json.dumps({**CONFIG, "quantization_config": section})
    values, tensors = read_header(file)
    write_files(folder, {"config.json": config}, values, [(file, tensors)])
    return folder


@pytest.fixture(scope="module")
def measured(folders: dict[str, Path]) -> dict[tuple[str, str], list[str]]:
    """Of each case: the model's bytes, the peak, and whether a compiler was imported."""
    cases = [f"{folders[kind]}={quantization}" for kind, quantization in CASES]
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *cases], capture_output=True, text=True, check=True
    )
    lines = [line.split() for line in done.stdout.splitlines()[-len(CASES) :]]
    assert [len(words) for words in lines] == [3] * len(CASES), done.stderr
    return dict(zip(CASES, lines, strict=True))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_loading_takes_the_model_and_a_layer(
    measured: dict[tuple[str, str], list[str]], case: tuple[str, str]
) -> None:
    model, peak, imports_a_compiler = measured[case]
    assert int(peak) <= int(model) + LAYER_BYTES
    assert imports_a_compiler == "False"
