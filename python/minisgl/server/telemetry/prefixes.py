"""Names clients whose prompts defeat the prefix cache by what they begin with.

An agent that writes the time, or an id, into the first lines of its prompt makes the server compute
all of it again at each turn. Only the client can change that, so the log says who it is.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from minisgl.core import Finished
from minisgl.utils.logger import get_logger

logger = get_logger(__name__)

EARLY: Final = 200
"""Tokens. A prompt that differs before them from every cached one reuses next to nothing."""
LONG: Final = 1000
"""Tokens. Shorter prompts cost too little to speak of."""
IN_A_ROW: Final = 8
AGAIN_S: Final = 3600.0
"""Between two log lines about one client."""
MAX_CLIENTS: Final = 10_000


class PrefixWatch:
    """Mutable: for each client, how many long prompts in a row differed early, and the time of the
    last log line. Those seen longest ago are forgotten first."""

    def __init__(self) -> None:
        self._clients: OrderedDict[str, tuple[int, float | None]] = OrderedDict()

    def finished(self, client: str, end: Finished, now: float) -> None:
        """now: seconds. A prompt of at least `LONG` tokens counts; one that differs late, or not at
        all, ends the row."""
        if end.num_prompt_tokens < LONG:
            return
        count, logged_at = self._clients.pop(client, (0, None))
        position = end.prefix_differs_at
        count = count + 1 if position is not None and position < EARLY else 0
        if count >= IN_A_ROW and (logged_at is None or now - logged_at >= AGAIN_S):
            logger.warning(
                "%s: the last %d prompts of %d tokens and more differ from all cached ones within "
                "their first %d tokens, the last one at token %d, and were computed again; if they "
                "begin with a date or an id, move it behind what stays the same",
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
