"""A request as the scheduler sees it. Three lengths say how far it is: computed, tokens, known.

::

    0           num_cached     num_computed     num_tokens   num_known         max_len
    |===========|==============|----------------|............|                 |
     KV from     KV computed    the host has     promised:
     the prefix  for this       the ids          only the
     cache       request                         device has the id

The prompt comes first, then the output. A planned row that samples *promises* one more token. It
counts as known while planning, and `commit` fulfils the promise. Each step lets `num_computed`
catch up with `num_known`. That one rule covers prefill, chunked prefill, a prefix hit, decode, and
resuming.

To *retract* a running request is to take its pages. It waits, resumes later, and its tokens are
computed again. Layers whose caches have the same lifetime form a *cache group*. Most models have
one, the full group (`minisgl.core.groups`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from minisgl.core.adapters import Adapter
from minisgl.core.sampling import SamplingParams

IdArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]
Mask = npt.NDArray[np.uint32]
"""[W], W = ceil(vocabulary / 32): bit i of word w is set if token 32 * w + i is allowed."""

ALL = 2**31
"""More than a prompt has tokens: `Req.num_scored` of a request that has nothing more to report."""


class Order(NamedTuple):
    """A request's place; requests sort by it, the lowest first. Without API keys, tag and key are
    0."""

    priority: int
    tag: int  # tokens that its API key was served and owed before (`minisgl_gateway.keys.shares`)
    arrival: int  # its number
    key: int  # the number of its API key

    @property
    def claim(self) -> tuple[int, int]:
        """What decides whether a request may take another one's place: its arrival does not."""
        return self.priority, self.tag


class Masker(Protocol):
    """Restricts the next token of a request, depending on its output so far (a grammar).

    Each rank makes its own masker from the request, so all ranks have the same masks.
    """

    def mask(self, output: Sequence[int], drafts: Sequence[int] = ()) -> Mask:
        """Return the mask for the token after the committed output ids; it allows at least one.

        output: equals or continues the output of the last call. drafts: tokens that may come after
        it, each allowed by the mask before; the next call need not have them. Raises RequestError
        if it cannot make a mask. That fails a request without output; one with output ends as at
        its length limit. Either every rank raises it or none.
        """

    def forced(self, output: Sequence[int]) -> Sequence[int]:
        """Return tokens of the text that must come after `output`; none if it may go on in several
        ways. They are guesses: other tokens may spell the same text."""


@dataclass(slots=True, kw_only=True, eq=False)
class Req:
    """The progress of a request. Mutable: only the scheduler, whose state it is, changes it."""

    uid: int
    prompt: IdArray
    sampling: SamplingParams
    max_len: int  # the most tokens of prompt and output; they fit the context and the pool
    order: Order  # the lower goes first
    stop_ids: frozenset[int]  # output ids that end the request
    namespace: str = ""  # requests share pages of the prefix cache only within one namespace
    adapter: Adapter | None = None  # None is the model alone
    masker: Masker | None = None  # its rows are sampled late (`minisgl.scheduler.loop`)
    prediction: IdArray = field(default_factory=lambda: np.zeros(0, np.int32))
    """Ids that the output may repeat, a source of drafts."""
    images: Sequence[Any] = ()  # `minisgl.core.image.Image`s of the prompt
    tree_prompt: IdArray | None = None
    """The prompt as the prefix cache has it, with ids that tell images apart; None without images.
    """

    # --- progress
    output: list[int] = field(default_factory=list)  # committed ids
    guesses: list[list[int]] = field(default_factory=list)
    """For each id of `output` that this engine has sampled, the guesses of the next ones
    (`StepResult.guesses`)."""
    num_known: int = 0  # tokens of prompt and output, and the promised ones
    num_computed: int = 0  # tokens whose KV is computed, or is written by a launched step
    num_scored: int = ALL
    """Leading prompt tokens that have yielded the log-probability of their next token, or are
    pooled, or need no pooling; `ALL` if the request asks for no more. Later tokens are computed
    even if the prefix cache has their KV, because only computing them yields these."""
    pooled: FloatArray | None = None  # the sum over the pooled tokens below `num_scored`

    # --- what it holds while it runs
    pages: list[int] = field(default_factory=list)  # of the full group, one for each page's tokens
    num_stored: int = 0
    """Leading tokens that had their KV in the full group of the prefix cache when it started. It
    can reuse fewer, if another cache group has lost pages that the last of them need."""
    handle: Any = None  # the position in the prefix cache that it keeps locked
    table_idx: int = -1  # its row in the engine's tables; -1 while it does not run
    num_flights: int = 0  # launched steps with a row of it that are not committed yet, 0 to 2
    leaving: bool = False
    """No more rows are planned for it. When its last launched step is committed, its pages are
    released. Then it is deleted if it has ended, or waits again if it was retracted."""
    ended: bool = False  # its last event was made; later tokens are discarded

    # --- for its `Finished`
    num_cached: int = 0  # tokens that the prefix cache had when it first started
    prefix_differs_at: int | None = None  # see `Finished`
    num_chunks: int = 0  # steps in which prompt tokens were computed
    num_retractions: int = 0
    num_drafted: int = 0  # drafts that steps have computed
    num_accepted: int = 0  # those of them that became output tokens
    queued_at: float = 0.0  # this and the next two: seconds on the scheduler's clock
    launched_at: float = 0.0
    first_token_at: float = 0.0

    # --- for planning
    first_step: int = 0  # the step in which it first ran
    chunk_step: int = 0  # the step that had its last chunk, or in which it started since
    num_reusable: int | None = None
    """Prompt tokens that the prefix cache had, or that another request was computing, when the
    scheduler last looked; None if it has not looked."""
    prefix_source: Req | None = None  # that other request
    drafts: Any = None  # what the drafters remember of it
    drafter: str = ""  # the name of the drafter of its last drafts

    @property
    def num_prompt(self) -> int:
        return len(self.prompt)

    @property
    def num_tokens(self) -> int:
        """Tokens whose ids the host has."""
        return len(self.prompt) + len(self.output)

    @property
    def num_left(self) -> int:
        """Tokens left to compute. While the request waits, this leaves out what it can reuse."""
        reusable = self.num_reusable if self.table_idx < 0 else None
        return self.num_known - self.num_computed - (reusable or 0)

    def token_ids(self, start: int, end: int) -> IdArray:
        """Return the committed ids in [start, end), int32. `end` is at most `num_tokens`."""
        return self._ids(self.prompt, start, end)

    @property
    def prompt_in_tree(self) -> IdArray:
        """The prompt as the prefix cache has it."""
        return self.prompt if self.tree_prompt is None else self.tree_prompt

    def ids_in_tree(self, start: int, end: int) -> IdArray:
        """Return the committed ids in [start, end) as the prefix cache has them."""
        return self._ids(self.prompt_in_tree, start, end)

    def _ids(self, prompt: IdArray, start: int, end: int) -> IdArray:
        num_prompt = len(prompt)
        if end <= num_prompt:
            return prompt[start:end]
        tail = np.asarray(self.output[max(start - num_prompt, 0) : end - num_prompt], np.int32)
        return tail if start >= num_prompt else np.concatenate([prompt[start:], tail])
