"""The rows of this package (`minisgl.plugins`)."""

from __future__ import annotations

from typing import Final

from minisgl.plugins import Row

ROWS: Final = [
    Row(
        "commands", "bench", "minisgl_bench.run:bench",
        about="[NAME]  measure a server or a model",
    ),
    Row("weights", "dummy", "minisgl_bench.dummy:load_dummy"),
    Row("guards", "pages", "minisgl_bench.page_guard:PageGuard"),
    Row(
        "commands", "replay", "minisgl_bench.run:replay",
        about="FILE  send what `--record FILE` kept, or plan it again",
    ),
    Row(
        "commands", "selfcheck", "minisgl_bench.selfcheck:selfcheck",
        about="[MODEL]  check that batch, cache and schedule change no answer",
    ),
]  # fmt: skip
