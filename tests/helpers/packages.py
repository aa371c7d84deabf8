"""Which of our packages are here: the core's tests also run without the others."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Final

HAS_ZOO: Final = find_spec("minisgl_zoo") is not None
"""Whether requests may have options that change the logits."""
