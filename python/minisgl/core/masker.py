"""Which tokens a request may output next, where that depends on its output so far (a grammar)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

Mask = npt.NDArray[np.uint32]
"""[W], W = ceil(vocabulary / 32): bit i of word w is set if token 32 * w + i is allowed."""


class Masker(Protocol):
    """The masks of one request. Each rank makes its own from the request, so all have the same."""

    def mask(self, output: Sequence[int]) -> Mask:
        """The mask of the token after the committed output ids; it allows at least one token.

        `output` is that of the last call, or continues it. Raises RequestError if there is no
        such mask, which fails the request. Every rank raises it, or none.
        """
