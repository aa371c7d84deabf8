"""Mini-SGLang: a compact LLM serving engine.

The front doors are ``python -m minisgl`` (the server and the shell) and ``minisgl.llm.LLM``.
Importing this package imports nothing else: the processes that only move text must not pay for
torch. The tour of the code is ``docs/architecture.md``.
"""

__version__ = "0.1.0"
