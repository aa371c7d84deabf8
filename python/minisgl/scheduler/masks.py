"""The masks of a step's late rows, from the maskers of their requests."""

from __future__ import annotations

import numpy as np

from minisgl.core.plan import Plan
from minisgl.core.req import Mask
from minisgl.errors import RequestError
from minisgl.scheduler.requests import Requests
from minisgl.utils.logger import get_logger

logger = get_logger(__name__)


def masks_of(
    plan: Plan, requests: Requests, vocab_size: int, refused: dict[int, RequestError]
) -> list[Mask]:
    """Return the masks of a launched plan's late rows. The plan before it must be committed.

    A mask allows every token if the sampled one will be discarded: the request has ended, an
    earlier step has failed, or the masker has raised an error, which is added to `refused` by uid:
    it fails a request without output, and ends another one as its length limit does.
    """
    any_token = np.full(-(-vocab_size // 32), 0xFFFFFFFF, np.uint32)
    masks = []
    for index in plan.late_rows:
        req = requests.by_uid[plan.uids[plan.sample_rows[index]]]
        mask = any_token
        if not req.ended and requests.void_from is None:
            assert req.masker
            assert len(req.output) == plan.output_idxs[index]
            try:
                mask = req.masker.mask(req.output)
            except RequestError as error:
                refused[req.uid] = error
                if req.output:
                    logger.warning(
                        "request %d ends after %d tokens: %s", req.uid, len(req.output), error
                    )
        masks.append(mask)
    return masks
