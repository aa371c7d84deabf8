"""The scheduler: every step lets *computed* catch up with *known*, under a token budget.

A request has tokens that are known (or promised), and the KV of some of them is computed. A row of
a step computes the next span of tokens. Prefill, chunked prefill, a prefix hit, decode and a
resumed request are all this one case. `minisgl.core.req` draws the lengths.

    add     message -> the request is queued, or refused with an error that states the limit
    plan    state -> Plan: decodes first, then chunks of prompts that share a budget
            (`minisgl.scheduler.budget`: the chunk size and the stall bound)
    commit  outcome of a plan -> events; requests that ended release their pages

A plan is a pure function of the messages and outcomes so far; the clock is read only to report
times. A request that ends or is retracted keeps its pages until every launched step with a row of
it is committed (`_release`). Pages and the prefix tree are in `minisgl.kvcache.manager`.

Sources: one token budget for chunked prefill and decode is Sarathi-Serve (Agrawal et al., OSDI
2024); iteration-level scheduling is Orca (Yu et al., OSDI 2022).
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat

import msgspec
import numpy as np

from minisgl.core.event import Accepted, Event, Failed, Finished, FinishReason, Token
from minisgl.core.masker import Mask, Masker
from minisgl.core.plan import PROMISED, Plan, StepFailed, StepOutcome
from minisgl.core.req import IdArray, Req
from minisgl.errors import MinisglError, NonFiniteLogits, RequestError
from minisgl.kvcache import create_cache_manager
from minisgl.message import AbortMsg, StopMsg, UserMsg, ids_from_bytes, ids_to_bytes
from minisgl.scheduler.admission import admissible_max_tokens
from minisgl.scheduler.budget import PromptBudget
from minisgl.scheduler.config import SchedulerConfig
from minisgl.scheduler.plan_builder import PlanBuilder
from minisgl.scheduler.stats import SchedulerStats

WINDOW = 256
"""A step considers at most this many waiting requests, in order: about 0.1 ms of planning."""


class Scheduler:
    """The state of all requests of one engine. Mutable, single-threaded, no torch, no I/O."""

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
        create_masker: Callable[[UserMsg], Masker | None] = lambda message: None,
    ) -> None:
        """create_masker: returns the masker of a request, or None if it needs none."""
        self.config = config
        self.stats = SchedulerStats()
        self._clock = clock
        self._create_masker = create_masker
        self._cache = create_cache_manager(
            config.cache_groups, config.cache, config.page_size, config.max_prefill_tokens
        )
        self._requests: dict[int, Req] = {}
        self._waiting: list[Req] = []  # by order
        self._running: list[Req] = []  # by order
        self._leaving: dict[int, Req] = {}  # by uid; in a flight, not planned any more
        self._free_table_idxs = list(range(config.max_running - 1, -1, -1))
        self._late: set[int] = set()  # table rows of requests with a masker
        self._with_logprobs: set[int] = set()  # table rows
        self._with_options: set[int] = set()  # table rows
        self._tops: dict[int, int] = {}  # table row to number of most likely tokens
        self._step = 0
        self._arrivals = 0
        self._any_token = np.full(-(-config.vocab_size // 32), 0xFFFFFFFF, np.uint32)
        self._refused: dict[int, RequestError] = {}  # by uid; the masker has no mask
        self._void_from: int | None = None  # outcomes from this failed step on are discarded

    @property
    def runnable(self) -> bool:
        """Whether a later turn can plan a step even if no message arrives."""
        return bool(self._waiting or self._running or self._leaving)

    # --- messages ------------------------------------------------------------------------------

    def handle(self, message: UserMsg | AbortMsg | StopMsg) -> list[Event]:
        """Apply a message. Returns the events that answer it at once."""
        match message:
            case UserMsg():
                return [self.add(message)]
            case AbortMsg():
                return self._end_early(message.uid, "abort", None, message.because)
            case StopMsg():
                return self._end_early(message.uid, "stop", message.num_tokens)

    def add(self, message: UserMsg) -> Accepted | Failed:
        """Queue the request, or refuse it with an error that states the limit."""
        assert message.uid not in self._requests, f"uid {message.uid} is in use"
        # A copy, because the tree passes ids to C++ by DLPack, which rejects read-only arrays.
        prompt = ids_from_bytes(message.ids).copy()
        try:
            max_tokens = admissible_max_tokens(
                self.config, prompt, message.sampling, num_waiting=len(self._waiting)
            )
            seed = message.sampling.seed
            sampling = msgspec.structs.replace(
                message.sampling, max_tokens=max_tokens, seed=message.uid if seed is None else seed
            )
        except RequestError as error:
            return Failed.of(message.uid, error)
        stop_ids = frozenset(sampling.stop_token_ids)
        self._arrivals += 1
        req = Req(
            uid=message.uid,
            prompt=prompt,
            sampling=sampling,
            max_len=len(prompt) + max_tokens,
            order=(message.priority, message.share, self._arrivals),
            stop_ids=stop_ids if sampling.ignore_eos else stop_ids | self.config.eos_ids,
            namespace=message.namespace,
            num_known=len(prompt),
            masker=self._create_masker(message),
            accepted_at=self._clock(),
        )
        self._requests[req.uid] = req
        insort(self._waiting, req, key=_order)
        return Accepted(
            uid=req.uid, num_prompt_tokens=len(prompt), sampling=sampling, form=message.form
        )

    def _end_early(
        self, uid: int, reason: FinishReason, num_output: int | None, because: Failed | None = None
    ) -> list[Event]:
        """End a request early, with `because` if given. Returns no event if it has ended already.

        num_output: the output tokens that the client gets; None is all.
        """
        req = self._requests.get(uid)
        if req is None or req.ended:
            return []
        if num_output is not None:
            # The client does not get the tokens after the stop string, so no later prompt has
            # them. They must not enter the prefix cache.
            del req.output[num_output:]
        return [self._fail(req, because.to_error()) if because else self._end(req, reason)]

    # --- plan ----------------------------------------------------------------------------------

    def plan(self) -> Plan | None:
        """Return the next step, or None if nothing can be computed now."""
        if self._void_from is not None and not self._recover():
            return None
        plan = PlanBuilder(
            self._step,
            late=self._late,
            with_logprobs=self._with_logprobs,
            tops=self._tops,
            with_options=self._with_options,
        )
        self._plan_decodes(plan)
        if plan.unfinished or self._waiting:
            self._plan_prompts(plan)
        if not plan.uids:
            assert not plan.begins, "a request has started without a row"
            return None
        self._step += 1
        self.stats.num_steps += 1
        return plan.build()

    def _plan_decodes(self, plan: PlanBuilder) -> None:
        """Plan one token for each running request that is up to date; the others are unfinished."""
        page_size = self.config.page_size
        unfinished: list[Req] = []
        for req in self._running[:]:
            start = req.num_computed
            known = req.num_known
            if known >= req.max_len or req.table_idx < 0 or req.leaving:
                continue  # its last token is promised, or it was retracted in this loop
            if known - start != 1:
                unfinished.append(req)
                continue
            if start >= len(req.pages) * page_size and not self._make_room(plan, req, start + 1):
                continue
            num_prompt, output = len(req.prompt), req.output
            if known != num_prompt + len(output):
                token = PROMISED
            elif output:
                token = output[-1]
            else:  # only the last prompt token is left to compute
                token = int(req.prompt[-1])
                req.num_chunks += 1
                self._cache.publish(req, known, self._step)
            plan.uids.append(req.uid)
            plan.table_idxs.append(req.table_idx)
            plan.starts.append(start)
            plan.decode_ids.append(token)
            plan.output_idxs.append(known - num_prompt)
            req.num_computed = known
            req.num_known = known + 1
            req.num_flights += 1
        plan.end_decodes()
        plan.unfinished = [req for req in unfinished if req.table_idx >= 0 and not req.leaving]

    def _make_room(self, plan: PlanBuilder, req: Req, end: int) -> bool:
        """Allocate pages for the tokens of `req` below `end`.

        If pages run out, retracts running requests, the last in the order first. Returns False if
        `req` must wait until retracted requests release their pages, or if `req` was itself
        retracted.
        """
        while not self._cache.extend(req, req.num_computed, end, plan.new_pages):
            if self._leaving:
                return False
            victim = self._running[-1]
            self._retract(victim)
            if victim is req:
                return False
        return True

    def _plan_prompts(self, plan: PlanBuilder) -> None:
        """Share the step's prompt budget among unfinished and waiting requests, in order.

        While the first of them needs more than one step, shorter prompts may use up to half of the
        budget before it, the shortest first.
        """
        waiting = self._waiting[:WINDOW] if self._free_table_idxs else []
        in_order = sorted([*plan.unfinished, *waiting], key=_order)
        first = next((req for req in in_order if self._ensure_running(plan, req)), None)
        if first is None:
            return
        budget = PromptBudget(self.config, len(plan.uids))
        if first.num_left > budget.fitting(first.num_computed):
            self._plan_chunks(plan, budget, self._shorter(first, in_order), share=0.5)
        self._plan_chunks(plan, budget, in_order)

    def _shorter(self, first: Req, in_order: list[Req]) -> list[Req]:
        """Requests of the same priority with fewer tokens left to compute, the fewest first."""
        shorter = []
        for req in in_order:
            if req.order[0] == first.order[0] and req is not first:
                if req.table_idx < 0 and req.num_reusable is None:
                    req.num_reusable = self._cache.num_cached(req, self._reusable_ids(req))
                if req.num_left < first.num_left:
                    shorter.append(req)
        return sorted(shorter, key=_num_left)

    def _plan_chunks(
        self, plan: PlanBuilder, budget: PromptBudget, requests: list[Req], share: float = 1.0
    ) -> None:
        """Plan a chunk for each request that has none yet, until this share of the budget is used.

        Skips waiting requests that cannot start.
        """
        left = budget.fitting(0, share)
        for req in requests:
            if not left:
                return
            if req.uid in plan.with_chunk or not self._ensure_running(plan, req):
                continue
            start = req.num_computed
            if (num_tokens := budget.fitting(start, share)) and self._plan_chunk(
                plan, req, num_tokens
            ):
                budget.take(start, req.num_computed - start)
                left = budget.fitting(0, share)

    def _plan_chunk(self, plan: PlanBuilder, req: Req, num_tokens: int) -> bool:
        """Plan the next chunk of an unfinished request, of at most `num_tokens`.

        Returns False, and plans nothing, if pages are missing.
        """
        start, known = req.num_computed, req.num_known
        end = self._cache.chunk_end(req, start, min(known, start + num_tokens))
        if not self._make_room(plan, req, end):
            return False
        plan.add_chunk(req, start, end)
        req.num_computed = end
        req.num_chunks += 1
        req.num_flights += 1
        self._cache.publish(req, end, self._step)
        if end == known:
            plan.unfinished.remove(req)
            req.num_known += 1
        return True

    def _ensure_running(self, plan: PlanBuilder, req: Req) -> bool:
        """Start `req` if it waits and can start. Returns whether it runs.

        It cannot start while another request computes a prefix that it can share, or while pages
        are missing. If pages are missing, no other request starts in this step either: pages that
        become free are for this one.
        """
        if req.table_idx >= 0:
            return not req.leaving
        if (
            plan.is_full
            or not self._free_table_idxs
            or self._waits_for_prefix(req, plan.unfinished)
        ):
            return False
        num_cached = self._cache.attach(req, self._reusable_ids(req), self._step)
        if num_cached is None:
            return False
        end, others, growth = req.num_known + 1, len(self._running), self.config.watermark_tokens
        if not self._cache.has_room(req, end, plan.unfinished, others, growth):
            self._cache.release(req)
            plan.is_full = True
            return False
        self._start(plan, req, num_cached)
        return True

    def _waits_for_prefix(self, req: Req, unfinished: list[Req]) -> bool:
        """Return whether `req` should wait for pages that a running request is computing.

        `req` remembers that request until the pages are computed, so a waiting request is compared
        with each unfinished one about once. A request never waits for one of lower priority.
        """
        source = req.prefix_source
        if source is not None and source.table_idx >= 0 and not source.leaving:
            assert req.num_reusable is not None
            if source.num_computed < req.num_reusable:
                return True
        for other in unfinished:
            if other.order[0] <= req.order[0]:
                num_common = self._cache.num_common(req, other)
                if num_common > other.num_computed:
                    req.prefix_source, req.num_reusable = other, num_common
                    return True
        req.prefix_source = None
        return False

    def _reusable_ids(self, req: Req) -> IdArray:
        """Return the ids whose KV may come from the cache: all but the last, which is computed."""
        return req.token_ids(0, req.num_tokens - 1)

    def _start(self, plan: PlanBuilder, req: Req, num_cached: int) -> None:
        self._waiting.remove(req)
        req.table_idx = self._free_table_idxs.pop()
        if req.masker:
            self._late.add(req.table_idx)
        if req.sampling.logprobs:
            self._with_logprobs.add(req.table_idx)
        if req.sampling.changes_logits:
            self._with_options.add(req.table_idx)
            ids = ids_to_bytes(req.token_ids(0, req.num_tokens))
            stop_ids = tuple(sorted(req.stop_ids))
            plan.histories.append((req.table_idx, req.num_prompt, stop_ids, ids))
        if req.sampling.top_logprobs:
            self._tops[req.table_idx] = req.sampling.top_logprobs
        req.num_computed = num_cached
        plan.begins.append((req.table_idx, req.sampling))
        self._cache.list_pages(req, plan.new_pages)
        if req.num_retractions == 0:
            req.first_step = plan.step
            req.num_cached = num_cached
            req.launched_at = self._clock()
            self.stats.num_prompt_tokens += req.num_prompt
            self.stats.num_cached_tokens += num_cached
        insort(self._running, req, key=_order)
        insort(plan.unfinished, req, key=_order)

    def masks(self, plan: Plan) -> list[Mask]:
        """Return the masks of a launched plan's late rows. The plan before it is committed.

        The mask allows every token where the sampled token will be discarded: the request has
        ended, an earlier step failed, or there is no mask, which fails the request.
        """
        masks = []
        for index in plan.late_rows:
            req = self._requests[plan.uids[plan.sample_rows[index]]]
            if req.ended or self._void_from is not None:
                masks.append(self._any_token)
            else:
                assert req.masker
                assert len(req.output) == plan.output_idxs[index]
                try:
                    masks.append(req.masker.mask(req.output))
                except RequestError as error:
                    self._refused[req.uid] = error
                    masks.append(self._any_token)
        return masks

    # --- commit --------------------------------------------------------------------------------

    def commit(self, plan: Plan, outcome: StepOutcome) -> list[Event]:
        """Append the sampled tokens to their requests, in row order. Returns the events.

        This fulfils the step's promises. Requests that have left are released.
        """
        requests = self._requests
        rows = [requests[uid] for uid in plan.uids]
        for req in rows:
            req.num_flights -= 1
        events: list[Event] = []
        while self._refused:
            uid, error = self._refused.popitem()
            if not requests[uid].ended:
                events.append(self._fail(requests[uid], error))
        if isinstance(outcome, StepFailed):
            if self._void_from is None:  # else an earlier failed step voids this one too
                assert outcome.uids, "a failed step must fail a request, or it would be repeated"
                self._void_from = plan.step
                for uid in outcome.uids:
                    if not requests[uid].ended:
                        events.append(self._fail(requests[uid], outcome.error))
        elif self._void_from is None:
            now = self._clock()
            num_past_end = 0
            damaged: list[Req] = []
            logprobs: Iterable[float | None] = repeat(None, len(plan.sample_rows))
            if plan.logprob_rows:
                logprobs = map(outcome.logprobs.get, range(len(plan.sample_rows)))
            tops: Iterable[list[tuple[int, float]]] = repeat([], len(plan.sample_rows))
            if plan.top_rows:
                tops = [outcome.tops.get(index, []) for index in range(len(plan.sample_rows))]
            for row, token, logprob, top in zip(
                plan.sample_rows, outcome.next_ids, logprobs, tops, strict=True
            ):
                req = rows[row]
                if req.ended:
                    num_past_end += 1  # overlap: the row was launched before the end was known
                    continue
                if token < 0:
                    damaged.append(req)
                    continue
                output = req.output
                output.append(token)
                if len(output) == 1:
                    req.first_token_at = now
                stop = token in req.stop_ids
                if top:
                    top = top[: req.sampling.top_logprobs]
                events.append(Token(uid=req.uid, id=token, silent=stop, logprob=logprob, top=top))
                if stop or len(req.prompt) + len(output) == req.max_len:
                    is_match = stop and token in req.sampling.stop_token_ids
                    end = self._end(req, "stop" if stop else "length", token if is_match else None)
                    events.append(end)
            self.stats.num_output_tokens += len(plan.sample_rows) - num_past_end - len(damaged)
            if damaged:  # its KV may be damaged since its first step, and in the prefix cache
                self._void_from = min(req.first_step for req in damaged)
                events += [self._fail(req, NonFiniteLogits()) for req in damaged]
        if self._leaving:
            for req in rows:
                if req.leaving and req.num_flights == 0 and req.table_idx >= 0:
                    self._release(req)
        return events

    # --- how requests leave --------------------------------------------------------------------

    def _end(self, req: Req, reason: FinishReason, stop_match: int | None = None) -> Finished:
        """End an accepted request without an error. No other method does."""
        req.ended = True
        self._stop_planning(req)
        now = self._clock()
        launched_at = req.launched_at or now
        first_token_at = req.first_token_at or now
        self.stats.num_finished += 1
        return Finished(
            uid=req.uid,
            reason=reason,
            stop_match=stop_match,
            num_prompt_tokens=req.num_prompt,
            num_output_tokens=len(req.output),
            num_cached_tokens=req.num_cached,
            num_chunks=req.num_chunks,
            num_retractions=req.num_retractions,
            queued_s=launched_at - req.accepted_at,
            prefill_s=first_token_at - launched_at,
            decode_s=now - first_token_at,
        )

    def _fail(self, req: Req, error: MinisglError) -> Failed:
        """End an accepted request with an error. No other method does."""
        req.ended = True
        self._stop_planning(req)
        return Failed.of(req.uid, error)

    def _retract(self, req: Req) -> None:
        """Take the pages of a running request. It resumes later with the same tokens."""
        req.num_retractions += 1
        self.stats.num_retractions += 1
        self._stop_planning(req)

    def _stop_planning(self, req: Req) -> None:
        """Plan no more rows for a request. It is released now, or after its last flight."""
        if req.leaving:
            return  # it was retracted and now ends, before its last flight is settled
        if req.table_idx < 0:
            self._waiting.remove(req)
            del self._requests[req.uid]
            return
        self._running.remove(req)
        req.leaving = True
        if req.num_flights == 0:
            self._release(req)
        else:
            self._leaving[req.uid] = req

    def _release(self, req: Req) -> None:
        """Release the pages and the table row of a request that is in no flight.

        A request that has ended is deleted. A retracted one waits again.
        """
        assert req.num_flights == 0
        self._leaving.pop(req.uid, None)
        if self._void_from is None:
            # A row launched before the end was known may have computed one more token than the
            # request has. All steps that wrote these pages are launched: they precede _step.
            self._cache.publish(req, min(req.num_computed, req.num_tokens), self._step - 1)
        self._cache.release(req)
        self._free_table_idxs.append(req.table_idx)
        self._late.discard(req.table_idx)
        self._with_logprobs.discard(req.table_idx)
        self._tops.pop(req.table_idx, None)
        self._with_options.discard(req.table_idx)
        req.table_idx = -1
        req.leaving = False
        if req.ended:
            del self._requests[req.uid]
        else:
            req.num_computed = 0
            req.num_known = req.num_tokens
            req.num_reusable = req.prefix_source = None
            insort(self._waiting, req, key=_order)

    def _recover(self) -> bool:
        """After a failed step, retract all requests and drop the KV from that step on.

        Returns False, and does nothing, while a flight is not settled. Later steps may have read
        KV that the failed step did not write. All requests are computed again, because failures
        are too rare to find out which of them are affected.
        """
        assert self._void_from is not None
        if any(req.num_flights for req in self._requests.values()):
            return False
        for req in self._running[::-1]:
            self._retract(req)
        self._cache.drop(self._void_from)
        self._void_from = None
        return True

    # --- for reports and tests -----------------------------------------------------------------

    @property
    def waiting(self) -> Sequence[Req]:
        return self._waiting

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_pages(self) -> int:
        """Pages of all cache groups."""
        return self._cache.num_pages

    @property
    def num_used_pages(self) -> int:
        """Pages that running requests hold."""
        return self._cache.num_used_pages

    @property
    def num_cached_pages(self) -> int:
        """Pages that no request holds, kept for later requests with the same prefix."""
        return self._cache.num_cached_pages

    def check(self) -> None:
        """Raise AssertionError if pages, locks or lengths do not add up. Slow: for tests."""
        holders = [*self._running, *self._leaving.values()]
        self._cache.check(holders)
        assert self._waiting == sorted(self._waiting, key=_order)
        assert self._running == sorted(self._running, key=_order)
        everyone = [*holders, *self._waiting]
        assert sorted(self._requests) == sorted(req.uid for req in everyone)
        table_idxs = [*self._free_table_idxs, *(req.table_idx for req in holders)]
        assert sorted(table_idxs) == list(range(self.config.max_running))
        for req in everyone:
            assert req.num_computed <= req.num_known <= req.max_len, req
            assert req.num_tokens <= req.num_known or req.ended, req
            assert 0 <= req.num_flights <= 2, req
        for req in self._waiting:
            assert (req.pages, req.handle, req.num_flights) == ([], None, 0), req


def _order(req: Req) -> tuple[int, int, int]:
    return req.order


def _num_left(req: Req) -> int:
    return req.num_left
