"""Small modules that any room may use: logs, ZeroMQ queues, processes, checkpoint folders, text.

What it is for: code that several rooms need and none of them owns. What it does not know: the other
rooms; it imports only `plugins`, `errors` and `env` of this package, and nothing heavy. Read next:
the module that you need.
"""
