"""`minisgl chat` and `minisgl run`: clients of the HTTP API in a terminal or a pipe.

They need a server's URL and do not know the server's insides. Answers go to stdout, everything else
to stderr. Read next: `minisgl.shell.repl`.
"""

from minisgl.shell.repl import run_question, run_shell
from minisgl.shell.settings import Settings

__all__ = ["Settings", "run_question", "run_shell"]
