"""Small leaves that any layer may use: logging, ZeroMQ queues, checkpoint folders, sentences.

What it is for: things that are no part of serving a model and that would be written twice
otherwise. What it does not know: anything of this package but `errors` and `env`. It imports
nothing heavy.
"""
