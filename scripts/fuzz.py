"""Feeds each decoder of untrusted bytes with the inputs of a coverage-guided fuzzer.

    pip install atheris
    python scripts/fuzz.py [TARGET ...] [--seconds S] [--json FILE]

Each target (`fuzz_targets.py`, `fuzz_checkpoints.py`) runs in a process of its own, from the corpus
in tests/fuzz, which keeps some small inputs that reach new code. A finding is an exception that the
target does not promise, an input that takes longer than `HANG_S`, or more than `MEMORY_MB` of
memory; its input is written to the folder build/fuzz. tests/scripts/test_fuzz.py runs the corpus
without atheris.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

from minisgl_bench.report import write_json

ROOT: Final = Path(__file__).parents[1]
CORPUS: Final = ROOT / "tests/fuzz"
FOUND: Final = ROOT / "build/fuzz"
HANG_S: Final = 20
"""A template may compute for 10 s of a core; other limits are below a second."""
MEMORY_MB: Final = 2048
MAX_BYTES: Final = 4096
MAX_KEPT: Final = 16
"""Files of a target: so many take the test about a second."""


def corpus_of(target: str) -> list[Path]:
    return sorted((CORPUS / target).glob("*"))


def fuzz_here(target: str, folder: str, options: list[str]) -> None:
    """Run libFuzzer on the corpus in `folder`; it ends the process."""
    import atheris

    with atheris.instrument_imports(include=["minisgl", "gguf", "jinja2"]):
        import fuzz_targets

        run = fuzz_targets.TARGETS[target].run
        for data in fuzz_targets.TARGETS[target].seeds():
            run(data)  # so that its imports are instrumented
    atheris.Setup([sys.argv[0], folder, *options], run, enable_python_coverage=True)
    atheris.Fuzz()


def fuzz(target: str, seconds: int) -> dict[str, Any]:
    """Run one target. Returns the result, and keeps new inputs in the corpus."""
    import fuzz_targets

    FOUND.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="fuzz") as scratch:
        folder, words = Path(scratch) / "corpus", Path(scratch) / "words"
        folder.mkdir()
        known = [path.read_bytes() for path in corpus_of(target)]
        for data in known + fuzz_targets.TARGETS[target].seeds():
            (folder / hashlib.sha1(data).hexdigest()).write_bytes(data)
        escaped = [re.sub(r'(["\\])', r"\\\1", w) for w in fuzz_targets.TARGETS[target].words]
        words.write_text("".join(f'"{word}"\n' for word in escaped))
        limits = [f"-timeout={HANG_S}", f"-rss_limit_mb={MEMORY_MB}", f"-max_len={MAX_BYTES}"]
        more = [f"-dict={words}"] if escaped else []
        more += [f"-max_total_time={seconds}", "-print_final_stats=1"]
        log = _run(target, folder, [*limits, *more, f"-artifact_prefix={FOUND}/{target}-"])
        kept = sorted(folder.iterdir(), key=lambda path: (path.stat().st_size, path.name))
        (CORPUS / target).mkdir(parents=True, exist_ok=True)
        for path in corpus_of(target):
            path.unlink()
        for path in kept[:: max(-(-len(kept) // MAX_KEPT), 1)]:
            (CORPUS / target / path.name).write_bytes(path.read_bytes())
    stats = dict(re.findall(r"stat::(\w+):\s+(\d+)", log))
    if not stats:
        raise RuntimeError(f"the fuzzer did not run: {log[-1000:]}")
    _, is_found, finding = log.partition("=== Uncaught Python exception: ===")
    if not is_found and (error := re.search(r"ERROR: libFuzzer: [^\n]*", log)):
        finding = error[0]
    return {
        "target": target,
        "seconds": seconds,
        "executions": int(stats.get("number_of_executed_units", 0)),
        "peak_memory_mb": int(stats.get("peak_rss_mb", 0)),
        "inputs_with_new_coverage": len(kept),
        "seed": int((re.search(r"INFO: Seed: (\d+)", log) or [0, 0])[1]),
        "finding": finding[:2000],
    }


def _run(target: str, folder: Path, options: list[str]) -> str:
    command = [sys.executable, __file__, "--here", target, str(folder), *options]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    return done.stdout + done.stderr


def targets_parser(doc: str, names: Iterable[str]) -> argparse.ArgumentParser:
    """Return the parser of a script that runs some of its targets, each for some seconds."""
    names = list(names)
    parser = argparse.ArgumentParser(description=doc.partition("\n")[0])
    parser.add_argument(
        "targets", nargs="*", choices=[*names, []], metavar="TARGET",
        help=f"default: {' '.join(names)}",
    )  # fmt: skip
    parser.add_argument(
        "--seconds", type=int, default=600, help="for each target (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results")
    return parser


def run_targets(
    names: Iterable[str], run: Callable[[str], dict[str, Any]], json_file: Path | None
) -> int:
    """Run the targets, print and write their results. Returns 1 if one has a finding, else 0."""
    rows = []
    for name in names:
        rows.append(run(name))
        print(json.dumps(rows[-1], indent=1), flush=True)
    if json_file:
        write_json(json_file, {"rows": rows})
    return int(any(row["finding"] for row in rows))


def main(argv: list[str]) -> int:
    import fuzz_targets

    args = targets_parser(__doc__, fuzz_targets.TARGETS).parse_args(argv)
    names = args.targets or fuzz_targets.TARGETS
    return run_targets(names, lambda name: fuzz(name, args.seconds), args.json)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--here"]:
        fuzz_here(sys.argv[2], sys.argv[3], sys.argv[4:])
    sys.exit(main(sys.argv[1:]))
