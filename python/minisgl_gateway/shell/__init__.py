"""`minisgl chat` and `minisgl run`: clients of the HTTP API in a terminal or a pipe.

What it is for: it sends messages to a server, and prints answers to stdout and all else to stderr.
What it does not know: how the server works. Read next: `minisgl_gateway.shell.repl`.
"""
