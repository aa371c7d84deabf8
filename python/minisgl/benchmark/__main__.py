"""`python -m minisgl.benchmark NAME [flags]`: runs `main(argv)` of the module of that name."""

from __future__ import annotations

import ast
import importlib
import os
import sys
from pathlib import Path

from minisgl.errors import MinisglError

_FOLDER = Path(__file__).parent


def benchmarks() -> dict[str, str]:
    """Name and first line of each module here with a `main`; none is imported (torch is slow)."""
    found = {}
    for path in sorted(_FOLDER.glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
        if "main" in functions and path.stem != "__main__":
            found[path.stem] = (ast.get_docstring(tree) or "").partition("\n")[0]
    return found


def main(argv: list[str]) -> int:
    found = benchmarks()
    if argv and argv[0] in found:
        module = importlib.import_module(f"minisgl.benchmark.{argv[0]}")
        try:
            return int(module.main(argv[1:]) or 0)
        except MinisglError as error:
            print(f"python -m minisgl.benchmark {argv[0]}: {error}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            return 130
        except BrokenPipeError:  # nobody reads on, as behind `| head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
    is_known = argv in ([], ["--help"], ["-h"])
    if not is_known:
        print(f"there is no benchmark {argv[0]!r}\n", file=sys.stderr)
    print("python -m minisgl.benchmark NAME [--help], where NAME is one of\n")
    for name, line in found.items():
        print(f"  {name:<20} {line}")
    return 0 if is_known else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
