"""Measures a newcomer's first minutes: a fresh clone, `make serve`, the first answer in a browser.

Everything starts empty: the clone, pip's cache, the kernels' cache, the home folder. The bytes are
those of the clone and of the packages: the downloads in pip's log, and the size of the packages
that it takes from folders of this machine. Needs git, make, playwright and chromium. Prints the
sentence of docs/clients.md; `--json FILE` keeps the parts.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
QUESTION = "What is 12 + 30?"
ANSWER = "12 + 30 = 42."
UNITS = {"bytes": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9}
KEPT_SETTINGS = (
    "PATH",
    "LANG",
    "PYENV_ROOT",
    "PIP_CERT",
    "PIP_FIND_LINKS",
    "PIP_EXTRA_INDEX_URL",
    "SSL_CERT_FILE",
)
"""Variables that a newcomer's shell has too, or that say where packages are."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure the way to the first answer.")
    parser.add_argument(
        "--repository", default=str(ROOT), help="repository to clone (default: this)"
    )
    parser.add_argument(
        "--python", default="python3.11", help="an interpreter (default: python3.11)"
    )
    parser.add_argument("--port", type=int, default=1919, help="the server's port (default: 1919)")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write the parts to this file"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(Path(folder), args.repository, args.python, args.port)
    print(sentences(result))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


def measure(folder: Path, repository: str, python: str, port: int) -> dict[str, Any]:
    """Return the parts: seconds that follow one another, and bytes."""
    home, clone, cache, log = (folder / name for name in ("home", "clone", "pip", "pip.log"))
    home.mkdir()
    env = {name: os.environ[name] for name in KEPT_SETTINGS if name in os.environ}
    env |= {"HOME": str(home), "PIP_CACHE_DIR": str(cache), "PIP_LOG": str(log)}
    marks = [time.monotonic()]
    source = Path(repository).resolve().as_uri() if Path(repository).exists() else repository
    subprocess.run(["git", "clone", "-q", source, str(clone)], check=True, env=env)
    marks.append(time.monotonic())
    server = subprocess.Popen(
        ["make", "serve", f"PYTHON={python}", f"ARGS=--port {port}"],
        cwd=clone, env=env, stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        url, start_s = wait_until_it_serves(server)
        marks.append(time.monotonic())
        page_bytes = ask_in_a_browser(url)
        marks.append(time.monotonic())
    finally:
        os.killpg(server.pid, signal.SIGINT)  # as Ctrl-C does
        server.wait(30)
    clone_s, install_s, answer_s = (b - a for a, b in pairwise(marks))
    commit = ["git", "-C", str(clone), "rev-parse", "--short", "HEAD"]
    return {
        "commit": subprocess.run(commit, check=True, capture_output=True, text=True).stdout.strip(),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "python": python,
        "clone_s": round(clone_s, 1),
        "install_s": round(install_s - start_s, 1),
        "start_s": start_s,
        "browser_to_answer_s": round(answer_s, 1),
        "total_s": round(marks[-1] - marks[0], 1),
        "clone_bytes": size_of(clone / ".git"),
        "packages_http_bytes": downloaded(log.read_text(errors="replace")),
        "packages_local_bytes": local_bytes(log.read_text(errors="replace")),
        "page_bytes": page_bytes,
        "environment_bytes": size_of(clone / ".venv"),
    }


def wait_until_it_serves(server: subprocess.Popen[str]) -> tuple[str, float]:
    """Return the address and the seconds of the start that the server prints.

    Its output goes to stderr.
    """
    assert server.stdout
    for line in server.stdout:
        print(line, end="", file=sys.stderr)
        if found := re.search(r"Serving \S+ on (http://\S+) \(ready after ([\d.]+) s", line):
            return found[1], float(found[2])
    raise SystemExit(f"make serve ended with {server.wait()} before it served")


def ask_in_a_browser(url: str) -> int:
    """Ask in a browser of a new profile. Returns the bytes sent to it until it had the answer."""
    from playwright.sync_api import sync_playwright

    flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    with sync_playwright() as playwright:
        chromium = shutil.which("chromium")
        browser = playwright.chromium.launch(executable_path=chromium, args=flags)
        tab = browser.new_page()
        devtools = tab.context.new_cdp_session(tab)
        devtools.send("Network.enable")
        sizes: list[int] = []
        devtools.on(
            "Network.loadingFinished", lambda event: sizes.append(event["encodedDataLength"])
        )
        tab.goto(url)
        tab.click(f"text={QUESTION}")
        tab.wait_for_selector(f"text={ANSWER}", timeout=60_000)
        tab.wait_for_selector(".answer[aria-busy=false]")
        browser.close()
    return sum(sizes)


def downloaded(log: str) -> int:
    """Return the bytes of the downloads in pip's log, each with two or three digits."""
    found = re.findall(r"Downloading \S+ \(([\d.]+) (bytes|kB|MB|GB)\)", log)
    return round(sum(float(number) * UNITS[unit] for number, unit in found))


def local_bytes(log: str) -> int:
    """Return the bytes of the packages that pip took from folders, each once."""
    paths = set(re.findall(r"Processing (/\S+\.(?:whl|tar\.gz))", log))
    return sum(map(os.path.getsize, paths))


def size_of(folder: Path) -> int:
    """Return the bytes of all files below `folder`; 0 if there is none."""
    paths = (Path(root) / name for root, _, names in os.walk(folder) for name in names)
    return sum(path.lstat().st_size for path in paths)


def sentences(result: dict[str, Any]) -> str:
    """Return the sentence of docs/clients.md."""
    packages = result["packages_http_bytes"] + result["packages_local_bytes"]
    fetched = packages + result["clone_bytes"]
    local = result["packages_local_bytes"]
    said = f" ({local / 1e6:.0f} MB of them torch, from a local copy)" if local else ""
    return (
        f"On {result['machine']}, without any cache, the way from `git clone` to the first answer "
        f"in a browser took {result['total_s']:.0f} s and {fetched / 1e6:.0f} MB{said}: "
        f"{result['clone_s']:.0f} s for the clone, {result['install_s']:.0f} s for packages and "
        f"kernels, {result['start_s']:.1f} s for the server's start, and "
        f"{result['browser_to_answer_s']:.1f} s for the browser, its page "
        f"({result['page_bytes'] / 1e3:.0f} KB) and the answer."
    )


if __name__ == "__main__":
    sys.exit(main())
