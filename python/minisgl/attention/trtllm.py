"""TensorRT-LLM's decode kernels (XQA), which FlashInfer ships. They are for decode rows only.

FlashInfer compiles them when they are first needed. That needs the CUDA toolkit and about a minute.
Nothing is planned on the host, so a graph can capture a call.

Axes: as in `minisgl.attention.paged`; P pages of a row of the table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from minisgl.attention.base import AttnLayer
from minisgl.attention.flash_infer import no_flashinfer
from minisgl.attention.paged import PagedAttnBackend, PagedMetadata, unusable, window_left
from minisgl.core import PoolBatch
from minisgl.kernel.ops import Ops

PAGE_SIZES = (16, 32, 64, 128)
HEAD_DIMS = (64, 128)
"""The sizes that are tested here; XQA may take more."""
ARCHS = (9, 10, 12)  # majors of compute capability
WORKSPACE_BYTES = 128 << 20  # what FlashInfer's documentation asks for; zero before the first use


class TensorRTLLMBackend(PagedAttnBackend):
    name = "trtllm"

    def __init__(
        self, ops: Ops, device: torch.device, dtype: torch.dtype, head_dim: int, page_size: int
    ) -> None:
        """Raises ConfigError if the package is missing, or the GPU or the model does not fit."""
        super().__init__(ops)
        if torch.cuda.get_device_capability(device)[0] not in ARCHS:
            raise unusable("trtllm", "runs on Hopper and Blackwell GPUs only")
        if dtype.itemsize != 2 or head_dim not in HEAD_DIMS or page_size not in PAGE_SIZES:
            sizes, pages = (", ".join(map(str, each)) for each in (HEAD_DIMS, PAGE_SIZES))
            raise unusable(
                "trtllm",
                f"takes bfloat16 and float16 with head dims {sizes} and pages of {pages} tokens; "
                f"here are {str(dtype)[6:]}, {head_dim} and {page_size}",
            )
        self._run = _load()
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)

    def decode(self, q_DNH: Tensor, layer: AttnLayer, batch: PoolBatch, out_DNH: Tensor) -> None:
        assert batch.rows is not None
        metadata: PagedMetadata = batch.attn_metadata
        rows, table, num_rows = batch.rows, batch.context.page_table, len(q_DNH)
        pool = batch.context.kv_pool.layer(layer.layer_id)
        self._run(
            q_DNH,
            (pool.k, pool.v),
            self._workspace,
            metadata.once("decode_table", lambda: table[rows[0, :num_rows]]),
            rows[3, :num_rows].view(torch.uint32),
            table.shape[1] * pool.k.shape[1],
            bmm1_scale=layer.scale,
            window_left=window_left(layer),
            out=out_DNH,
            kv_layout="NHD",
        )

    def extend(
        self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, layer: AttnLayer, batch: PoolBatch,
        out_TNH: Tensor,
    ) -> None:  # fmt: skip
        raise AssertionError("trtllm is only ever the second half of a HybridBackend")


def _load() -> Callable[..., Any]:
    try:
        from flashinfer.decode import xqa_batch_decode_with_kv_cache
    except ImportError as error:
        raise no_flashinfer("trtllm", error) from error
    run: Callable[..., Any] = xqa_batch_decode_with_kv_cache
    return run
