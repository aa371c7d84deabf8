"""A first start compiles all that requests need: none is held up by the compiler later.

Each case runs in a process of its own, as a process compiles a kernel once, with empty caches.
Without a GPU (`TRITON_INTERPRET=1`) kernels compute nothing, and tell in which form they would be.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

VOCAB = 160
WIDE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}
DENSE = {**WIDE, "architectures": ["Qwen3ForCausalLM"], "num_key_value_heads": 8}
EXPERTS = {
    **WIDE,
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
}
PADDED, UNPADDED = (256, 256), (0, 64)  # rows of graphs and of the engine


@pytest.mark.timeout(400)
@pytest.mark.parametrize("rows", [PADDED, UNPADDED], ids=["graphs", "no graphs"])
@pytest.mark.parametrize("attn", ["auto", "triton"])
@pytest.mark.parametrize("config", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_nothing_is_compiled_after_the_start(
    config: dict[str, Any], attn: str, rows: tuple[int, int], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    caches = {"TRITON_CACHE_DIR": str(tmp_path / "t"), "MINISGL_CACHE_DIR": str(tmp_path / "m")}
    result = subprocess.run(
        [sys.executable, __file__, str(tmp_path), attn, *map(str, rows)],
        env={**os.environ, **caches, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    at_start, later = json.loads(result.stdout.splitlines()[-1])
    assert any("_decode" in kernel for kernel in at_start)
    assert later == []


def main(folder: Path, attn: str, max_graph_rows: int, max_running: int) -> None:
    """Print which kernels are compiled at the start, and which when requests come."""
    import triton
    from test_equalities import drive

    from minisgl.core import SamplingParams
    from minisgl.engine import Engine, EngineConfig

    compiled: list[str] = []
    if torch.cuda.is_available():
        triton.knobs.compilation.listener = lambda *, src, **_: compiled.append(src.name)
    else:
        pretend(compiled)
    config = EngineConfig(
        folder=folder,
        device="auto",
        attn=attn,
        num_pages=8192,
        max_running=max_running,
        cuda_graph_max_bs=max_graph_rows,
        dummy_weight=True,
    )
    engine = Engine(config)
    at_start = list(compiled)
    rng = random.Random(0)

    def ids(count: int) -> list[int]:
        return [rng.randrange(VOCAB) for _ in range(count)]

    def sampling(index: int) -> SamplingParams:
        filters: dict[str, Any] = {"top_k": 5} if index % 2 else {"top_p": 0.5, "min_p": 0.01}
        kinds: tuple[dict[str, Any], ...] = ({"temperature": 0.0}, {}, filters)
        return SamplingParams(max_tokens=rng.randrange(1, 60), seed=index, **kinds[index % 3])

    beginning = ids(700)
    waves = ((1, 1, 0), (9, 900, 0), (20, 40, 700), (256, 100, 0), (300, 3, 0), (90, 900, 0))
    for count, most, shared in waves:  # requests, prompt tokens of their own, and in common
        requests = [
            (beginning[:shared] + ids(rng.randrange(1, most + 1)), sampling(index))
            for index in range(count)
        ]
        for turns in ([0] * count, [rng.randrange(count * 2) for _ in range(count)]):
            drive(engine, requests, turns=turns, vocab_size=VOCAB)
    engine.close()
    print(json.dumps([at_start, compiled[len(at_start) :]]))


def pretend(compiled: list[str]) -> None:
    """Have engines of this process take a GPU's way on a CPU, and kernels say here what they are
    when they are launched in a form for the first time."""
    from test_replay import ReplayDevice

    from minisgl.attention.paged import HybridBackend, PagedAttnBackend
    from minisgl.attention.triton_backend import TritonAttnBackend
    from minisgl.core import BatchSamplingArgs
    from minisgl.engine import Engine, engine, probe
    from minisgl.engine.cuda import CudaDevice
    from minisgl.kernel.cuda import CudaOps
    from minisgl.kernel.ops import Ops
    from minisgl.kernel.triton.launch import Launcher

    class Device(ReplayDevice):
        probe_tokens = CudaDevice.probe_tokens
        min_chunk_tokens = CudaDevice.min_chunk_tokens
        stall_target_s = CudaDevice.stall_target_s

        def warm_up_rows(self, most: int) -> list[int]:
            # It reads nothing of the device that it belongs to, which only a GPU could make.
            return CudaDevice.warm_up_rows(self, most)  # type: ignore[arg-type]

        def create_runner(self, max_graph_rows: int, max_prompt_tokens: int) -> Any:
            if not max_graph_rows:
                return super(ReplayDevice, self).create_runner(0, 0)
            return super().create_runner(max_graph_rows, max_prompt_tokens)

    class NumbersOps(CudaOps):
        """Ids stay ids where nothing is computed."""

        take_ids, write_pages = Ops.take_ids, Ops.write_pages

        def sample(self, logits_SV: torch.Tensor, args: BatchSamplingArgs) -> torch.Tensor:
            return super().sample(logits_SV, args).zero_()

    class PromptsElsewhere(TritonAttnBackend):
        """As FlashAttention, which is no kernel of ours."""

        def extend(self, *args: Any) -> None:
            pass

    def launch(
        launcher: Launcher, grid: object, args: object, constants: Any, **options: Any
    ) -> None:
        kernel = f"{launcher._kernel.__name__} {constants} {options}"
        if kernel not in compiled:
            compiled.append(kernel)

    def create_attention(name: str, ops: Ops, device: torch.device, **_: Any) -> PagedAttnBackend:
        decode = TritonAttnBackend(ops, 132, device)
        if name == "triton":
            return decode
        return HybridBackend(ops, PromptsElsewhere(ops, 132, device), decode)

    def prefill_s(engine: Engine, num_tokens: int, repeats: int = 3) -> float:
        """As on an H200, where launching takes 8 ms."""
        plan = probe.probe_plan(engine, 0, [num_tokens], sampling=probe.GREEDY)
        probe.run_probe(engine, plan)
        launching_s = 0 if num_tokens <= engine.runner.max_tokens else 0.008
        return max(launching_s, num_tokens / 400_000)

    patched: tuple[tuple[Any, str, Any], ...] = (
        (Launcher, "__call__", launch),
        (torch.cuda, "graph_pool_handle", lambda: None),
        (engine, "create_device", lambda *_: Device()),
        (engine, "create_ops", lambda _: NumbersOps()),
        (engine, "create_attention_backend", create_attention),
        (probe, "_prefill_s", prefill_s),
    )
    for owner, name, value in patched:  # for as long as the process lives
        setattr(owner, name, value)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
