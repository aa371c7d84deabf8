"""Every family on a GPU against transformers on tiny random checkpoints, model by model.

`TRITON_INTERPRET=1` runs our own kernels on a CPU, for fewer tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    Gemma2Config,
    Glm4MoeLiteConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from helpers.dense_cases import CAPS, DENSE_CASES, GEMMA
from helpers.engine_runs import drive, greedy
from helpers.family_cases import (
    ALL_EXPERTS,
    ALL_GPT_OSS,
    ALL_LATENT,
    CASES,
    SIZES,
    check_case,
    save_case,
)
from helpers.model_harness import (
    VOCAB,
    Runner,
    Sequence,
    load,
    make_reference,
    random_ids,
    relative_error,
)
from helpers.rounding_error import EACH_FAMILY, errors, margin_of

pytest.importorskip("triton", reason="a CPU build of torch brings none")

from minisgl import plugins
from minisgl.attention import BaseAttnBackend, create_attention_backend
from minisgl.attention.triton_backend import TritonAttnBackend
from minisgl.engine import EngineConfig
from minisgl.engine.startup import start_engine
from minisgl.errors import ConfigError
from minisgl.kernel.cuda import CudaOps
from minisgl.models import BaseLLMModel
from minisgl.models.spec import PoolSpec
from minisgl_kernels.ops import TunedOps


def make_backend(
    name: str, model: BaseLLMModel, page_size: int, device: torch.device
) -> BaseAttnBackend:
    """Skips what the backend says that it does not take."""
    if device.type == "cpu":
        if name != "triton":
            pytest.skip("Triton's interpreter runs our kernels alone")
        return TritonAttnBackend(TunedOps(), 132, device)
    pool = next(pool for pool in model.pools if isinstance(pool, PoolSpec))
    try:
        return create_attention_backend(
            name,
            TunedOps(),
            device,
            dtype=model.embedding.weight.dtype,
            head_dim=pool.head_dim if pool.latent else model.config.head_dim,
            latent=pool.latent,
            page_size=page_size,
            needs=model.spec.attention,
        )
    except ConfigError as error:  # the sentence that a start would end with: the reason
        pytest.skip(str(error))


WIDE = {**SIZES, "hidden_size": 256, "head_dim": 64, "num_hidden_layers": 3}


@pytest.mark.parametrize("attn", ["triton", "torch"])
@pytest.mark.parametrize("name", CASES)
@torch.inference_mode()
def test_float32_greedy_tokens_are_those_of_transformers(
    name: str, attn: str, device: torch.device, tmp_path: Path
) -> None:
    """TF32 is off, as it is by default."""
    assert not torch.backends.cuda.matmul.allow_tf32
    reference, page_size = save_case(name, tmp_path)
    ops = TunedOps()
    model = load(tmp_path, ops=ops, device=device)
    backend = make_backend(attn, model, page_size, device)
    runner = Runner(model, page_size=page_size, ops=ops, attn=backend, device=device)
    check_case(reference, runner, num_outputs=64 if device.type == "cuda" else 5)


@torch.inference_mode()
def test_without_tuned_kernels_the_tokens_are_the_same(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [row for row in plugins.installed() if not row.target.startswith("minisgl_kernels")]
    monkeypatch.setattr(plugins, "_installed", tuple(rows))
    reference, page_size = save_case("qwen3", tmp_path)
    ops = CudaOps()
    model = load(tmp_path, ops=ops, device=device)
    backend = TritonAttnBackend(ops, 132, device)
    assert not backend.takes_queries
    runner = Runner(model, page_size=page_size, ops=ops, attn=backend, device=device)
    check_case(reference, runner, num_outputs=64 if device.type == "cuda" else 5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize(
    "attn", ["triton", "fa", "fa,triton", "fa,trtllm", "fa2,triton", "fi,triton"]
)
@pytest.mark.parametrize(
    ("config_class", "changes"),
    [
        (LlamaConfig, {}),
        (MistralConfig, {"sliding_window": 13}),
        (Qwen2Config, {}),
        (Qwen3Config, {}),
        (Qwen3MoeConfig, ALL_EXPERTS),
        (GptOssConfig, {**ALL_GPT_OSS, "head_dim": 64}),
        (Gemma2Config, {**GEMMA, "head_dim": 64, **CAPS}),
        (Glm4MoeLiteConfig, ALL_LATENT),
        DENSE_CASES["gemma4-shared"][:2],
        DENSE_CASES["gemma4-experts"][:2],
    ],
)
@torch.inference_mode()
def test_16_bits_are_as_close_as_transformers(
    config_class: type[PreTrainedConfig],
    changes: dict[str, Any],
    attn: str,
    dtype: torch.dtype,
    device: torch.device,
    tmp_path: Path,
) -> None:
    """A prompt in chunks, and then tokens one by one; transformers computes on the CPU."""
    if device.type == "cpu" and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter computes bfloat16 wrong")
    reference = make_reference(config_class(**{**WIDE, **changes}))
    reference.save_pretrained(tmp_path)
    ops = TunedOps()
    model = load(tmp_path, dtype, ops=ops, device=device)
    backend = make_backend(attn, model, 16, device)
    sequence = Sequence(random_ids(60), 20 if device.type == "cuda" else 3)
    runner = Runner(model, page_size=16, ops=ops, attn=backend, device=device)
    runner.generate([sequence], chunk=17)

    ids = torch.tensor([sequence.ids[:-1]])
    exact = reference(ids).logits[0]
    theirs = reference.to(dtype)(ids).logits[0].float()
    ours = torch.cat(sequence.logits).float().cpu()
    their_error = relative_error(theirs, exact)
    assert relative_error(ours, exact) <= 1.5 * their_error
    assert relative_error(ours, theirs) <= 2 * their_error


@pytest.mark.parametrize("name", EACH_FAMILY)
@torch.inference_mode()
def test_each_family_is_as_close_to_float32_as_transformers(
    name: str, device: torch.device, tmp_path: Path
) -> None:
    """In bfloat16, which transformers computes on the same GPU."""
    if device.type == "cpu":
        pytest.skip("Triton's interpreter computes bfloat16 wrong")
    pairs = [
        errors(name, seed, tmp_path / str(seed), torch.bfloat16, device=device) for seed in range(3)
    ]
    ours, theirs = (sum(each) for each in zip(*pairs, strict=True))
    print(f"bfloat16 {name}: {ours / theirs:.3f} of transformers' error")
    assert ours <= margin_of(name) * theirs


@pytest.mark.parametrize("name", EACH_FAMILY)
def test_graphs_change_no_token_of_a_family(
    name: str, device: torch.device, tmp_path: Path
) -> None:
    """In bfloat16, alone: more rows are padded to a graph's, which may change a GEMM's rounding."""
    if device.type == "cpu":
        pytest.skip("a CPU has no CUDA graphs")
    config_class, changes, *_ = CASES[name]
    sizes = {**SIZES, "max_position_embeddings": 1024, **changes}
    make_reference(config_class(**sizes)).save_pretrained(tmp_path)
    found = []
    for graphs in (0, 4):
        engine = start_engine(
            EngineConfig(
                model=str(tmp_path), device="cuda", dtype="bfloat16", attn="triton", num_pages=64,
                max_running_requests=4, max_prefill_length=100, cuda_graph_max_bs=graphs,
            )
        )  # fmt: skip
        try:
            requests = [(random_ids(n, n), greedy(40)) for n in (5, 70, 200)]
            found.append([drive(engine, [r], vocab_size=VOCAB)[0] for r in requests])
        finally:
            engine.close()
    assert found[0] == found[1]
