"""A random run of the scheduler beside an oracle: `run_once`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from helpers.checked_scheduler import CheckedScheduler, DamagedExecutor, FakeMasker, fake_mask
from helpers.drafters import ScriptedDrafts
from helpers.scheduling import whole_image
from helpers.slotted import SlottedExecutor
from minisgl.core import (
    Accepted,
    Event,
    Failed,
    Finished,
    SamplingParams,
    Token,
)
from minisgl.core.adapters import Adapter
from minisgl.core.event import PromptLogprobs
from minisgl.core.groups import CacheGroup
from minisgl.core.image import LOWEST, Image, places_of
from minisgl.core.step_times import StepTimes
from minisgl.message import (
    AbortMsg,
    CompiledMsg,
    KeyShare,
    PingMsg,
    SchedulerMsg,
    StopMsg,
    UserMsg,
    ids_to_bytes,
)
from minisgl.scheduler import SchedulerConfig, run
from minisgl_bench.fakes import ListOutbox, fake_logprob, fake_next_id

TIMES = StepTimes(
    prompt_us=((8, 2_000), (64, 20_000), (128, 50_000)), decode_us=1000, row_us=10, attend_ns=1000
)


@dataclass
class Case:
    """One request of a run and its expected answer."""

    prompt: list[int]
    sampling: SamplingParams
    aborted: bool = False
    stopped_at: int | None = None
    is_masked: bool = False
    has_grammar: bool = False
    is_refused: bool = False
    adapter: Adapter | None = None
    images: tuple[Image, ...] = ()

    @property
    def ids(self) -> bytes:
        """The prompt with ids that tell images apart."""
        ids = np.array(self.prompt, np.int32)
        for image in self.images:
            ids[places_of(image)] = LOWEST + image.digest[0]
        return ids_to_bytes(ids)

    def expected(self, config: SchedulerConfig) -> tuple[list[int], str]:
        """Return the tokens and the finish reason without an abort or a stop."""
        limit = min(config.max_seq_len, config.num_pool_tokens) - len(self.prompt)
        max_tokens = 1 if self.sampling.pooling else self.sampling.max_tokens or limit
        stops = set(self.sampling.stop_token_ids)
        if not self.sampling.ignore_eos:
            stops |= config.eos_ids
        ids = list(self.prompt)
        for index in range(max_tokens):
            mask = fake_mask(ids[len(self.prompt) :]) if self.is_masked else None
            token = fake_next_id(
                np.array(ids, np.int32),
                self.sampling.seed or 0,
                index,
                config.vocab_size,
                config.cache_groups,
                mask,
            )
            ids.append(token)
            if token in stops:
                return ids[len(self.prompt) :], "stop"
        return ids[len(self.prompt) :], "length"


class RandomInbox:
    """Sends requests, ends of compilations, aborts, stops and pings at random moments until all
    requests have ended."""

    def __init__(
        self,
        rng: random.Random,
        cases: list[Case],
        outbox: ListOutbox,
        adapters: Sequence[Adapter] = (),
    ) -> None:
        self.rng = rng
        self.adapters = adapters
        self.cases = cases
        self.outbox = outbox
        self.sent = 0
        self.compiling: list[int] = []
        self.num_turns = 0
        self.num_keys = rng.choice([0, 0, 1, 2, 3])

    def share(self) -> tuple[int, int]:
        """Of a request: without keys (0, 0), else a random tag and key."""
        if not self.num_keys:
            return 0, 0
        return self.rng.randrange(100), self.rng.randint(1, self.num_keys)

    def take(self, timeout_s: float) -> list[SchedulerMsg]:
        from minisgl.message import ExitMsg

        self.num_turns += 1
        assert self.num_turns < 20_000, "the run does not end"
        rng = self.rng
        messages: list[SchedulerMsg] = []
        while self.sent < len(self.cases) and rng.random() < 0.4:
            case = self.cases[self.sent]
            case.adapter = rng.choice([None, *self.adapters]) if self.adapters else None
            namespace = rng.choice(["", "", "tenant"])
            messages.append(
                UserMsg(
                    uid=self.sent,
                    ids=case.ids,
                    images=case.images,
                    sampling=case.sampling,
                    priority=rng.choice([0, 0, 0, -1, 1]),
                    share=KeyShare(*self.share()),
                    namespace=case.adapter.namespace(namespace) if case.adapter else namespace,
                    adapter=case.adapter,
                    grammar="grammar" if case.has_grammar else "",
                )
            )
            if case.has_grammar:
                self.compiling.append(self.sent)
            self.sent += 1
        while self.compiling and rng.random() < 0.2:
            uid = self.compiling.pop(rng.randrange(len(self.compiling)))
            if rng.random() < 0.2:
                self.cases[uid].is_refused = True
                because = Failed(uid=uid, message="no", code="invalid", status=400)
                messages.append(AbortMsg(uid=uid, because=because))
            messages.append(CompiledMsg(uid=uid))
        if self.sent and rng.random() < 0.05:
            uid = rng.randrange(self.sent)
            self.cases[uid].aborted = True
            messages.append(AbortMsg(uid=uid))
        if self.sent and rng.random() < 0.05:
            uid = rng.randrange(self.sent)
            num_tokens = sum(isinstance(e, Token) and e.uid == uid for e in self.outbox.events)
            if num_tokens and self.cases[uid].stopped_at is None:
                self.cases[uid].stopped_at = rng.randint(1, num_tokens)
                messages.append(StopMsg(uid=uid, num_tokens=self.cases[uid].stopped_at))
        if rng.random() < 0.1:
            messages.append(PingMsg(seq=self.num_turns))
        ends = sum(isinstance(e, Finished | Failed) for e in self.outbox.events)
        if self.sent == len(self.cases) and not messages and ends == len(self.cases):
            messages.append(ExitMsg())
        return messages


def random_config(rng: random.Random) -> SchedulerConfig:
    page_size = rng.choice([1, 4, 16])
    return SchedulerConfig(
        num_pages=rng.randint(4, 40) * (16 // page_size if rng.random() < 0.5 else 1),
        page_size=page_size,
        max_seq_len=rng.choice([32, 100, 400]),
        vocab_size=50,
        eos_ids=frozenset([3, 4]),
        max_prefill_tokens=rng.choice([1, 5, 16, 64, 512]),
        max_stall_s=rng.choice([None, None, 1e-6, 0.01, 0.03]),
        step_times=TIMES,
        max_running=rng.choice([1, 2, 5, 16]),
        cache=rng.choice(["radix", "radix", "naive"]),
    )


def random_groups(
    rng: random.Random, config: SchedulerConfig, intervals: Sequence[int] = ()
) -> SchedulerConfig:
    """The same with window and state groups, beside a full one or without.

    intervals: in pages, of the states; () for one or none.
    """
    from minisgl_zoo.cache_groups.groups import RowsGroup, StateGroup, WindowGroup

    page_size, chunk = config.page_size, config.max_prefill_tokens
    groups: list[CacheGroup] = (
        [CacheGroup(num_pages=config.num_pages)] if rng.random() < 0.7 else []
    )
    for _ in range(rng.choice([1, 1, 2]) - (len(groups) and rng.random() < 0.3)):
        group = WindowGroup(window=rng.choice([1, 2, 5, 16, 17, 40]))
        least = group.most_pages(1 << 20, chunk, page_size)
        num_pages = least + rng.randrange(3 * least) if rng.random() < 0.7 else rng.randint(3, 40)
        groups.append(replace(group, num_pages=num_pages))
    if not intervals and rng.random() < 0.6:
        intervals = [rng.choice([1, 1, 2, 4])]
    for interval in (page_size * pages for pages in intervals):
        if rng.random() < 0.5:
            rows: CacheGroup = RowsGroup(interval=interval)
            least = rows.most_pages(1 << 20, chunk, page_size)
            groups.append(replace(rows, num_pages=least + rng.randrange(2 * least)))
        elif not any(group.kind == "full" or group.window >= interval for group in groups):
            rows = WindowGroup(window=interval)
            least = rows.most_pages(1 << 20, chunk, page_size)
            groups.append(replace(rows, num_pages=least + rng.randrange(2 * least)))
        groups.append(StateGroup(interval=interval, num_pages=rng.randint(2, 19)))
    return replace(config, num_pages=0, groups=tuple(groups))


def random_cases(
    rng: random.Random, config: SchedulerConfig, *, pooled: bool = False
) -> list[Case]:
    roots = [[rng.randrange(50) for _ in range(rng.randint(1, 60))] for _ in range(3)]
    cases = []
    has_full_group = config.cache_groups[0].kind == "full"
    masked_share = rng.choice([0, 0, 0.3, 1])
    for _ in range(rng.randint(1, 14)):
        prompt = list(rng.choice(roots)[: rng.randint(1, 60)])
        if cases and rng.random() < 0.3:
            prompt = list(rng.choice(cases).prompt)
        prompt += [rng.randrange(50) for _ in range(rng.choice([0, 1, 7, 30]))]
        cases.append(
            Case(
                prompt,
                SamplingParams(
                    seed=rng.choice([0, 1]),
                    max_tokens=rng.choice([None, 1, 2, 9, 40]),
                    ignore_eos=rng.random() < 0.6,
                    stop_token_ids=rng.choice([(), (7,)]),
                    prompt_logprobs=2 if has_full_group and rng.random() < 0.2 else None,
                ),
                is_masked=rng.random() < masked_share,
                has_grammar=rng.random() < masked_share,
            )
        )
        if pooled and has_full_group and rng.random() < 0.5:
            sampling = SamplingParams(pooling=rng.choice(["last", "mean", "cls"]), seed=0)
            cases[-1] = Case(prompt, sampling)
    return cases


def show_images(rng: random.Random, cases: Sequence[Case]) -> None:
    """Put images that are computed whole into prompts, mostly at the same places."""
    spans = [(start, start + rng.randint(1, 20)) for start in rng.sample(range(50), 3)]
    for case in cases:
        end, images = 0, []
        for start, stop in sorted(spans):
            if end <= start and stop < len(case.prompt) and rng.random() < 0.8:
                end = stop
                images.append(image := whole_image(start, stop, key=rng.choice([1, 1, 2])))
                case.prompt[start:stop] = [image.token] * (stop - start)
        case.images = tuple(images)


def check_pooled(case: Case, end: Finished) -> None:
    """The pooled tokens count once each, however the prompt was computed."""
    values = [
        fake_logprob(np.array(case.prompt[:i], np.int32), 0) for i in range(1, len(case.prompt) + 1)
    ]
    row = {
        "last": np.float32(values[-1]),
        "cls": np.float32(values[0]),
        "mean": np.float32(sum(values)) / np.float32(len(values)),
    }[case.sampling.pooling]
    assert np.frombuffer(end.pooled, np.float32).tolist() == [row]


def check_prompt_logprobs(case: Case, events: Sequence[Event], *, whole: bool) -> None:
    """Each is reported once, in order."""
    assert all(isinstance(event, PromptLogprobs) for event in events)
    logprobs = [x for event in events if isinstance(event, PromptLogprobs) for x in event.logprobs]
    prompt = np.array(case.prompt, np.int32)
    asked = case.sampling.prompt_logprobs is not None
    expected = [fake_logprob(prompt[:i], prompt[i]) for i in range(1, len(prompt)) if asked]
    assert logprobs == (expected if whole else expected[: len(logprobs)])
    tops = [top for event in events if isinstance(event, PromptLogprobs) for top in event.tops]
    assert tops == [[(i, 0.0)] * 2 for i in range(1, len(logprobs) + 1)]


def run_once(
    rng: random.Random,
    *,
    fail: bool,
    grouped: bool = False,
    intervals: Sequence[int] = (),
    drafts: bool = False,
    adapters: Sequence[Adapter] = (),
    lost: str = "",
    pooled: bool = False,
    images: bool = False,
) -> None:
    """grouped, intervals: see `random_groups`. drafts: some are right, see `ScriptedDrafts`.
    adapters: of requests. lost: the digest of one whose files are gone. pooled: half of the
    requests ask for a pooled prompt. images: of requests, computed whole."""
    config = random_config(rng)
    if adapters:
        config = replace(config, num_slots=rng.randint(1, len(adapters)))
    if grouped:
        config = random_groups(rng, config, intervals)
    cases = random_cases(rng, config, pooled=pooled)
    if images:
        show_images(rng, cases)
    overlap = rng.random() < 0.7
    fail_steps = {rng.randint(0, 30): rng.randint(1, 3) for _ in range(3)} if fail else None
    answers = [case.expected(config)[0] for case in cases] if drafts else []
    scripted = ScriptedDrafts(rng, answers, config.vocab_size)
    scheduler = CheckedScheduler(
        config,
        create_masker=lambda message: FakeMasker() if cases[message.uid].is_masked else None,
        create_drafts=lambda *_: scripted if drafts else None,
    )
    executor = DamagedExecutor(
        damaged_steps={rng.randint(0, 30): rng.randint(0, 9) for _ in range(3)} if fail else {},
        groups=config.cache_groups,
        page_size=config.page_size,
        max_running=config.max_running,
        vocab_size=config.vocab_size,
        fail_steps=fail_steps,
    )
    outbox = ListOutbox()
    slots = SlottedExecutor(executor, scheduler, lost)
    inbox = RandomInbox(rng, cases, outbox, adapters)
    run(scheduler, slots if adapters else executor, inbox, outbox, overlap=overlap)

    limit = min(config.max_seq_len, config.num_pool_tokens)
    for uid, case in enumerate(cases):
        events = [event for event in outbox.events if event.uid == uid]
        asked = len(case.prompt) + (case.sampling.max_tokens or 1)
        asked -= bool(case.sampling.pooling)  # its token is dropped
        largest = max((len(places_of(image)) for image in case.images), default=0)
        if asked > limit or largest > config.max_prefill_tokens:
            assert [type(event) for event in events] == [Failed], events
            continue
        is_lost = case.adapter is not None and case.adapter.digest == lost
        if is_lost and isinstance(events[0], Failed):
            assert events[0].code == "model_not_found"
            continue
        assert isinstance(events[0], Accepted), events
        end = events[-1]
        tokens = [event for event in events[1:-1] if isinstance(event, Token)]
        first = len(events) - 1 - len(tokens)
        assert tokens == events[first:-1], (
            "one end, and it is last; what there is of the prompt first"
        )
        check_prompt_logprobs(case, events[1:first], whole=bool(tokens))
        ids = [event.id for event in tokens]
        expected, reason = case.expected(config)
        assert ids == expected[: len(ids)], f"uid {uid}: wrong tokens"
        if isinstance(end, Failed):
            assert fail or is_lost or (case.is_refused and not ids), end
            continue
        assert not (is_lost and ids), "it ran without its adapter"
        assert not (case.is_refused and ids), "it ran without a grammar"
        assert isinstance(end, Finished)
        if end.reason == "abort":
            assert case.aborted
        elif end.reason == "stop" and case.stopped_at and end.num_output_tokens < len(ids):
            assert end.num_output_tokens == case.stopped_at
        elif not (case.stopped_at and len(ids) < len(expected)):
            assert (ids, end.reason) == (expected, reason)
            assert end.num_output_tokens == len(expected)
            if case.sampling.pooling:
                check_pooled(case, end)
    assert not scheduler.runnable
    assert not scheduler.requests.by_uid
    assert scheduler.requests.cache.num_used_pages == 0
