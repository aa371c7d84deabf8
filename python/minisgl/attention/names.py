"""The values of `--attn`."""

from __future__ import annotations

from typing import Final

ATTENTION_BACKENDS: Final = ("auto", "cpu", "torch")
"""On a CPU. A GPU has auto, torch and the names below, alone or two as prefill,decode."""
CUDA_BACKENDS: Final = ("triton", "fa")
PREFILL_BACKENDS: Final = ("fa2", "fi")  # for the first place of two
DECODE_BACKENDS: Final = ("trtllm",)  # for the second place

SINKS: Final = "sinks"
SOFTCAP: Final = "softcap"
SHARED: Final = "layer that reads another's keys and values"
"""The needs of some models' attention (`AttnLayer`). The CPU's backends, torch and triton serve all
of them; `minisgl.attention.cuda.SERVED` lists those that other backends serve."""
