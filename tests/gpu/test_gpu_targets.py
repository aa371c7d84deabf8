"""Our Triton kernels compile for GPUs that are not here, and fit their shared memory.

Needs Triton and no GPU. An engine that pretends to have one says what it would launch, in a process
of its own; of each kernel and config the last form is compiled, which has large blocks.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.gpu_targets import TARGETS, compiled_bytes, shared_bytes_of, type_of

pytest.importorskip("triton", reason="a CPU build of torch brings none")

from minisgl.core.args import KVCacheDType

PLAIN: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 160,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}
EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
}
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "num_local_experts": 16,
    "num_experts_per_tok": 4,
    "head_dim": 64,
}
HYBRID = {
    **PLAIN,
    "architectures": ["NemotronHForCausalLM"],
    "hybrid_override_pattern": "ME*-",
    "mamba_num_heads": 8,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_groups": 2,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
    "moe_shared_expert_intermediate_size": 128,
}
CONFIGS: tuple[tuple[dict[str, Any], KVCacheDType], ...] = (
    ({**PLAIN, **EXPERTS}, "auto"),
    ({**PLAIN, **GPT_OSS}, "auto"),
    (HYBRID, "auto"),
    ({**PLAIN, "head_dim": 80, "torch_dtype": "float16"}, "auto"),
    # No loop over pieces is unrolled for minutes.
    ({**PLAIN, "head_dim": 16, "hidden_size": 128}, "auto"),
    ({**PLAIN, **EXPERTS, "head_dim": 256, "torch_dtype": "float32"}, "auto"),
    (PLAIN, "fp8"),
    (PLAIN, "int8"),
)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("target", TARGETS)
def test_kernels_compile_and_fit(target: int, tmp_path: Path) -> None:
    shared_bytes = shared_bytes_of(__file__, target, tmp_path)
    assert {"_decode", "_split", "_extend", "_grouped_gemm", "_delta_scan"} <= set(shared_bytes)


def main(target: int) -> None:
    """Print the shared memory of each kernel, the most of its forms."""
    from helpers.engine_runs import drive
    from helpers.pretended_gpu import pretend
    from minisgl.core import SamplingParams
    from minisgl.engine import EngineConfig
    from minisgl.engine.startup import start_engine
    from minisgl.kernel.triton import decode_attention, launch

    has_pdl = target >= 90
    pretend([])
    launched: dict[Any, Any] = {}

    def note(
        launcher: Any, grid: object, args: Any, constants: Any, *, dtype: torch.dtype,
        num_warps: int, num_stages: int = 3,
    ) -> None:  # fmt: skip
        form = (tuple(map(type_of, args)), (*constants, has_pdl), num_warps, num_stages)
        launched[launcher._kernel.__name__, *form] = launcher._kernel

    patched: tuple[tuple[Any, str, Any], ...] = (
        (launch, "has_pdl", lambda: has_pdl),
        (decode_attention, "has_pdl", lambda: has_pdl),
        (launch.Launcher, "__call__", note),
    )
    for owner, name, value in patched:  # for as long as the process lives
        setattr(owner, name, value)
    shared_bytes: Counter[str] = Counter()
    rng = random.Random(0)
    for config, kv_cache_dtype in CONFIGS:
        if kv_cache_dtype == "fp8" and target < 89:
            continue  # refused there
        launched.clear()
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(config))
            graphs = 0 if config is HYBRID else 256  # the pretended runner pads prompts
            engine = start_engine(
                EngineConfig(
                    model=str(Path(folder)), device="auto", attn="triton", num_pages=8192,
                    max_running_requests=256, cuda_graph_max_bs=graphs, dummy_weight=True,
                    kv_cache_dtype=kv_cache_dtype,
                )
            )  # fmt: skip
            sampling = SamplingParams(max_tokens=5, top_k=5, top_p=0.9)
            requests = [([1] * rng.randrange(1, 600), sampling) for _ in range(70)]
            drive(engine, requests, turns=[0] * len(requests), vocab_size=160)
            engine.close()
        last = {form[0]: (form[1:], kernel) for form, kernel in launched.items()}
        for name, (form, kernel) in last.items():
            size = compiled_bytes(kernel, target, *form)
            shared_bytes[name] = max(shared_bytes[name], size)
    print(json.dumps(shared_bytes))


if __name__ == "__main__":
    main(int(sys.argv[1]))
