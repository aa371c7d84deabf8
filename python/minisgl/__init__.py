"""Mini-SGLang: a compact LLM serving engine.

The front doors are ``python -m minisgl`` (the server and the shell) and ``from minisgl import LLM,
AsyncLLM, SamplingParams``. Importing this package imports nothing else: the processes that only
move text must not pay for torch. The tour of the code is ``docs/architecture.md``.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minisgl.llm import LLM, Delta, RequestOutput, SamplingParams
    from minisgl.llm.async_llm import AsyncLLM

import os

from minisgl.version import __version__ as __version__

# When their work ends, threads of torch's OpenMP (libgomp) spin for milliseconds and keep their
# cores from other threads. With this count they spin for about the time between two kernels of a
# step, which makes steps several times faster on busy cores. libgomp reads it when torch is
# imported.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
__all__ = ["LLM", "AsyncLLM", "Delta", "RequestOutput", "SamplingParams"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "AsyncLLM":  # which imports asyncio
        from minisgl.llm.async_llm import AsyncLLM

        return AsyncLLM
    from minisgl import llm

    return getattr(llm, name)
