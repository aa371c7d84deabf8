"""The engine without a server: `from minisgl import LLM, AsyncLLM, SamplingParams`.

`minisgl` imports `AsyncLLM` from its own file when it is used.

What it is for: scripts, notebooks, evaluation. What it does not know: HTTP. It is a composition
root: it has a tokenizer, a detokenizer, a scheduler and an engine, and runs the same loop as a
server, in this process (`engines`) or, if `tp` is above 1, in one process per rank (`ranks`).
Read next: `minisgl.llm.session`, then `minisgl.scheduler.loop`.
"""

from minisgl.core import SamplingParams
from minisgl.llm.llm import LLM
from minisgl.llm.output import Delta, RequestOutput

__all__ = ["LLM", "Delta", "RequestOutput", "SamplingParams"]
