"""Mini-SGLang: a compact LLM serving engine.

The front doors are ``python -m minisgl`` (the server and the shell) and ``from minisgl import LLM,
AsyncLLM, SamplingParams``. Importing this package imports nothing else: the processes that only
move text must not pay for torch. The tour of the code is ``docs/architecture.md``.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minisgl.llm import LLM, RequestOutput, SamplingParams
    from minisgl.llm.async_llm import AsyncLLM
    from minisgl.llm.stream import Delta

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncLLM", "Delta", "RequestOutput", "SamplingParams"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = {"AsyncLLM": "minisgl.llm.async_llm", "Delta": "minisgl.llm.stream"}.get(name)
    return getattr(import_module(module or "minisgl.llm"), name)
