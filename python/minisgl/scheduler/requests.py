"""The requests of one engine, and the state of each: waiting, running or leaving.

::

    add ──> waiting ──start──> running ──stop──> leaving ──release──> deleted, if it has ended
     │         ^                                    │
     │         ├──────────── if it was retracted ───┘
     └──> compiling, until its grammar is compiled

A request leaves when it ends or is retracted. It keeps its place in the tables and its pages until
each flight with a row of it is committed. If it gave way to a request of another key, its pages are
released at once (`minisgl_gateway.keys.preemption`).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from minisgl import plugins
from minisgl.core.adapters import Adapter, AdapterLoad
from minisgl.core.req import IdArray, Order, Req
from minisgl.kvcache import create_cache_manager
from minisgl.scheduler.config import SchedulerConfig
from minisgl.scheduler.plan_builder import RowNeeds


class AdapterSlots(Protocol):
    """The adapters that the device holds (the row `adapters`: `slots`)."""

    def has_room(self, adapter: Adapter) -> bool:
        """Return whether a request of the adapter can start."""

    def take(self, adapter: Adapter, loads: list[AdapterLoad]) -> int:
        """Return the slot for a request that starts. Appends to `loads` what must fill it."""

    def leave(self, adapter: Adapter) -> None:
        """A running request of the adapter has left."""

    def clear(self) -> None:
        """Forget what the slots have. No request may run."""


@dataclass(slots=True)
class SchedulerStats:
    """Counters since the scheduler's start. Mutable.

    num_prompt_tokens and num_cached_tokens count requests when they first start.
    """

    num_steps: int = 0
    num_finished: int = 0
    num_retractions: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    drafted_by: dict[str, int] = field(default_factory=dict)  # by drafter
    accepted_by: dict[str, int] = field(default_factory=dict)


class Requests:
    """Mutable: the state that the planner and the scheduler share.

    waiting, running: in order. compiling: by uid; their grammars are being compiled. leaving: by
    uid; a flight still has a row of them, but no more rows are planned. free_table_idxs: the free
    rows of the tables, which have `max_running` + 1 rows, so that one request can start while
    another leaves. needs: which rows of the tables need more than a sampled token. adapter_slots:
    None without adapters. owed_s: see `minisgl.scheduler.budget.StallBudget`. next_step: the number
    of the next plan. void_from: outcomes from this failed step on are discarded; None if no step
    failed.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.stats = SchedulerStats()
        self.cache = create_cache_manager(
            config.cache_groups, config.cache, config.page_size, config.max_prefill_tokens
        )
        self.by_uid: dict[int, Req] = {}
        self.waiting: list[Req] = []
        self.compiling: dict[int, Req] = {}
        self.running: list[Req] = []
        self.leaving: dict[int, Req] = {}
        self.needs = RowNeeds()
        self.adapter_slots: AdapterSlots | None = None
        if config.num_slots:
            self.adapter_slots = plugins.need("adapters", "slots", "--lora")(config.num_slots)
        self.free_table_idxs = list(range(config.max_running, -1, -1))
        self.owed_s = 0.0
        self.next_step = 0
        self.void_from: int | None = None
        self.watermark_tokens = config.watermark_tokens

    @property
    def num_places(self) -> int:
        """How many requests may start. The spare row counts only while a request leaves."""
        return min(len(self.free_table_idxs), len(self.free_table_idxs) + len(self.leaving) - 1)

    @property
    def has_rivals(self) -> bool:
        """Whether a waiting request has a lower tag (`Req.order`) than a running one."""
        waiting, running = self.waiting, self.running
        return bool(waiting and running) and waiting[0].order.tag < running[-1].order.tag

    @property
    def queued(self) -> list[Req]:
        """All that do not run: they wait, or their grammars are being compiled."""
        return [*self.waiting, *self.compiling.values()]

    def add(self, req: Req, *, is_compiled: bool) -> None:
        """Let a new request wait, first for its grammar unless that is compiled."""
        assert req.uid not in self.by_uid, f"uid {req.uid} is in use"
        self.by_uid[req.uid] = self.compiling[req.uid] = req
        if is_compiled:
            self.end_compiling(req.uid)

    def end_compiling(self, uid: int) -> None:
        """Let a request wait whose grammar is compiled; it may have ended."""
        if req := self.compiling.pop(uid, None):
            insort(self.waiting, req, key=order)

    def start(self, req: Req) -> None:
        """Give a waiting request, which has its cached pages, a row of the tables."""
        self.waiting.remove(req)
        req.table_idx = self.free_table_idxs.pop()
        self.needs.add(req)
        insort(self.running, req, key=order)

    def retract(self, req: Req) -> None:
        """Take the pages of a running request. It resumes later with the same tokens."""
        req.num_retractions += 1
        self.stats.num_retractions += 1
        self.stop(req)

    def stop(self, req: Req) -> None:
        """Plan no more rows for a request. It is released now, or after its last flight."""
        if req.leaving:
            return  # it was retracted and now ends, before its last flight is settled
        if req.table_idx < 0:
            self.end_compiling(req.uid)  # now it is in `waiting` in any case
            self.waiting.remove(req)
            del self.by_uid[req.uid]
            return
        self.running.remove(req)
        req.leaving = True
        if req.num_flights == 0:
            self._release(req)
        else:
            self.leaving[req.uid] = req

    def has_room(self, req: Req, unfinished: list[Req]) -> bool:
        """Return whether the free pages suffice for `req`, for the `unfinished` requests (running
        ones with prompt tokens to compute), and for the next tokens of all running ones."""
        end = min(req.num_known + 1, req.max_len - 1)  # the last token's KV is never computed
        return self.cache.has_room(req, end, unfinished, self.running, self.watermark_tokens)

    def waits_for_prefix(self, req: Req, unfinished: list[Req]) -> bool:
        """Return whether `req` should wait for pages that a running request is computing.

        `req` remembers the running request until those pages are computed, so two requests are
        compared about once. A request never waits for one of lower priority.
        """
        source = req.prefix_source
        if source is not None and source.table_idx >= 0 and not source.leaving:
            assert req.num_reusable is not None
            if source.num_computed < req.num_reusable:
                return True
        for other in unfinished:
            if other.order.priority <= req.order.priority and req.num_scored + 1 >= req.num_prompt:
                num_common = self.cache.num_common(req, other)
                if num_common > other.num_computed:
                    req.prefix_source, req.num_reusable = other, num_common
                    return True
        req.prefix_source = None
        return False

    def reusable_ids(self, req: Req) -> IdArray:
        """Return the ids whose KV may come from the cache.

        The last token is always computed, and so are the tokens from `num_scored` on.
        """
        return req.ids_in_tree(0, min(req.num_tokens - 1, req.num_scored))

    def release_settled(self, rows: Iterable[Req]) -> None:
        """Release the requests that are leaving and have no row in a flight any more."""
        if self.leaving:
            for req in rows:
                if req.leaving and req.num_flights == 0 and req.table_idx >= 0:
                    self._release(req)

    def _release(self, req: Req) -> None:
        assert req.num_flights == 0
        self.leaving.pop(req.uid, None)
        if req.handle:
            self.release_pages(req)
        self.free_table_idxs.append(req.table_idx)
        self.needs.discard(req.table_idx)
        if self.adapter_slots and req.adapter:
            self.adapter_slots.leave(req.adapter)
        req.table_idx = -1
        req.leaving = False
        if req.ended:
            del self.by_uid[req.uid]
        else:
            req.num_computed = 0
            req.num_known = req.num_tokens
            req.num_reusable = req.prefix_source = None
            insort(self.waiting, req, key=order)

    def release_pages(self, req: Req) -> None:
        """Take all pages from a request. Those with committed ids go to the prefix cache."""
        if self.void_from is None:
            # A row that was launched before the end was known may have computed one more token
            # than the request has. The pages are written by steps before `next_step`.
            self.cache.publish(req, min(req.num_computed, req.num_tokens), self.next_step - 1)
        self.cache.release(req)

    def recover(self) -> bool:
        """After a failed step, retract all requests and drop the KV from that step on.

        Returns False, and does nothing, while a flight is not settled. Later steps may have read
        KV that the failed step did not write. All requests are computed again, because failures
        are too rare to find out which of them are affected.
        """
        assert self.void_from is not None
        if any(req.num_flights for req in self.by_uid.values()):
            return False
        for req in self.running[::-1]:
            self.retract(req)
        self.cache.drop(self.void_from)
        if self.adapter_slots:
            self.adapter_slots.clear()  # one may not be filled
        self.void_from = None
        return True


def order(req: Req) -> Order:
    return req.order
