"""Starts and watches the processes that do the work.

What it is for: the workers of one engine (ranks, tokenizers, detokenizer) on one machine or several
nodes, the signals that end them, and the errors that say why one ended. What it does not know:
HTTP, and what a worker computes; it imports torch only inside a worker. Both the server and an
`LLM` of several ranks use it. Read next: `minisgl.runtime.workers`.

Nothing is imported here: a worker imports this package before anything else.
"""
