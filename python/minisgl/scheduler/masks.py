"""The masks of rows that are sampled late: what a grammar allows behind the committed tokens."""

from __future__ import annotations

import numpy as np

from minisgl.core.plan import Plan
from minisgl.core.req import Mask, Req
from minisgl.errors import RequestError
from minisgl.scheduler.drafting import draft_rows
from minisgl.scheduler.requests import Requests
from minisgl.utils.logger import get_logger

logger = get_logger(__name__)


class LateMasks:
    """Makes the masks of a step. Mutable: it keeps the errors of maskers until the next commit.

    refused: by uid, the errors that end requests. A request without output fails; another one ends
    as its length limit does. unmasked: by uid, the output index of a draft's row that has no mask.
    """

    def __init__(self, requests: Requests, vocab_size: int) -> None:
        self.refused: dict[int, RequestError] = {}
        self.unmasked: dict[int, int] = {}
        self._requests = requests
        self._any_token = np.full(-(-vocab_size // 32), 0xFFFFFFFF, np.uint32)

    def of(self, plan: Plan) -> list[Mask]:
        """Return the masks of a launched plan's late rows.

        A mask allows every token if the sampled one will be discarded: the request has ended, an
        earlier step has failed, the masker has raised an error, or the row computes a draft that
        cannot be accepted.
        """
        masks = []
        chains: dict[int, tuple[Mask, list[int]]] = {}  # by uid: the last mask, the drafts up to it
        for index in plan.late_rows:
            row = plan.sample_rows[index]
            req = self._requests.by_uid[plan.uids[row]]
            drafts: list[int] | None = []
            if row in draft_rows(plan):
                drafts = _allowed(chains.pop(req.uid, None), int(plan.token_ids[row]))
            mask = None
            if drafts is not None and not req.ended and self._requests.void_from is None:
                assert len(req.output) + len(drafts) == plan.output_idxs[index]
                mask = self._mask(req, drafts)
                if mask is not None:
                    chains[req.uid] = mask, drafts
            masks.append(self._any_token if mask is None else mask)
        return masks

    def clear(self) -> None:
        """Forget the errors: the step is committed."""
        self.refused.clear()
        self.unmasked.clear()

    def _mask(self, req: Req, drafts: list[int]) -> Mask | None:
        """Return the mask behind the output and these drafts; None if the masker raises an error.
        That ends the request, or only its drafts."""
        assert req.masker
        try:
            return req.masker.mask(req.output, drafts)
        except RequestError as error:
            if drafts:
                self.unmasked[req.uid] = len(req.output) + len(drafts)
                return None
            self.refused[req.uid] = error
            if req.output:
                num_tokens = len(req.output)
                logger.warning("request %d ends after %d tokens: %s", req.uid, num_tokens, error)
            return None


def _allowed(before: tuple[Mask, list[int]] | None, draft: int) -> list[int] | None:
    """Return the drafts up to this one; None if it cannot be accepted, because a mask forbids it or
    an earlier one. before: the mask and the drafts of the row before it."""
    if before is None:
        return None
    mask, drafts = before
    return [*drafts, draft] if int(mask[draft // 32]) >> draft % 32 & 1 else None
