"""Reads the files of `--record`, one JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from minisgl.errors import ConfigError


def requests_of(path: Path) -> list[dict[str, Any]]:
    """Return the requests that ended, in the order of their arrival, each with its end.

    Raises ConfigError if the file is no recording, or has none.
    """
    arrivals: dict[int, dict[str, Any]] = {}
    requests = []
    for record in records_of(path):
        if arrival := record.get("arrival"):
            arrivals[arrival["uid"]] = arrival
        elif (end := record.get("end")) and (arrival := arrivals.pop(end["uid"], None)):
            requests.append(arrival | end)
    if not requests:
        raise ConfigError(f"{path} has no request that began and ended")
    return sorted(requests, key=lambda request: request["at_s"])


def records_of(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of FILE.1, if there is one, and of FILE.

    Raises ConfigError at a line that is none of a recording.
    """
    older = path.with_name(path.name + ".1")
    for file in (older, path) if older.exists() else (path,):
        try:
            lines = file.read_bytes().splitlines()
        except OSError as error:
            raise ConfigError(f"the recording cannot be read: {error}") from error
        for number, line in enumerate(lines, 1):
            try:
                record = json.loads(line)
                if not record.keys() & {"config", "arrival", "compiled", "leave", "end", "frame"}:
                    raise ValueError("it has another key")
            except (ValueError, AttributeError) as error:
                if file == path and number == len(lines):
                    return  # it is still being written
                raise ConfigError(f"{file}, line {number} is of no recording: {error}") from None
            yield record
