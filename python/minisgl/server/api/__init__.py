"""The API families: the JSON that each takes, its handlers, and the JSON of its answers.

What it is for: JSON becomes prompts and sampling parameters; text becomes JSON or server-sent
events. What it does not know: tokens, processes, sockets. Read next: `minisgl.server.api.schema`
(what the families have in common), then `minisgl.server.api.chat`, which the others build on.
"""
