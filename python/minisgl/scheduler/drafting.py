"""Drafts: guesses of a request's next tokens, which a step computes beside the known token.

::

    known      ... | t |                 t: the last token of the output
    rows             t   d1   d2   d3    one decode row each, at consecutive positions
    sampled          d1  d2   x    y     d1 and d2 are right: the output gets d1, d2 and x

A row samples the token after its own, as it would without drafts: with the seed of its request and
the index of the token in the output. So a draft is right if it is the token that the row before it
has sampled, and the answer does not depend on the drafts. Computed catches up with the tokens that
are right. The KV of wrong ones lies behind the computed tokens, where no row reads it, and later
rows overwrite it.

Each row of a request stores its KV before any row attends (`BaseAttnBackend.forward`), so the rows
of drafts need nothing that other decode rows do not need. A recurrent layer computes the rows of a
request in their order. It keeps what each token since the last state adds, so wrong tokens are
taken back as KV is; drafts end no interval, so no state is made of them
(`CacheManager.num_free_tokens`).

A draft costs no other request anything but the time of its row. It takes free pages only, and no
place of a request: the engine has room for the rows (`most_decode_rows`). There are none in a step
with prompts, nor while a waiting request may start.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from minisgl import plugins
from minisgl.core.plan import PROMISED, Plan, most_decode_rows
from minisgl.core.req import Req
from minisgl.scheduler.config import SchedulerConfig
from minisgl.scheduler.plan_builder import PlanBuilder
from minisgl.scheduler.requests import Requests, SchedulerStats


class Draft(NamedTuple):
    """A request's drafts for a step, in order. drafter: the name of the row of the table `drafters`
    that guessed them."""

    req: Req
    tokens: list[int]
    drafter: str


class Drafts(Protocol):
    """Makes drafts, and chooses how many a step computes (the row `rule` of the table `drafts`).

    It depends on committed ids only, and reads no clock, so all ranks have the same drafts.
    """

    def pays(self, running: Sequence[Req], num_rows: int) -> bool:
        """Return whether the next step should have drafts. It must then be planned after the step
        in flight, which has `num_rows` decode rows, and whose tokens are not known yet."""

    def propose(self, reqs: Sequence[Req], num_rows: int, room: int) -> list[Draft]:
        """Return the drafts of these requests for a step of `num_rows` other rows, at most `room`
        in all. The host has all tokens of the requests."""


CreateDrafts = Callable[[SchedulerConfig, Requests], Drafts | None]


def create_drafts(config: SchedulerConfig, requests: Requests) -> Drafts | None:
    """Return the drafts of `config.drafters`; None if there are none."""
    if not config.drafters:
        return None
    facts = {"made": "by the model"}  # a drafter of that kind is not one of `auto`
    drafters = [plugins.need("drafters", name, "--drafts", **facts) for name in config.drafters]
    drafts: Drafts = plugins.need("drafts", "rule", "--drafts")(drafters, config, requests)
    return drafts


def draft_rows(plan: Plan) -> range:
    """Return the rows of a plan that compute drafts."""
    return range(plan.num_decodes - plan.num_drafts, plan.num_decodes)


def settles_first(launched: Plan, drafts: Drafts | None, requests: Requests) -> bool:
    """Return whether the launched step must be committed before the next one is planned: it has
    drafts, or the next one should have some."""
    if launched.num_drafts:
        return True
    if drafts is None or _may_start(requests) or launched.num_rows > launched.num_decodes:
        return False
    return bool(requests.running) and drafts.pays(requests.running, launched.num_rows)


def _may_start(requests: Requests) -> bool:
    """Return whether a waiting request may start: there is a place for it."""
    return bool(requests.waiting) and requests.num_places > 0


def plan_drafts(
    plan: PlanBuilder, drafts: Drafts | None, requests: Requests, max_running: int
) -> None:
    """Add rows that compute drafts of requests whose tokens the host has all, unless a prompt may
    be computed instead. `plan` has the decode rows of the step."""
    if drafts is None or plan.unfinished or _may_start(requests):
        return
    ids = zip(plan.uids, plan.decode_ids, strict=True)
    reqs = [requests.by_uid[uid] for uid, token in ids if token != PROMISED]
    room = most_decode_rows(max_running, has_drafts=True) - len(plan.uids)
    if not reqs or room <= 0:
        return
    for req, tokens, drafter in drafts.propose(reqs, len(plan.uids), room):
        # A stop token ends the request where the row before it samples it.
        stops = (at for at, token in enumerate(tokens) if token in req.stop_ids)
        # The row before it computes the last known token and samples the one that is promised.
        start, index = req.num_computed, req.num_known - req.num_prompt
        has_pages = requests.cache.num_free_tokens(req, start)
        count = min(next(stops, len(tokens)), has_pages, req.max_len - req.num_known)
        if count <= 0:
            continue
        is_extended = requests.cache.extend(req, start - 1, start + count, plan.new_pages)
        assert is_extended, "the pages were free"
        for offset, token in enumerate(tokens[:count]):
            plan.add_draft(req, start + offset, token, index + offset)
        req.num_drafted += count
        req.drafter = drafter


def accept(req: Req, plan: Plan, index: int, unmasked: Mapping[int, int]) -> bool:
    """Return whether a draft is the token that the row before it has sampled. If so, count it as
    computed: its KV is that of a known token, and its row has sampled the next one.

    index: of its row in `sample_rows`. unmasked: see `LateMasks`.
    """
    output_idx = plan.output_idxs[index]
    if req.ended or len(req.output) != output_idx or unmasked.get(req.uid) == output_idx:
        return False
    if req.output[-1] != plan.token_ids[plan.sample_rows[index]]:
        return False
    req.num_computed += 1
    req.num_known += 1
    req.num_accepted += 1
    return True


def count(stats: SchedulerStats, drafts: Sequence[Req], accepted: Sequence[Req]) -> None:
    """Count the drafts of a committed step, by drafter. drafts, accepted: the request of each."""
    stats.num_drafted += len(drafts)
    stats.num_accepted += len(accepted)
    for rows, counts in ((drafts, stats.drafted_by), (accepted, stats.accepted_by)):
        for req in rows:
            counts[req.drafter] = counts.get(req.drafter, 0) + 1
