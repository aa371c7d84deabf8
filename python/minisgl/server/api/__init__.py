"""The API families, one file each: the JSON that it takes, its handlers, the JSON of its answers.

What it is for: JSON to `TokenizeMsg`, and text back to JSON or server-sent events. What it does not
know: tokens, processes, sockets. Read next: `minisgl.server.api.schema`, what the families share.
"""
