"""Kills a part of a server within an upgrade, under load, and compares each answer.

    python scripts/upgrade_faults.py [--rounds N] [--clients N] [--json FILE]

In a round each fault of `FAULTS` happens in an upgrade of its own. Clients ask all kinds of
`outlive.py` meanwhile. Every answer must be whole, and equal to an undisturbed one, and each
command must end with the right exit code. The server has `--restart` and float32.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx
import psutil

from minisgl_bench.report import write_json
from outlive_upgrades import FLAGS, Load, Result, left_behind, undisturbed
from own_server import Server, wait_until

STARTS: Final = r"the new server starts \(pid (\d+)\)"
SERVES: Final = r"the new server \(pid (\d+)\) has the port"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """words: of the command. after: the line behind which `victim` is killed, called with the
    process ids of the old and the new server; None interrupts the command. code: of the
    command."""

    words: tuple[str, ...]
    after: str
    victim: Callable[[int, int], psutil.Process] | None
    code: int


def engine_of(server: int) -> psutil.Process:
    """Return the engine of a server as soon as it has one: the first worker that starts."""
    found: list[psutil.Process] = []

    def is_there() -> bool:
        children = psutil.Process(server).children()
        found[:] = [each for each in children if "spawn_main" in " ".join(each.cmdline())]
        return bool(found)

    assert wait_until(is_there)
    return min(found, key=lambda worker: worker.create_time())


FAULTS: Final = {
    "new server": Fault(
        words=("--drain", "60"), after=STARTS, victim=lambda old, new: psutil.Process(new), code=1
    ),
    "new engine": Fault(
        words=("--drain", "60"), after=STARTS, victim=lambda old, new: engine_of(new), code=1
    ),
    "command": Fault(words=("--drain", "60"), after=STARTS, victim=None, code=130),
    "old engine": Fault(
        words=("--drain", "60"), after=STARTS, victim=lambda old, new: engine_of(old), code=0
    ),
    "old engine in the drain": Fault(
        words=("--drain", "60"), after=SERVES, victim=lambda old, new: engine_of(old), code=0
    ),
    "new engine, moved": Fault(
        words=("--drain", "0"), after=SERVES, victim=lambda old, new: engine_of(new), code=0
    ),
    "new server, one engine": Fault(
        words=("--engines", "1", "--drain", "0"), after=STARTS,
        victim=lambda old, new: psutil.Process(new), code=1,
    ),
}  # fmt: skip


def upgrade(server: Server, fault: Fault) -> str:
    """Upgrade with the fault. Returns what is wrong, or ""."""
    taken_over = re.findall(r"this server takes over \(pid (\d+)\)", server.log)
    old = int(taken_over[-1]) if taken_over else server.process.pid
    command = subprocess.Popen(
        [sys.executable, "-m", "minisgl", "upgrade", *fault.words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "TMPDIR": str(server.folder)},
    )
    assert command.stdout
    said = ""
    for line in command.stdout:
        said += line
        if found := re.search(fault.after, line):
            if fault.victim:
                fault.victim(old, int(found[1])).kill()
            else:
                command.send_signal(signal.SIGINT)
    code = command.wait()
    return "" if code == fault.code else f"exit code {code}, not {fault.code}: {said}"


def run(num_rounds: int, num_clients: int) -> Result:
    result = Result()
    with tempfile.TemporaryDirectory(prefix="outlive") as scratch:
        folder = Path(scratch) / "sockets"
        folder.mkdir()
        server = Server(folder, *FLAGS, "--restart", "--max-restarts", "10000")

        def is_ready() -> bool:
            return httpx.get(f"{server.url}/ready", timeout=60).status_code == 200

        try:
            load = Load(server.url, [undisturbed(server.url)], result)
            with load.running(num_clients):
                for _ in range(num_rounds):
                    for name, fault in FAULTS.items():
                        load.mode = name
                        if wrong := upgrade(server, fault):
                            result.problems.append(f"{name}: {wrong}")
                        result.upgrades[name] += 1
                        print(name, len(result.problems), flush=True)
                        assert wait_until(is_ready)
        finally:
            code = server.close()
        result.problems += left_behind(code, folder, server.log)
    return result


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--clients", type=int, default=3, help="of each sort (default: 3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results")
    args = parser.parse_args(argv)
    result = run(args.rounds, args.clients)
    found = {name: getattr(result, name) for name in Result.__slots__}
    print(json.dumps(found, indent=1))
    if args.json:
        write_json(args.json, found)
    return int(bool(result.problems))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
