"""What the package FlashInfer has (Ye et al., MLSys 2025): its paged attention, for prompts and
chunks only, and TensorRT-LLM's decode kernels (XQA), for decode rows only.

The attention runs on every GPU since Ampere, while FlashAttention 3 needs Hopper. FlashInfer
compiles its kernels when they are first needed, with the CUDA toolkit. A plan of a step of the
attention costs the host little beside a prompt and too much beside a decode step
(minisgl_kernels/README.md). It is copied to the GPU from pinned memory that the wrapper's next plan
overwrites, so steps take turns with two wrappers. XQA plans nothing on the host, so a graph can
capture a call.

Axes: as in `minisgl.attention.paged`; P pages of a row of the table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minisgl.attention.base import AttnLayer
from minisgl.attention.paged import PagedAttnBackend, PagedMetadata, sizes_of, unusable, window_left
from minisgl.core import Plan, PoolBatch
from minisgl.errors import ConfigError
from minisgl.kernel.ops import Ops

HEAD_DIMS = (64, 128, 256)
WORKSPACE_BYTES = 256 << 20  # for rows of 40,000 tokens; FlashInfer's documentation says half
MIN_ARCH = (8, 0)
XQA_PAGE_SIZES = (16, 32, 64, 128)
XQA_HEAD_DIMS = (64, 128)
"""The sizes that are tested here; XQA may take more."""
XQA_ARCHS = (9, 10, 12)  # majors of compute capability
XQA_WORKSPACE_BYTES = 128 << 20
"""What FlashInfer's documentation asks for. It is zero before the first use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlashInferMetadata(PagedMetadata):
    """turn: 0 or 1, which alternate. lengths, table_idxs, ends: of the rows after the decode
    rows."""

    turn: int
    lengths: list[int]
    table_idxs: list[int]
    ends: list[int]


class FlashInferBackend(PagedAttnBackend):
    """Mutable: the wrappers, each of which holds the plan of a step."""

    name = "fi"

    def __init__(self, ops: Ops, device: torch.device, dtype: torch.dtype, head_dim: int) -> None:
        """Raises ConfigError if the package is missing, or the GPU or the model does not fit."""
        super().__init__(ops)
        if torch.cuda.get_device_capability(device) < MIN_ARCH:
            raise unusable("fi", "needs an Ampere GPU or later")
        if dtype.itemsize != 2 or head_dim not in HEAD_DIMS:
            sizes = ", ".join(map(str, HEAD_DIMS))
            raise unusable(
                "fi",
                f"takes bfloat16 and float16 with head dims {sizes}; here are {str(dtype)[6:]} and "
                f"{head_dim}",
            )
        try:
            from flashinfer import BatchPrefillWithPagedKVCacheWrapper
        except ImportError as error:
            raise no_flashinfer("fi", error) from error
        self._create: Any = BatchPrefillWithPagedKVCacheWrapper
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._wrappers: dict[tuple[int, int], Any] = {}  # by turn and window

    def prepare(self, plan: Plan) -> FlashInferMetadata:
        first = plan.num_decodes
        starts, ends = plan.starts[first:], plan.ends[first:]
        return FlashInferMetadata(
            **sizes_of(plan),
            turn=plan.step % 2,
            lengths=[end - start for start, end in zip(starts, ends, strict=True)],
            table_idxs=plan.table_idxs[first:],
            ends=ends,
        )

    def decode(self, q_DNH: Tensor, layer: AttnLayer, batch: PoolBatch, out_DNH: Tensor) -> None:
        raise AssertionError("fi is only ever the first half of a HybridBackend")

    def extend(
        self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, layer: AttnLayer, batch: PoolBatch,
        out_TNH: Tensor,
    ) -> None:  # fmt: skip
        metadata: FlashInferMetadata = batch.attn_metadata
        pool = batch.context.kv_pool.layer(layer.layer_id)
        window = window_left(layer)
        planned = metadata.once(f"fi {window}", lambda: self._plan(window, layer, batch, q_TNH))
        first = len(q_TNH) - sum(metadata.lengths)
        planned.run(q_TNH[first:], (pool.k, pool.v), out=out_TNH[first:])

    def _plan(self, window: int, layer: AttnLayer, batch: PoolBatch, q_TNH: Tensor) -> Any:
        """Return the wrapper, planned for all layers of this window."""
        metadata: FlashInferMetadata = batch.attn_metadata
        table = batch.context.page_table
        page_size = batch.context.kv_pool.layer(layer.layer_id).k.shape[1]
        ends = np.array(metadata.ends)
        num_pages = -(-ends // page_size)
        page_starts = np.cumsum(num_pages) - num_pages
        rows = np.repeat(np.array(metadata.table_idxs), num_pages)
        columns = np.arange(num_pages.sum()) - np.repeat(page_starts, num_pages)
        entries = torch.from_numpy(rows * table.shape[1] + columns).pin_memory()
        pages = table.view(-1)[entries.to(table.device, non_blocking=True)]
        key = (metadata.turn, window)
        if key not in self._wrappers:
            self._wrappers[key] = self._create(self._workspace, "NHD")
        wrapper = self._wrappers[key]
        wrapper.plan(
            _offsets(np.array(metadata.lengths)),
            _offsets(num_pages),
            pages,
            torch.from_numpy((ends - 1) % page_size + 1).int(),
            layer.num_q_heads,
            layer.num_kv_heads,
            layer.head_dim,
            page_size,
            causal=True,
            sm_scale=layer.scale,
            window_left=window,
            q_data_type=q_TNH.dtype,
        )
        return wrapper


def no_flashinfer(name: str, error: ImportError) -> ConfigError:
    """Return the error of a backend for which the package is missing."""
    why = f"needs the package flashinfer-python, pip install 'minisgl[flashinfer]' ({error})"
    return unusable(name, why)


def _offsets(sizes: np.ndarray[Any, Any]) -> Tensor:
    """Return where each span of these sizes begins, and where the last one ends: int32 [number of
    sizes + 1]."""
    return torch.from_numpy(np.concatenate(([0], np.cumsum(sizes)))).int()


class TensorRTLLMBackend(PagedAttnBackend):
    name = "trtllm"

    def __init__(
        self, ops: Ops, device: torch.device, dtype: torch.dtype, head_dim: int, page_size: int
    ) -> None:
        """Raises ConfigError if the package is missing, or the GPU or the model does not fit."""
        super().__init__(ops)
        if torch.cuda.get_device_capability(device)[0] not in XQA_ARCHS:
            raise unusable("trtllm", "runs on Hopper and Blackwell GPUs only")
        if dtype.itemsize != 2 or head_dim not in XQA_HEAD_DIMS or page_size not in XQA_PAGE_SIZES:
            sizes, pages = (", ".join(map(str, each)) for each in (XQA_HEAD_DIMS, XQA_PAGE_SIZES))
            raise unusable(
                "trtllm",
                f"takes bfloat16 and float16 with head dims {sizes} and pages of {pages} tokens; "
                f"here are {str(dtype)[6:]}, {head_dim} and {page_size}",
            )
        self._run = _load_xqa()
        self._workspace = torch.zeros(XQA_WORKSPACE_BYTES, dtype=torch.uint8, device=device)

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


def _load_xqa() -> Callable[..., Any]:
    try:
        from flashinfer.decode import xqa_batch_decode_with_kv_cache
    except ImportError as error:
        raise no_flashinfer("trtllm", error) from error
    run: Callable[..., Any] = xqa_batch_decode_with_kv_cache
    return run
