"""One request as the scheduler sees it: three lengths, the rest is derived.

::

    prompt                     output            promised
    |--------------------------|-----------------|----|
    0        num_cached             num_computed     num_known = num_tokens + promised
    |========|======================|
     shared    computed by us (its writing step is launched)

`num_tokens` counts ids that the host has. A launched sampling row *promises* one more: it counts
for planning, its id is only on the device until `commit` fulfils it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from minisgl.core.sampling import SamplingParams

IdArray = npt.NDArray[np.int32]


@dataclass(slots=True, kw_only=True, eq=False)
class Req:
    """A request's progress. Mutable: it is the scheduler's state, and only the scheduler writes it.

    prompt: int32 ids. max_tokens: resolved, prompt + max_tokens fits the context and the pool.
    pages: the request's page table, one page id per `page_size` tokens that have room.
    handle: what the prefix cache locked for this request, None while it holds no pages.
    table_idx: its row in the engine's page table and token table, -1 while not running.
    num_flights: launched steps that carry it and are not committed yet (0 to 2).
    ended: no more rows are planned; its pages go back when the last flight is home.
    """

    uid: int
    prompt: IdArray
    sampling: SamplingParams
    max_tokens: int
    priority: int
    arrival: int

    output: list[int] = field(default_factory=list)
    promised: int = 0
    num_computed: int = 0

    pages: list[int] = field(default_factory=list)
    handle: Any = None
    table_idx: int = -1
    num_flights: int = 0
    ended: bool = False

    num_cached: int = 0
    num_chunks: int = 0
    num_retractions: int = 0
    accepted_at: float = 0.0
    launched_at: float = 0.0
    first_token_at: float = 0.0

    @property
    def num_prompt(self) -> int:
        return len(self.prompt)

    @property
    def num_tokens(self) -> int:
        """Tokens whose ids the host has."""
        return len(self.prompt) + len(self.output)

    @property
    def num_known(self) -> int:
        """Tokens that are known or promised: `num_computed` catches up with this."""
        return len(self.prompt) + len(self.output) + self.promised

    @property
    def order(self) -> tuple[int, int]:
        """First come, first served within a priority; lower goes first."""
        return (self.priority, self.arrival)

    def token_ids(self, start: int, end: int) -> IdArray:
        """Committed ids in [start, end) as int32. `end` is at most `num_tokens`."""
        num_prompt = len(self.prompt)
        if end <= num_prompt:
            return self.prompt[start:end]
        tail = np.asarray(self.output[max(start - num_prompt, 0) : end - num_prompt], np.int32)
        return tail if start >= num_prompt else np.concatenate([self.prompt[start:], tail])


