"""Runs benchmarks by name, as `minisgl bench` and `python -m minisgl_bench.studies` do."""

from __future__ import annotations

from pathlib import Path

from helpers.stub import StubServer
from minisgl_bench import online
from minisgl_bench.run import benchmarks
from minisgl_bench.run import main as run_main

LISTS = {package: benchmarks(package) for package in ("minisgl_bench.studies", "minisgl_bench")}
LINES = {name: line for lines in LISTS.values() for name, line in lines.items()}
PACKAGES = {name: package for package, lines in LISTS.items() for name in lines}


def main(argv: list[str]) -> int:
    """Run the benchmark argv[0] of the package that has it."""
    return run_main(argv, PACKAGES.get(argv[0], "minisgl_bench"))


def online_json(tmp_path: Path, stub: StubServer, name: str, *flags: str) -> Path:
    """Run `online` against the stub in small. Returns the file of its result."""
    path = tmp_path / f"{name}.json"
    sizes = ["--requests", "6", "--input", "4:8", "--output", "5", "--json", str(path)]
    assert online.main(["--url", f"{stub.url}/v1", *sizes, *flags]) == 0
    return path
