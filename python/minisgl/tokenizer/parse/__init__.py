"""The text of an answer to its parts: reasoning, content and tool calls.

What it is for: `AnswerParser` takes the text as it comes and returns what is final. A whole answer
is the sum of a stream's parts, because both are made by this parser. `formats` describes how model
families write reasoning and calls, as data; `syntax` reads each kind of call. What it does not
know: tokens, templates, the APIs. Read next: `minisgl.tokenizer.parse.parser`.
"""

from minisgl.tokenizer.parse.answer import SplitAnswer, ToolCall, collect
from minisgl.tokenizer.parse.parser import AnswerForm, AnswerParser

__all__ = ["AnswerForm", "AnswerParser", "SplitAnswer", "ToolCall", "collect"]
