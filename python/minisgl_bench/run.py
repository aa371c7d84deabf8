"""`minisgl bench NAME [flags]` runs `main(argv)` of the module NAME."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from minisgl.errors import MinisglError
from minisgl.utils.files import forget
from minisgl_bench.arguments import command_of

PACKAGE = "minisgl_bench"

PACKAGES_TO_INSTALL = {
    "aiohttp": "minisgl[bench]",
    "transformers": "transformers",
}
"""The argument of `pip install`, by package, for packages that only some benchmarks need."""


def benchmarks(package: str = PACKAGE) -> dict[str, str]:
    """Return the name and the first docstring line of each module of `package` with a `main`.

    The modules are parsed and not imported, because importing torch takes seconds.
    """
    lines = {path.stem: _first_line(path) for path in sorted(_folder(package).glob("*.py"))}
    return {name: line for name, line in lines.items() if line is not None}


def _folder(package: str) -> Path:
    return Path(importlib.import_module(package).__path__[0])


def _first_line(path: Path) -> str | None:
    """Return the first docstring line of a benchmark, or None if the file is none."""
    if path.stem in ("__main__", "run") or not path.is_file():
        return None
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    return (ast.get_docstring(tree) or "").partition("\n")[0] if "main" in functions else None


def bench(argv: Sequence[str], began: float) -> int:
    """Run `minisgl bench`. Returns the exit code."""
    return main(argv)


def replay(argv: Sequence[str], began: float) -> int:
    """Run `minisgl replay`. Returns the exit code."""
    return main(["replay", *argv])


def main(argv: Sequence[str], package: str = PACKAGE) -> int:
    """Run the benchmark that argv[0] names, or list the benchmarks. Returns the exit status."""
    try:
        status = _run(argv, package)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader has left, as in `| head`
        forget(sys.stdout)
        return 1


def _run(argv: Sequence[str], package: str) -> int:
    command = command_of(package)
    name = argv[0] if argv and argv[0].isidentifier() else ""
    if name and _first_line(_folder(package) / f"{name}.py") is not None:
        if argv[0] == "replay":
            command = "minisgl"  # a command of its own
        try:
            module = importlib.import_module(f"{package}.{argv[0]}")
            return int(module.main(argv[1:]) or 0)
        except MinisglError as error:
            print(f"{command} {argv[0]}: {error}", file=sys.stderr)
        except ModuleNotFoundError as error:
            if error.name not in PACKAGES_TO_INSTALL:
                raise
            print(
                f"{command} {argv[0]}: the package {error.name} is not installed; run "
                f"pip install '{PACKAGES_TO_INSTALL[error.name]}'",
                file=sys.stderr,
            )
        return 2
    is_known = list(argv) in ([], ["--help"], ["-h"])
    if not is_known:
        print(f"there is no benchmark {argv[0]!r}\n", file=sys.stderr)
    print(f"{command} NAME [--help], where NAME is one of\n")
    for name, line in benchmarks(package).items():
        print(f"  {name:<20} {line}")
    return 0 if is_known else 2
