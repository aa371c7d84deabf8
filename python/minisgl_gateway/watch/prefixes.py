"""Logs the clients whose prompts begin differently each time, so that they reuse no prefix.

If an agent writes the time, or an id, into the first lines of its prompt, the server computes the
whole prompt again at each turn. Only the client can change that, so the log names it.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import Final

from minisgl.core import Finished
from minisgl.server.args import ServerArgs
from minisgl.server.observe import EndedPrompt
from minisgl.utils.logger import get_logger

logger = get_logger(__name__)

EARLY: Final = 200
"""A prompt that differs from all cached ones before this token reuses almost nothing."""
LONG: Final = 1000
"""The fewest tokens of a prompt that counts. Shorter ones cost little."""
IN_A_ROW: Final = 8
AGAIN_S: Final = 3600.0
"""The least time between two log lines about one client."""
MAX_CLIENTS: Final = 10_000


class PrefixWatch:
    """Counts, for each client, how many long prompts in a row differed early. Mutable: it keeps
    (count, time of the last log line) of the last `MAX_CLIENTS` clients."""

    def __init__(self) -> None:
        self._clients: OrderedDict[str, tuple[int, float | None]] = OrderedDict()

    def ended(self, prompt: EndedPrompt) -> None:
        """Count a prompt that was not aborted and did not fail."""
        if prompt.end:
            self.finished(prompt.origin.client, prompt.end, time.perf_counter())

    def close(self) -> None:
        """Nothing is open."""

    def finished(self, client: str, end: Finished, now: float) -> None:
        """Count a prompt of at least `LONG` tokens. One that differs late, or not at all, sets the
        count to 0. now: in seconds."""
        if end.num_prompt_tokens < LONG:
            return
        count, logged_at = self._clients.pop(client, (0, None))
        position = end.prefix_differs_at
        count = count + 1 if position is not None and position < EARLY else 0
        if count >= IN_A_ROW and (logged_at is None or now - logged_at >= AGAIN_S):
            logger.warning(
                "%s: the last %d prompts of %d tokens or more differed from all cached ones within "
                "their first %d tokens (the last one at token %d), so they were computed whole; if "
                "they begin with a date or an id, move it behind the text that stays the same",
                client or "a client",
                count,
                LONG,
                EARLY,
                position,
            )
            logged_at = now
        self._clients[client] = (count, logged_at)
        if len(self._clients) > MAX_CLIENTS:
            self._clients.popitem(last=False)


def prefix_watch(args: ServerArgs, model: str) -> PrefixWatch:
    """Return the watch of a server. It needs no option."""
    return PrefixWatch()
