"""Starts and watches the worker processes.

What it is for: the workers of one engine (ranks, tokenizers, detokenizer) on one machine or several
nodes, the signals that end them, and the errors that say why one ended. What it does not know:
HTTP, and what a worker computes; only a worker imports torch. The server and an `LLM` of several
ranks use it. Read next: `minisgl.runtime.workers`.

This file imports nothing, because a worker imports it before anything else.
"""
