"""The engine in this process, without a server: `from minisgl.llm import LLM`.

What it is for: scripts, notebooks, evaluation. What it does not know: HTTP, other processes. It is
a composition root: it has an engine, a scheduler, a tokenizer and a detokenizer, and runs the same
loop as the server. Read next: `minisgl.scheduler.loop`.
"""

from minisgl.core import SamplingParams
from minisgl.llm.llm import LLM
from minisgl.llm.output import RequestOutput

__all__ = ["LLM", "RequestOutput", "SamplingParams"]
