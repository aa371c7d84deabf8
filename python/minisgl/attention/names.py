"""What `--attn` may say."""

from __future__ import annotations

from typing import Final

ATTENTION_BACKENDS: Final = ("auto", "cpu", "torch")
"""Of the CPU. A GPU has auto and torch too, and those below, alone or two as prefill,decode."""
CUDA_BACKENDS: Final = ("triton", "fa")
PREFILL_BACKENDS: Final = ("fa2", "fi")  # for the first place of two
DECODE_BACKENDS: Final = ("trtllm",)  # for the second place

SINKS: Final = "sinks"
SOFTCAP: Final = "softcap"
SHARED: Final = "layer that reads another's keys and values"
"""What some models' attention has, see `AttnLayer`: the backends of a CPU, torch and triton serve
it, other backends only where `minisgl.attention.cuda` says so."""
