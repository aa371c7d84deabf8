"""An engine that follows the GPU's code path on a CPU without computing, to list its kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


def pretend(compiled: list[str]) -> None:
    """Patch this process: its engines follow the GPU's code path on a CPU, and each kernel config
    is appended to `compiled` at its first launch."""
    from helpers.replay import ReplayDevice
    from minisgl.attention.paged import HybridBackend, PagedAttnBackend
    from minisgl.attention.triton_backend import TritonAttnBackend
    from minisgl.core import BatchSamplingArgs
    from minisgl.engine import Engine, connect, contexts, engine
    from minisgl.engine.cuda import CudaDevice
    from minisgl.engine.startup import graphs, probe
    from minisgl.kernel.ops import Ops
    from minisgl.kernel.triton.launch import Launcher
    from minisgl_kernels.ops import TunedOps
    from minisgl_kernels.recurrent import TritonRecurrentBackend
    from minisgl_zoo.recurrent import spec as recurrent

    class Device(ReplayDevice):
        best_chunk = CudaDevice.best_chunk
        max_threads = 0
        can_compile_only = True

        def warm_up_rows(self, most: int) -> list[int]:
            # It reads nothing of the device that it belongs to, which only a GPU could make.
            return CudaDevice.warm_up_rows(self, most)

        def compile_only(self, steps: Iterable[Callable[[], Callable[[], object]]]) -> None:
            for step in steps:
                step()()

        def create_runner(self, max_graph_rows: int, max_prompt_tokens: int, ops: Ops) -> Any:
            if not max_graph_rows:
                return super(ReplayDevice, self).create_runner(0, 0, ops)
            return super().create_runner(max_graph_rows, max_prompt_tokens, ops)

    class NumbersOps(TunedOps):
        """Ops that return valid ids although nothing is computed."""

        take_ids, write_pages = Ops.take_ids, Ops.write_pages

        def sample(self, logits_SV: torch.Tensor, args: BatchSamplingArgs) -> torch.Tensor:
            return super().sample(logits_SV, args).zero_()

    class PromptsElsewhere(TritonAttnBackend):
        """Decode by our kernels; prompts as if by FlashAttention, which is no kernel of ours."""

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

    def create_recurrent(
        name: str, ops: Ops, device: torch.device, *args: Any
    ) -> TritonRecurrentBackend:
        return TritonRecurrentBackend(*args)

    def prompt_us(engine: Engine, num_tokens: int, rounds: int = 3) -> int:
        """Return the time of an H200, where launching takes 8 ms."""
        plan = probe.probe_plan(engine, 0, [num_tokens], sampling=probe.GREEDY)
        probe.run_probe(engine, plan)
        launching_us = 0 if num_tokens <= engine.runner.max_tokens else 8000
        return max(launching_us, num_tokens * 10 // 4)

    patched: tuple[tuple[Any, str, Any], ...] = (
        (Launcher, "__call__", launch),
        (torch.cuda, "graph_pool_handle", lambda: None),
        (connect, "create_device", lambda *_: Device()),
        (engine, "create_ops", lambda _: NumbersOps()),
        (contexts, "create_attention_backend", create_attention),
        (recurrent, "create_recurrent_backend", create_recurrent),
        (graphs, "_prompt_us", prompt_us),
    )
    for owner, name, value in patched:  # for as long as the process lives
        setattr(owner, name, value)
