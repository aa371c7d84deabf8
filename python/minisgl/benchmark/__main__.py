"""`python -m minisgl.benchmark NAME [flags]`: runs `main(argv)` of the module of that name."""

from __future__ import annotations

import importlib
import pkgutil
import sys

import minisgl.benchmark


def main(argv: list[str]) -> int:
    names = [
        module.name
        for module in pkgutil.iter_modules(minisgl.benchmark.__path__)
        if not module.ispkg and module.name != "__main__"
    ]
    benchmarks = {}
    for name in names:
        module = importlib.import_module(f"minisgl.benchmark.{name}")
        if hasattr(module, "main"):
            benchmarks[name] = module
    if argv and argv[0] in benchmarks:
        return int(benchmarks[argv[0]].main(argv[1:]) or 0)
    print("python -m minisgl.benchmark NAME [--help], where NAME is one of\n")
    for name, module in benchmarks.items():
        print(f"  {name:<14}{(module.__doc__ or '').strip().splitlines()[0]}")
    return 0 if argv in ([], ["--help"], ["-h"]) else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
