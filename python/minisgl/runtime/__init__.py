"""Starts and watches the worker processes.

What it is for: the workers of one engine (ranks, tokenizers, detokenizer) on this machine, the
signals that end them, and the errors that say why one ended. What it does not know: HTTP, what a
worker computes (only a worker imports torch), and how other machines are reached (`Peer`). The
server and an `LLM` of several ranks use it. Read next: `minisgl.runtime.workers`.

This file imports nothing, because a worker imports it before anything else.
"""
