"""Text to token ids, and token ids to text.

What it is for: the checkpoint's tokenizer and chat template, and the text of a running request,
token by token; `minisgl.tokenizer.worker` is the process that does both. What it does not know:
models, pages, HTTP. It imports no torch, and imports transformers only for a checkpoint without a
tokenizer.json. Read next: `minisgl.scheduler`.
"""

from minisgl.tokenizer.detokenize import Detokenizer
from minisgl.tokenizer.tokenize import Encoded, PromptEncoder
from minisgl.tokenizer.tokenizer import Tokenizer, load_tokenizer, warn_of_unknown_ids

__all__ = [
    "Detokenizer",
    "Encoded",
    "PromptEncoder",
    "Tokenizer",
    "load_tokenizer",
    "warn_of_unknown_ids",
]
