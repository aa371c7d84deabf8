"""Text to token ids, and token ids to text.

What it is for: the checkpoint's tokenizer and chat template, the text of a running request made
token by token, and the process that does both. What it does not know: models, pages, HTTP. It
imports no torch, and transformers only for a checkpoint that has no tokenizer.json. Read next:
`minisgl.scheduler`.
"""

from minisgl.tokenizer.detokenize import Detokenizer
from minisgl.tokenizer.template import ChatTemplate, load_template
from minisgl.tokenizer.tokenize import PromptEncoder
from minisgl.tokenizer.tokenizer import Tokenizer, load_tokenizer, warn_of_unknown_ids
from minisgl.tokenizer.worker import TextWorkerConfig, tokenize_worker

__all__ = [
    "ChatTemplate",
    "Detokenizer",
    "PromptEncoder",
    "TextWorkerConfig",
    "Tokenizer",
    "load_template",
    "load_tokenizer",
    "tokenize_worker",
    "warn_of_unknown_ids",
]
