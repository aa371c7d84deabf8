"""Small leaves that any layer may use: logging, ZeroMQ queues, checkpoint folders, sentences.

What it is for: code that is no part of serving a model and that several rooms need.
What it does not know: anything of this package but `errors` and `env`. It imports nothing heavy.
"""
