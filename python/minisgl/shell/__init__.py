"""A chat in the terminal, over the same HTTP API that everybody else uses.

What it is for: trying a model by hand, and seeing after each answer what it cost. What it does
not know: the server's insides; it needs a URL. Read next: `minisgl.shell.repl`.
"""

from minisgl.shell.repl import run_shell

__all__ = ["run_shell"]
