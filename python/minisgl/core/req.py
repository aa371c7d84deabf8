"""One request as the scheduler sees it: three lengths, the rest is derived.

::

    prompt                     output            promised
    |--------------------------|-----------------|----|
    0     num_cached       num_computed     num_tokens  num_known            max_len
    |=====|================|
     shared  computed by us (its writing step is launched)

`num_tokens` counts ids that the host has. A launched sampling row *promises* one more: it counts
as known for planning, its id is only on the device until `commit` fulfils it. A step lets
`num_computed` catch up with `num_known`, whatever the request is doing: prefill, a chunk of it,
decode, or resuming after a retraction.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from minisgl.core.masker import Masker
from minisgl.core.sampling import SamplingParams

IdArray = npt.NDArray[np.int32]


@dataclass(slots=True, kw_only=True, eq=False)
class Req:
    """A request's progress. Mutable: it is the scheduler's state, and only the scheduler writes it.

    prompt: int32 ids. max_len: prompt plus the output tokens allowed; fits the context and the
    pool. order: (priority, arrival), lower goes first. stop_ids: output ids that end the request.
    namespace: only requests with the same one share pages of the prefix cache.
    pages: the request's page table in the full group, one page id per `page_size` tokens that have
    room. num_stored: tokens at the front whose pages in the full group the prefix cache owns; more
    than `num_cached` where other cache groups have lost pages.
    masker: restricts which tokens it may output; its rows are sampled late.
    handle: what the prefix cache keeps locked for this request while it holds pages.
    table_idx: its row in the engine's page table and token table, -1 while not running.
    num_reusable: prompt tokens that the prefix cache had, or another request was computing, when
    the scheduler last looked; None if it has not. leader: the request that was computing them.
    num_flights: launched steps that carry it and are not committed yet (0 to 2).
    leaving: no more rows are planned; its pages go back when the last flight is home, and then it
    is gone (`ended`) or waits to be resumed (retracted).
    """

    uid: int
    prompt: IdArray
    sampling: SamplingParams
    max_len: int
    order: tuple[int, int]
    stop_ids: frozenset[int]
    namespace: str = ""

    masker: Masker | None = None
    output: list[int] = field(default_factory=list)
    num_known: int = 0
    num_computed: int = 0

    pages: list[int] = field(default_factory=list)
    num_stored: int = 0
    handle: Any = None
    table_idx: int = -1
    num_flights: int = 0
    leaving: bool = False
    ended: bool = False

    num_cached: int = 0
    num_chunks: int = 0
    num_retractions: int = 0
    num_reusable: int | None = None
    leader: Req | None = None
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
    def num_left(self) -> int:
        """Tokens left to compute; those of a waiting request that it can share do not count."""
        reusable = self.num_reusable if self.table_idx < 0 else None
        return self.num_known - self.num_computed - (reusable or 0)

    def token_ids(self, start: int, end: int) -> IdArray:
        """Committed ids in [start, end) as int32. `end` is at most `num_tokens`."""
        num_prompt = len(self.prompt)
        if end <= num_prompt:
            return self.prompt[start:end]
        tail = np.asarray(self.output[max(start - num_prompt, 0) : end - num_prompt], np.int32)
        return tail if start >= num_prompt else np.concatenate([self.prompt[start:], tail])
