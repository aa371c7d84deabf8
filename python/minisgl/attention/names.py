"""The values of `--attn`, and what models may need of a backend."""

from __future__ import annotations

from typing import Final

ATTENTION_BACKENDS: Final = ("auto", "cpu", "torch")
"""The names on a CPU. On a GPU they are auto, torch, `CUDA_BACKENDS`, or two as PREFILL,DECODE."""
CUDA_BACKENDS: Final = ("triton", "fa")
PREFILL_BACKENDS: Final = ("fa2", "fi")  # only as PREFILL
DECODE_BACKENDS: Final = ("trtllm",)  # only as DECODE

SINKS: Final = "sinks"
SOFTCAP: Final = "softcap"
KV_SHARING: Final = "layer that reads another's keys and values"
"""What the attention of some models needs (`AttnLayer`). The backends cpu, torch and triton serve
all needs; `minisgl.attention.cuda.SERVED` lists those that others serve."""
