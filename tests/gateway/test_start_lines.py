"""What a chat's own server shows while it starts."""

from __future__ import annotations

import io
import logging
import os
import re
import subprocess
import sys

import pytest
from rich.console import Console

from minisgl.utils.logger import get_logger, tell_lines
from minisgl_gateway.start_lines import FIRST, StartLines

logger = get_logger("minisgl.test")


def test_lines_are_told_below_the_level_that_is_written() -> None:
    root = logging.getLogger("minisgl")
    before, written = root.level, logging.StreamHandler(stream := io.StringIO())
    root.addHandler(written)
    root.setLevel("WARNING")
    try:
        told: list[str] = []
        end = tell_lines(told.append)
        logger.info("weights: %d %%", 10)
        logger.debug("not this")
        logger.warning("written")
        end()
        logger.info("nor this")
        assert told == ["weights: 10 %"]
        assert stream.getvalue() == "written\n"
        assert root.level == logging.WARNING
    finally:
        root.removeHandler(written)
        root.setLevel(before)


WARNING = """
import logging
from minisgl.utils.logger import get_logger, setup_logging, tell_lines
setup_logging("engine", level="warning")
end = tell_lines(lambda text: print("told", text))
get_logger("minisgl.test").info("weights")
get_logger("minisgl.test").warning("slow")
end()
get_logger("minisgl.test").warning("late")
"""


@pytest.mark.parametrize(("term", "erase"), [("xterm", "\r\x1b[K"), ("dumb", "")])
def test_a_warning_takes_the_line_of_a_spinner(term: str, erase: str) -> None:
    """Another process draws the spinner, again below it."""
    ours, theirs = os.openpty()
    command, env = [sys.executable, "-c", WARNING], {**os.environ, "TERM": term}
    told = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=theirs, check=True)
    os.close(theirs)
    assert told.stdout == b"told weights\n"
    written = os.read(ours, 1000).decode()
    os.close(ours)
    assert re.sub(r"\d\d:\d\d:\d\d ", "", written) == (
        f"{erase}W [engine] slow\r\nW [engine] late\r\n"
    )


def test_without_a_terminal_each_line_is_written_once() -> None:
    out = io.StringIO()
    with StartLines(Console(file=out, width=40, soft_wrap=True)) as lines:
        lines.show("memory on CPU:\n  weights 1 GiB")
        lines.begin()
        lines.end()
        lines.show("after the start")
    assert out.getvalue() == f"{FIRST}\nmemory on CPU\n"


def test_on_a_terminal_the_line_goes_with_the_start() -> None:
    out = io.StringIO()
    with StartLines(Console(file=out, width=60, force_terminal=True)) as lines:
        lines.show("weights: 10 %")
        spinner = lines._spinner
        assert spinner
        spinner.refresh()
    text = out.getvalue()
    assert "weights: 10 %" in text
    assert text.endswith("\x1b[2K")  # the line is erased


def test_lines_before_a_download_ends_are_written() -> None:
    """The library's own bars are there meanwhile."""
    out = io.StringIO()
    with StartLines(Console(file=out, width=60, force_terminal=True), downloads=True) as lines:
        lines.show("taking m-Q4_K_M.gguf")
        assert "taking m-Q4_K_M.gguf" in out.getvalue()
        lines.begin()
        assert lines._spinner
        assert lines._spinner.live.is_started
