"""Text that is written word by word, and settings as text."""

from __future__ import annotations

import io

from minisgl_gateway.shell.settings import Settings
from minisgl_gateway.shell.words import WordWriter


def written(width: int, *pieces: str) -> str:
    file = io.StringIO()
    writer = WordWriter(file, lambda: width)
    for piece in pieces:
        writer.write(piece)
    writer.flush()
    return file.getvalue()


def test_lines_break_between_words() -> None:
    assert written(10, "one ", "tw", "o thr", "ee four") == "one two \nthree four"
    assert written(10, "0123456789 12345") == "0123456789\n12345"
    assert written(20, "a\n\n  b\tc\x1b[2J") == "a\n\n  b\tc[2J"
    assert written(5, "abcdefgh ij") == "abcdefgh \nij"  # longer than a line
    assert written(6, "漢", "字漢", "字") == "漢字漢\n字"


def test_words_are_written_as_soon_as_they_are_complete() -> None:
    file = io.StringIO()
    writer = WordWriter(file, lambda: 80)
    writer.write("one tw")
    assert file.getvalue() == "one "
    writer.write("o")
    writer.write(" 漢字")
    assert file.getvalue() == "one two 漢字"


def test_a_setting_as_text() -> None:
    settings = Settings([("stop", "END"), ("stop_token_ids", "[1, 2]"), ("ignore_eos", "true")])
    fields = {"stop": ["END"], "stop_token_ids": [1, 2], "ignore_eos": True}
    assert settings.as_fields() == fields
    settings.set("stop", "7")
    assert settings.as_fields()["stop"] == ["7"]
