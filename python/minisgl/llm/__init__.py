"""The engine without a server: `from minisgl.llm import LLM`.

What it is for: scripts, notebooks, evaluation. What it does not know: HTTP. It is a composition
root: it has a tokenizer, a detokenizer, and an engine and a scheduler that run the same loop as the
server's, in this process or, for `tp` above 1, in ranks that are the server's own. Read next:
`minisgl.llm.engines`, then `minisgl.scheduler.loop`.
"""

from minisgl.core import SamplingParams
from minisgl.llm.llm import LLM
from minisgl.llm.output import RequestOutput

__all__ = ["LLM", "RequestOutput", "SamplingParams"]
