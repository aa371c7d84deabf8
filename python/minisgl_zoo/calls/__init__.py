"""Splits the text of an answer into its parts: reasoning, content and tool calls.

What it is for: `AnswerParser` takes pieces of text as they arrive and returns the parts that are
final. Streams and whole answers use it, so both have the same parts. `formats` describes how model
families write reasoning and calls, as data. `syntax` reads each kind of call.
What it does not know: tokens, templates, the APIs. Read next: `minisgl_zoo.calls.parser`.
"""

from minisgl_zoo.calls.parser import AnswerForm, AnswerParser

__all__ = ["AnswerForm", "AnswerParser"]
