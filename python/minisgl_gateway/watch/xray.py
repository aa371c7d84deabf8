"""The frames of the X-ray: steps, requests, pages and the prefix tree.

A frame is sent every `EVERY_S`, or less often, so that frames take at most `SHARE` of the loop's
time. It has the steps since the last frame, at most the newest `MAX_STEPS`, and the current state.
The more is cached, the longer pages and prefix tree take. So they have a share of their own,
`CACHE_SHARE`, and not every frame has them. Frames have no token ids, and no texts unless
`--xray-text` asks for them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import chain
from operator import sub
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from minisgl.core.plan import Plan
from minisgl.core.req import Req
from minisgl.kvcache.radix import RadixPrefixCache
from minisgl.message import WatchReply
from minisgl.runtime.observers import Seat
from minisgl.scheduler.scheduler import Scheduler
from minisgl_gateway.args import ours
from minisgl_gateway.watch.steps import StepRecord, StepWatcher

Take = Callable[[bytes], None]  # gets an encoded frame

EVERY_S: Final = 0.1
SHARE: Final = 0.002
CACHE_SHARE: Final = 0.001  # 7 ms for 6,600 nodes, so every 7 s; 0.1 ms for 60 nodes
MOST_WAITING: Final = 3
"""The time of a frame counts as at most this multiple of its CPU time. Otherwise a frame during
which other programs ran would delay the next one for seconds."""
MAX_STEPS: Final = 1000
MAX_ROWS: Final = 64  # rows that a frame has of a step
MAX_REQUESTS: Final = 300
MAX_NODES: Final = 300
TEXT_TOKENS: Final = 32  # the first tokens of a node, whose text is shown
MAX_TEXTS: Final = 2000  # texts that are kept for later frames
MAX_CELLS: Final = 4096
"""The cells of the map of pages. With more pages, a cell has several and shows the highest
owner."""

FREE, CACHED, SHARED, FIRST_UID = 0, 1, 2, 3
"""Owners of a page: none; the prefix cache alone; several requests; uid + `FIRST_UID`."""


class Step(NamedTuple):
    """A step, an array in JSON. Up to `send_us` it has the fields of `StepRecord`, in their order.

    rows: as [uid, tokens, ...]; None if the frame's previous step has the same rows.
    """

    step: int
    start_s: float
    settle_s: float
    receive_us: float
    plan_us: float
    launch_us: float
    wait_us: float
    commit_us: float
    send_us: float
    decodes: int
    prompt_tokens: int
    output_tokens: int
    rows: list[int] | None


NUM_TIMES: Final = Step._fields.index("decodes")
"""The number and the times of a step, which begin both records."""


class RequestState(msgspec.Struct, frozen=True, array_like=True):
    """Ages are in seconds at the time of the frame; -1 if the event has not happened."""

    uid: int
    state: str  # waiting, prefill, decode or leaving
    priority: int
    num_prompt: int
    num_cached: int
    num_computed: int
    num_output: int
    max_len: int
    num_chunks: int
    num_retractions: int
    num_pages: int
    accepted_age_s: float
    launched_age_s: float
    first_token_age_s: float


class Frame(msgspec.Struct, frozen=True, kw_only=True):
    """now_s: on the clock of the steps. num_skipped: steps that the frame has no room for.

    page_map, pages_per_cell, tree, texts, num_nodes: None if this frame does not have them. Then
    the page shows those of the last frame that has them.
    page_map: runs of cells with one owner, as owner, number of cells, owner, ...; a cell is
    pages_per_cell pages. tree: for each node the index of its parent in the list (-1: a root), its
    number of pages, and how many requests hold it; parents come first. texts: the beginning of each
    of these nodes, if asked for.
    """

    now_s: float
    steps: list[Step]
    num_skipped: int
    requests: list[RequestState]
    num_requests: int
    num_waiting: int
    num_running: int
    page_size: int
    num_pages: int
    num_used_pages: int
    num_cached_pages: int
    num_retractions: int
    num_prompt_tokens: int
    num_cached_tokens: int
    pages_per_cell: int | None = None
    page_map: list[int] | None = None
    tree: list[tuple[int, int, int]] | None = None
    texts: list[str] | None = None
    num_nodes: int | None = None


class XRay(StepWatcher):
    """Sends frames. Mutable: it keeps the steps since the last frame."""

    def __init__(
        self,
        send: Take,
        epoch: float,
        record: Take | None = None,
        text_of: Callable[[list[int]], str] | None = None,
        num_output_tokens: int = 0,
    ) -> None:
        """epoch: see `LoopMeter`. record: gets all frames, even while no client watches. text_of:
        returns the text of token ids; None if frames have no texts. num_output_tokens: of the
        scheduler, until now."""
        super().__init__(num_output_tokens)
        self._send, self._epoch, self._record = send, epoch, record
        self._steps: deque[tuple[StepRecord, Plan]] = deque(maxlen=MAX_STEPS)
        self._num_skipped = 0
        self._until = self._due = self._cache_due = 0.0
        self._encode = msgspec.json.Encoder().encode
        self._text_of = text_of
        self._texts: dict[bytes, str] = {}

    @classmethod
    def at(cls, seat: Seat, record: Take | None = None, num_output_tokens: int = 0) -> XRay:
        """Add an X-ray to a rank's loop, and return it."""

        def send(frame: bytes) -> None:
            seat.send(WatchReply(frame=frame))

        text_of = seat.text_of if ours(seat.args).xray_text else None
        made = cls(send, seat.meter.epoch, record, text_of, num_output_tokens)
        seat.meter.watchers.append(made)
        return made

    def watch(self, seconds: float) -> None:
        """Send frames for this many seconds from now."""
        now = time.perf_counter()
        if now >= self._until:  # no client has the frames before
            self._cache_due = 0.0
        self._until = now + seconds

    def stepped(self, record: StepRecord, plan: Plan) -> None:
        self._num_skipped += len(self._steps) == MAX_STEPS
        self._steps.append((record, plan))  # encoded with the frame, whose time is bounded

    def turn_ended(self, scheduler: Scheduler) -> bool:
        now = time.perf_counter()
        is_watched = now < self._until
        if now >= self._due:
            requests = sorted(scheduler.requests.by_uid.values(), key=lambda req: req.order)
            began = _Clocks()
            cache = self._cache(scheduler, requests) if now >= self._cache_due else {}
            looked = _Clocks()
            frame = self._encode(self._frame(scheduler, requests, now, cache))
            if self._record:
                self._record(frame)
            if is_watched:
                self._send(frame)
            self._due = now + max(EVERY_S, (_Clocks() - looked) / SHARE)
            if cache:
                self._cache_due = now + (looked - began) / CACHE_SHARE
        return is_watched or self._record is not None

    def _cache(self, scheduler: Scheduler, requests: list[Req]) -> dict[str, Any]:
        """Return the fields of the pages and of the prefix tree."""
        nodes = _nodes(scheduler)
        latest, tree = _tree(nodes)
        cells, per_cell = _page_map(scheduler, requests, nodes)
        return {
            "page_map": cells, "pages_per_cell": per_cell, "tree": tree,
            "texts": self._texts_of(latest), "num_nodes": len(nodes),
        }  # fmt: skip

    def _frame(
        self, scheduler: Scheduler, requests: list[Req], now: float, cache: dict[str, Any]
    ) -> Frame:
        steps: list[Step] = []
        before = None
        for record, plan in self._steps:
            steps.append(_step(record, None if before and _is_same(before, plan) else plan))
            before = plan
        self._steps.clear()
        num_skipped, self._num_skipped = self._num_skipped, 0
        clock = scheduler.clock()
        return Frame(
            now_s=round(now - self._epoch, 6),
            steps=steps,
            num_skipped=num_skipped,
            requests=[_state(req, clock) for req in requests[:MAX_REQUESTS]],
            num_requests=len(requests),
            num_waiting=len(scheduler.requests.queued),
            num_running=len(scheduler.requests.running),
            page_size=scheduler.requests.cache.page_size,
            num_pages=scheduler.requests.cache.num_pages,
            num_used_pages=scheduler.requests.cache.num_used_pages,
            num_cached_pages=scheduler.requests.cache.num_cached_pages,
            num_retractions=scheduler.stats.num_retractions,
            num_prompt_tokens=scheduler.stats.num_prompt_tokens,
            num_cached_tokens=scheduler.stats.num_cached_tokens,
            **cache,
        )

    def _texts_of(self, nodes: list[Any]) -> list[str]:
        if self._text_of is None:
            return []
        if len(self._texts) > MAX_TEXTS:
            self._texts.clear()
        keys = [node.ids[:TEXT_TOKENS].tobytes() for node in nodes]
        for key, node in zip(keys, nodes, strict=True):
            if key not in self._texts:
                self._texts[key] = self._text_of(node.ids[:TEXT_TOKENS].tolist())
        return [self._texts[key] for key in keys]


class _Clocks:
    """A point in time. A difference is in seconds, at most `MOST_WAITING` times the CPU seconds."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.thread_time()

    def __sub__(self, earlier: _Clocks) -> float:
        return min(self._wall - earlier._wall, MOST_WAITING * (self._cpu - earlier._cpu))


def _is_same(before: Plan, plan: Plan) -> bool:
    """Whether both steps decode the same requests, as most consecutive steps do."""
    is_decode = plan.num_decodes == len(plan.uids)
    return is_decode and before.num_decodes == plan.num_decodes and before.uids == plan.uids


def _step(record: StepRecord, plan: Plan | None) -> Step:
    rows: list[int] | None = None
    if plan:
        lengths = map(sub, plan.ends[:MAX_ROWS], plan.starts[:MAX_ROWS])
        rows = list(chain.from_iterable(zip(plan.uids, lengths, strict=False)))
    num_prompt = record.tokens - record.decodes
    times = msgspec.structs.astuple(record)[:NUM_TIMES]
    return Step._make((*times, record.decodes, num_prompt, record.output_tokens, rows))


def _state(req: Req, clock: float) -> RequestState:
    if req.leaving or req.ended:
        state = "leaving"
    elif req.table_idx < 0:
        state = "waiting"
    else:
        state = "decode" if req.num_computed >= req.num_prompt else "prefill"

    def age(at: float) -> float:
        return round(clock - at, 4) if at else -1

    return RequestState(
        req.uid,
        state,
        req.order.priority,
        req.num_prompt,
        req.num_cached,
        req.num_computed,
        len(req.output),
        req.max_len,
        req.num_chunks,
        req.num_retractions,
        len(req.pages),
        age(req.queued_at),
        age(req.launched_at),
        age(req.first_token_at),
    )


def _page_map(scheduler: Scheduler, requests: list[Req], nodes: list[Any]) -> tuple[list[int], int]:
    """Return `Frame.page_map` and `Frame.pages_per_cell`, for the pages of the full group.

    A model without a full group has no such pages: all its cells are free.
    """
    owners = np.zeros(scheduler.requests.cache.num_pages + 1, np.int32)  # the last is NO_PAGE's
    owners[_joined([node.pages for node in nodes])] = CACHED
    held: list[Sequence[int]] = [req.pages for req in requests]
    held += [req.handle.duplicates if req.handle is not None else () for req in requests]
    uids = np.array([req.uid % (2**30) + FIRST_UID for req in requests] * 2, np.int32)
    owners[_joined(held)] = np.repeat(uids, [len(one) for one in held])
    owners[_joined([node.pages for node in nodes if node.locks > 1])] = SHARED
    owners = owners[:-1]
    per_cell = -(-len(owners) // MAX_CELLS) or 1
    padded = np.pad(owners, (0, -len(owners) % per_cell))
    return _run_lengths(padded.reshape(-1, per_cell).max(axis=1)), per_cell


def _joined(lists: Sequence[Sequence[int]]) -> npt.NDArray[np.int64]:
    return np.fromiter(chain.from_iterable(lists), np.int64)


def _run_lengths(owners: npt.NDArray[np.int32]) -> list[int]:
    starts = np.flatnonzero(np.diff(owners, prepend=-1))
    lengths = np.diff(starts, append=len(owners))
    runs: list[int] = np.column_stack((owners[starts], lengths)).ravel().tolist()
    return runs


def _tree(nodes: list[Any]) -> tuple[list[Any], list[tuple[int, int, int]]]:
    """Return the nodes that were used last, parents first, and their entries in `Frame.tree`."""
    # A node is used whenever one below it is used, so the first nodes of this order are a tree.
    parents_first = nodes[::-1]
    latest = sorted(parents_first, key=lambda node: -node.last_used)[:MAX_NODES]
    index = {id(node): at for at, node in enumerate(latest)}
    tree = [(index.get(id(node.parent), -1), len(node.pages), node.locks) for node in latest]
    return latest, tree


def _nodes(scheduler: Scheduler) -> list[Any]:
    """Return the nodes of the prefix tree, children before parents; none without a prefix cache."""
    tree = scheduler.requests.cache.prefix_cache
    return list(tree.nodes()) if isinstance(tree, RadixPrefixCache) else []
