"""Planning: which tokens the next step computes.

A running request is *up to date* if it lacks the KV of one known token only. It decodes: a row
computes that token. Then chunks of prompts share a budget (`minisgl.scheduler.budget`) in order: by
priority, then by arrival. A plan depends only on the messages and outcomes so far; the clock is
read only to report times.

Sources: one token budget for chunked prefill and decode is Sarathi-Serve (Agrawal et al., OSDI
2024); iteration-level scheduling is Orca (Yu et al., OSDI 2022).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable

from minisgl import plugins
from minisgl.core.image import RowImages, span_at
from minisgl.core.plan import PROMISED, Begin, History, Plan, Slotted
from minisgl.core.req import Req
from minisgl.message import ids_to_bytes
from minisgl.scheduler.budget import PromptBudget, left_owed_s, prompt_budget
from minisgl.scheduler.config import SchedulerConfig
from minisgl.scheduler.drafting import Drafts, plan_drafts
from minisgl.scheduler.plan_builder import PlanBuilder
from minisgl.scheduler.requests import Requests, order

MAX_CANDIDATES = 256
"""A step considers at most this many waiting requests, in order, so that planning stays short."""


class Planner:
    """Plans the steps of one engine. It changes `requests`, and keeps no state of its own."""

    def __init__(
        self,
        config: SchedulerConfig,
        requests: Requests,
        clock: Callable[[], float],
        drafts: Drafts | None,
    ) -> None:
        self.config = config
        self._requests = requests
        self._clock = clock
        self._drafts = drafts
        self._give_way = plugins.find("keys", "give_way")  # without keys, no request has rivals

    def plan(self) -> Plan | None:
        """Return the next step, or None if nothing can be computed now."""
        requests, num_retractions = self._requests, self._requests.stats.num_retractions
        if requests.void_from is not None and not requests.recover():
            return None
        if self._give_way and requests.has_rivals:
            self._give_way(requests, requests.waiting[:MAX_CANDIDATES])
        plan = PlanBuilder(requests.next_step, requests.needs)
        if requests.owed_s:
            requests.owed_s = left_owed_s(self.config, requests.owed_s)
        self._plan_decodes(plan)
        if plan.unfinished or requests.waiting:
            self._plan_prompts(plan)
        if not plan.uids:
            assert not plan.begins, "a request has started without a row"
            # The only running request lacked pages, was retracted, and has left at once. It can
            # start again: its duplicates (`minisgl.kvcache.radix`) are free now.
            is_released = requests.stats.num_retractions > num_retractions and not requests.leaving
            return self.plan() if is_released else None
        requests.next_step += 1
        requests.stats.num_steps += 1
        return plan.build()

    def _plan_decodes(self, plan: PlanBuilder) -> None:
        """Plan one token for each running request that is up to date. The others are *unfinished*:
        they lack the KV of more than one token."""
        page_size, interval = self.config.page_size, self._requests.cache.interval
        unfinished: list[Req] = []
        for req in self._requests.running[:]:
            start, known = req.num_computed, req.num_known
            if known >= req.max_len or req.table_idx < 0 or req.leaving:
                continue  # its last token is promised, or it was retracted in this loop
            if known - start != 1:
                unfinished.append(req)
                continue
            changes_pages = start >= len(req.pages) * page_size
            if interval and (not known % interval or not req.output):
                changes_pages = True  # it takes a state's page, or lets go of an older state's
            if interval and self._drafts and start % interval < page_size:
                changes_pages = True  # a draft has taken the page where it lets go
            if changes_pages and not self._make_room(plan, req, known):
                continue
            num_prompt, output = len(req.prompt), req.output
            if known != num_prompt + len(output):
                token = PROMISED
            elif output:
                token = output[-1]
            else:  # only the last prompt token is left to compute
                token = int(req.prompt[-1])
                req.num_chunks += 1
                self._requests.cache.publish(req, known, plan.step)
                if req.sampling.pooling:
                    plan.add_pooled(req, start, known)
            plan.uids.append(req.uid)
            plan.table_idxs.append(req.table_idx)
            plan.starts.append(start)
            plan.decode_ids.append(token)
            plan.output_idxs.append(known - num_prompt)
            req.num_computed = known
            req.num_known = known + 1  # the row samples: it promises a token
            req.num_flights += 1
        plan.unfinished = [req for req in unfinished if req.table_idx >= 0 and not req.leaving]
        plan_drafts(plan, self._drafts, self._requests, self.config.max_running)
        plan.end_decodes()

    def _make_room(self, plan: PlanBuilder, req: Req, end: int) -> bool:
        """Allocate pages for the tokens of `req` below `end`.

        If pages run out, retracts running requests, the last in the order first. Returns True if
        `req` has the pages; False if it must wait for those of retracted requests, or was itself
        retracted.
        """
        while not self._requests.cache.extend(req, req.num_computed, end, plan.new_pages):
            if self._requests.leaving:
                return False
            victim = self._requests.running[-1]
            self._requests.retract(victim)
            if victim is req:
                return False
        return True

    def _plan_prompts(self, plan: PlanBuilder) -> None:
        """Share the step's prompt budget among unfinished and waiting requests, in order.

        If the first of them needs more than one step, shorter prompts may use up to half of the
        budget ahead of it, the shortest first; but not if its next tokens are an image that is
        computed whole, which may need more than the other half, or if the step before had no token
        of it, because the other half of a stall bound was less than one. If the first has an API
        key, it shares the step only with keys that were served little more (by the tags, see
        `Order`): by at most the tokens of one step. So its step is short.
        """
        in_order = self._requests.waiting[:MAX_CANDIDATES] if self._requests.num_places else []
        for req in plan.unfinished:
            insort(in_order, req, key=order)
        first = next((req for req in in_order if self._ensure_running(plan, req)), None)
        if first is None:
            return
        if key := first.order.key:
            most = first.order.tag + self.config.max_prefill_tokens
            in_order = [req for req in in_order if req.order.tag <= most or req.order.key == key]
        owed_s = self._requests.owed_s
        budget = prompt_budget(self.config, len(plan.uids), owed_s)
        is_long = budget.fitting(first.num_computed, first.num_left) < first.num_left
        if is_long and first.chunk_step >= plan.step - 1 and _least_tokens(first) == 1:
            self._plan_chunks(plan, budget, self._shorter(first, in_order), share=0.5)
        self._plan_chunks(plan, budget, in_order)
        self._requests.owed_s = owed_s + budget.excess_s

    def _shorter(self, first: Req, in_order: list[Req]) -> list[Req]:
        """Return the requests of its priority with fewer tokens left than `first`, fewest first.

        What another API key was served more counts as tokens left (by the tags, see `Order`). The
        list ends before a waiting request of another key than the first waiting one's, which would
        take its place again.
        """
        shorter = []
        waiting, most = self._requests.waiting, first.num_left - 1
        for index, req in enumerate(in_order):
            if req.table_idx < 0 and req.order.key != waiting[0].order.key:
                break
            if req.order.priority == first.order.priority and req is not first:
                if req.table_idx < 0 and req.num_reusable is None:
                    ids = self._requests.reusable_ids(req)
                    req.num_reusable = self._requests.cache.num_cached(req, ids)
                is_same_key = req.order.key == first.order.key
                lead = 0 if is_same_key else req.order.tag - first.order.tag
                if lead + (num_left := req.num_left) <= most:
                    shorter.append((num_left, index))
        return [in_order[index] for _, index in sorted(shorter)]

    def _plan_chunks(
        self, plan: PlanBuilder, budget: PromptBudget, requests: list[Req], share: float = 1.0
    ) -> None:
        """Plan a chunk for each request without one, until this share of the budget is used. Skips
        waiting requests that cannot start."""
        has_room = budget.fitting(0, 1, share)
        for req in requests:
            if not has_room:
                return
            if req.uid in plan.with_chunk or not self._ensure_running(plan, req):
                continue
            start = req.num_computed
            num_left = req.num_known - start
            num_tokens = budget.fitting(start, num_left, share, _least_tokens(req))
            if self.config.is_encoder and num_tokens < num_left:
                return  # it is the first of the next step, where it fits
            end = self._chunk_end(req, num_tokens)
            if req.images:
                most = budget.before_images(req.images, start, end - start)
                end = self._chunk_end(req, most) if most < end - start else end
            if end > start and self._plan_chunk(plan, req, end):
                budget.take(start, req.num_computed - start, req.images)
                has_room = budget.fitting(0, 1, share)

    def _chunk_end(self, req: Req, num_tokens: int) -> int:
        """Return where the next chunk, of at most so many tokens, ends: not inside of an image that
        is computed whole. If none fits, it is not behind the computed tokens."""
        most = req.num_computed + num_tokens
        end = self._requests.cache.chunk_end(req, req.num_computed, most)
        if span := span_at(req.images, end):
            return span.end if span.end <= most else span.start
        return end

    def _plan_chunk(self, plan: PlanBuilder, req: Req, end: int) -> bool:
        """Plan the next chunk of an unfinished request. Returns False, and plans nothing, if pages
        are missing."""
        start, known = req.num_computed, req.num_known
        if not self._make_room(plan, req, end):
            return False
        plan.add_chunk(req, start, end)
        req.num_computed = end
        req.chunk_step = plan.step
        req.num_chunks += start < req.num_prompt
        req.num_flights += 1
        self._requests.cache.publish(req, end, plan.step)
        if end == known:
            plan.unfinished.remove(req)
            req.num_known += 1  # the row samples: it promises a token
        return True

    def _ensure_running(self, plan: PlanBuilder, req: Req) -> bool:
        """Start `req` if it waits and can start. Returns whether it runs.

        It cannot start while another request computes a prefix of its prompt, or while a slot for
        its adapter or pages are missing. If pages are missing, no later request starts in this step
        either: the pages that become free are for this one. So are slots.
        """
        if req.table_idx >= 0:
            return not req.leaving
        is_full = plan.is_full or not self._requests.num_places
        if is_full or self._requests.waits_for_prefix(req, plan.unfinished):
            return False
        if (slots := self._requests.adapter_slots) and req.adapter:
            plan.waits_for_slot = plan.waits_for_slot or not slots.has_room(req.adapter)
            if plan.waits_for_slot:
                return False
        num_cached = self._requests.cache.attach(req, self._requests.reusable_ids(req), plan.step)
        if num_cached is None:
            return False
        if not self._requests.has_room(req, plan.unfinished):
            self._requests.cache.release(req)
            plan.is_full = True
            return False
        self._start(plan, req, num_cached)
        return True

    def _start(self, plan: PlanBuilder, req: Req, num_cached: int) -> None:
        self._requests.start(req)
        if (slots := self._requests.adapter_slots) and req.adapter:
            plan.adapter_slots.append(Slotted(req.table_idx, slots.take(req.adapter, plan.loads)))
        if req.table_idx in self._requests.needs.with_options:
            ids = ids_to_bytes(req.token_ids(0, req.num_tokens))
            stop_ids = tuple(sorted(req.stop_ids))
            plan.histories.append(History(req.table_idx, req.num_prompt, stop_ids, ids))
        if req.images:
            plan.image_begins.append(RowImages(req.table_idx, req.images))
        req.num_computed = num_cached
        req.chunk_step = plan.step
        plan.begins.append(Begin(req.table_idx, req.sampling))
        self._requests.cache.list_pages(req, plan.new_pages)
        if req.num_retractions == 0:
            req.first_step = plan.step
            req.num_cached = min(num_cached, req.num_prompt)  # it may have output already
            req.prefix_differs_at = self._requests.cache.differs_at(req)
            req.launched_at = self._clock()
            self._requests.stats.num_prompt_tokens += req.num_prompt
            self._requests.stats.num_cached_tokens += req.num_cached
        insort(plan.unfinished, req, key=order)


def _least_tokens(req: Req) -> int:
    """Return the least tokens of a request's next chunk: more than one if it begins in an image
    that is computed whole."""
    span = span_at(req.images, req.num_computed)
    return span.end - req.num_computed if span else 1
