"""The scheduler: every step lets *computed* catch up with *known*, under a token budget.

`minisgl.core.req` draws these two lengths of a request.

    add     message -> the request is queued, or refused with an error that states the limit
            (`minisgl.scheduler.admission`)
    plan    state -> Plan: decodes first, then chunks of prompts (`minisgl.scheduler.planner`)
    commit  outcome of a plan -> events; requests that ended release their pages

The state is in `minisgl.scheduler.requests`; pages and the prefix tree are in
`minisgl.kvcache.manager`.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from msgspec.structs import replace

from minisgl import plugins
from minisgl.core.adapters import Adapter
from minisgl.core.event import Accepted, Event, Failed, Finished, FinishReason, Token
from minisgl.core.image import plain_ids
from minisgl.core.plan import Plan, StepFailed, StepOutcome, StepResult
from minisgl.core.req import ALL, Mask, Masker, Order, Req
from minisgl.core.sampling import SamplingParams
from minisgl.errors import (
    AdapterLost,
    InvalidSampling,
    MinisglError,
    ModelNotFound,
    NonFiniteLogits,
    RequestError,
)
from minisgl.message import AbortMsg, CompiledMsg, StopMsg, UserMsg, ids_from_bytes, ids_to_bytes
from minisgl.scheduler import drafting
from minisgl.scheduler.admission import admissible_max_tokens, check_images
from minisgl.scheduler.config import SchedulerConfig
from minisgl.scheduler.masks import LateMasks
from minisgl.scheduler.planner import Planner
from minisgl.scheduler.requests import Requests
from minisgl.scheduler.scores import add_pooled, report_scores


class Scheduler:
    """Requests in, plans and events out. Mutable, single-threaded, no torch, no I/O.

    requests: the state of all requests of one engine. clock: returns the seconds in which their
    times are given. planner: plans the steps.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
        create_masker: Callable[[UserMsg], Masker | None] | None = None,
        create_drafts: drafting.CreateDrafts = drafting.create_drafts,
    ) -> None:
        """create_masker: returns a request's masker, or None if it has no grammar. It may be left
        out if no request has one. create_drafts: returns what makes the drafts, or None."""
        self.config = config
        self.clock = clock
        self._create_masker = create_masker
        self.requests = Requests(config)
        self.stats = self.requests.stats
        self._drafts = create_drafts(config, self.requests)
        self.planner = Planner(config, self.requests, clock, self._drafts)
        self._arrivals = 0
        self._has_logit_options = plugins.row_of("logit_options", "create") is not None
        self._masks = LateMasks(self.requests, config.vocab_size)
        self._lost: set[Adapter] = set()  # whose files have changed

    @property
    def runnable(self) -> bool:
        """Whether a later turn can plan a step even if no message arrives."""
        return bool(self.requests.waiting or self.requests.running or self.requests.leaving)

    # --- messages ------------------------------------------------------------------------------

    def handle(self, message: UserMsg | CompiledMsg | AbortMsg | StopMsg) -> list[Event]:
        """Apply a message. Returns the events that answer it at once."""
        match message:
            case UserMsg():
                return [self.add(message)]
            case CompiledMsg():
                self.requests.end_compiling(message.uid)
                return []
            case AbortMsg():
                return self._end_early(message.uid, "abort", None, message.because)
            case StopMsg():
                return self._end_early(message.uid, "stop", message.num_tokens)

    def add(self, message: UserMsg) -> Accepted | Failed:
        """Queue the request, or refuse it with an error that states the limit."""
        # A copy, because the tree passes ids to C++ by DLPack, which rejects read-only arrays.
        prompt = ids = ids_from_bytes(message.ids).copy()
        if images := message.images:
            prompt = plain_ids(ids, images)
        output: list[int] = ids_from_bytes(message.output or b"").tolist()
        try:
            if message.sampling.changes_logits and not self._has_logit_options:
                raise InvalidSampling(
                    f"an option that changes logits {plugins.absent('logit_options')}; leave out "
                    "penalties, logit_bias, allowed_token_ids, bad_words and min_tokens"
                )
            if message.adapter in self._lost:
                raise ModelNotFound(
                    "the files of this adapter have changed since it was loaded; load it again, or "
                    "restart the server if they are as they were",
                    param="model",
                )
            # An earlier engine of this server has admitted the requests that go on with output. If
            # the output is repeated, it is another server's.
            is_new = message.output is None or message.repeats
            max_tokens = admissible_max_tokens(
                self.config,
                prompt,
                message.sampling,
                waiting=self.requests.queued if is_new else (),
                key=message.share.key,
                output=output,
            )
            if images:
                check_images(self.config, images, self.requests.by_uid.values() if is_new else ())
            seed = message.sampling.seed
            sampling = replace(
                message.sampling, max_tokens=max_tokens, seed=message.uid if seed is None else seed
            )
        except RequestError as error:
            return Failed.of(message.uid, error)
        stop_ids = frozenset(sampling.stop_token_ids)
        prediction = ids_from_bytes(message.prediction)
        self._arrivals += 1
        req = Req(
            uid=message.uid,
            prompt=prompt,
            sampling=sampling,
            max_len=len(prompt) + max(max_tokens, 1),  # a token is sampled even if none is wanted
            order=Order(message.priority, message.share.tag, self._arrivals, message.share.key),
            stop_ids=stop_ids if sampling.ignore_eos else stop_ids | self.config.eos_ids,
            namespace=message.namespace,
            adapter=message.adapter,
            output=output,
            num_known=len(prompt) + len(output),
            num_scored=ALL if output else _num_unreported(sampling, len(prompt)),
            masker=self._create_masker(message) if self._create_masker else None,
            prediction=prediction[prediction < self.config.vocab_size],
            images=images,
            tree_prompt=ids if images else None,
            queued_at=self.clock(),
        )
        self.requests.add(req, is_compiled=not message.grammar)
        shows_prompt = message.returns_ids or sampling.shows_prompt
        return Accepted(
            uid=req.uid,
            num_prompt_tokens=len(prompt),
            prompt_ids=ids_to_bytes(prompt) if shows_prompt else b"",
            sampling=sampling,
            form=message.form,
            output=message.output or b"",
            repeats=message.repeats,
        )

    def _end_early(
        self, uid: int, reason: FinishReason, num_output: int | None, because: Failed | None = None
    ) -> list[Event]:
        """End a request early, with `because` if given. Returns no event if it has ended already.

        num_output: the output tokens that the client gets; None is all.
        """
        req = self.requests.by_uid.get(uid)
        if req is None or req.ended:
            return []
        if num_output is not None:
            # The client does not get the tokens after the stop string, so no later prompt has
            # them. In the prefix cache they would only take pages.
            del req.output[num_output:]
        return self._fail(req, because.to_error()) if because else [self._end(req, reason)]

    # --- a step --------------------------------------------------------------------------------

    def plan(self) -> Plan | None:
        """Return the next step, or None if nothing can be computed now."""
        return self.planner.plan()

    def settles_first(self, launched: Plan) -> bool:
        """Return whether the launched step must be committed before the next one is planned."""
        return drafting.settles_first(launched, self._drafts, self.requests)

    def masks(self, plan: Plan) -> list[Mask]:
        """Return the masks of a launched plan's late rows. The plan before it must be committed."""
        return self._masks.of(plan)

    def commit(self, plan: Plan, outcome: StepOutcome) -> list[Event]:
        """Apply the outcome of a launched plan. Returns the events. Releases requests that left."""
        requests = self.requests.by_uid
        rows = [requests[uid] for uid in plan.uids]
        drafts = drafting.draft_rows(plan)
        # A flight counts once for a request, although its drafts have rows of their own.
        for req in rows[: drafts.start] + rows[drafts.stop :] if drafts else rows:
            req.num_flights -= 1
        events: list[Event] = []
        for uid, error in self._masks.refused.items():
            req = requests[uid]
            if not req.output:
                events += self._fail(req, error)
            elif not req.ended:  # the client may keep what it has
                events.append(self._end(req, "length"))
        if self.requests.void_from is None:  # else an earlier failed step voids this one too
            if isinstance(outcome, StepResult):
                self._take_result(plan, outcome, rows, events)
            else:
                self.requests.void_from = plan.step
                for req in self._failing(outcome):
                    events += self._fail(req, outcome.error)
        self._masks.clear()
        self.requests.release_settled(rows)
        return events

    def _failing(self, outcome: StepFailed) -> list[Req]:
        """Return the requests that fail with a step. Without any, it would be repeated."""
        requests = self.requests.by_uid
        if isinstance(outcome.error, AdapterLost):
            lost = Adapter(outcome.error.digest, outcome.error.folder)
            self._lost.add(lost)
            return [req for req in requests.values() if req.adapter == lost]
        assert outcome.uids, "a failed step must fail a request, or it would be repeated"
        return [requests[uid] for uid in dict.fromkeys(outcome.uids)]  # drafts have rows of theirs

    def _take_result(
        self, plan: Plan, result: StepResult, rows: list[Req], events: list[Event]
    ) -> None:
        """Append the sampled tokens to their requests, in row order, and append the events.

        This fulfils the step's promises.
        """
        now, num_output_tokens = self.clock(), 0
        damaged: list[Req] = []
        accepted: list[Req] = []
        if plan.scored:
            damaged = report_scores(plan, result, rows, events)
        if plan.pooled:
            damaged += add_pooled(plan, result, rows)
        has_logprobs = plan.logprob_rows or plan.top_rows
        drafts = drafting.draft_rows(plan)
        for index, (row, token) in enumerate(zip(plan.sample_rows, result.next_ids, strict=True)):
            req = rows[row]
            if row in drafts and not drafting.accept(req, plan, index, self._masks.unmasked):
                continue
            if req.ended or token < 0:
                if not req.ended:  # else the row was launched before the end was known
                    damaged.append(req)
                continue
            if row in drafts:
                accepted.append(req)
            output = req.output
            output.append(token)
            num_output_tokens += req.sampling.max_tokens != 0  # else nobody gets it
            if result.guesses:
                req.guesses.append(result.guesses[index])
            if not req.first_token_at:
                req.first_token_at = now
            stop = token in req.stop_ids
            event = Token(uid=req.uid, id=token, silent=stop)
            if has_logprobs:
                logprob = result.logprobs.get(index)
                top = result.tops.get(index, ())[: req.sampling.top_logprobs]
                event = replace(event, logprob=logprob, top=top)
            events.append(event)
            if stop or len(req.prompt) + len(output) == req.max_len:
                is_match = stop and token in req.sampling.stop_token_ids
                match = token if is_match else None
                events.append(self._end(req, "stop" if stop else "length", match))
        self.stats.num_output_tokens += num_output_tokens
        if drafts:
            drafting.count(self.stats, rows[drafts.start : drafts.stop], accepted)
        if damaged:  # its KV may be damaged since its first step, and in the prefix cache
            self.requests.void_from = min(req.first_step for req in damaged)
            for req in damaged:
                events += self._fail(req, NonFiniteLogits())

    # --- how requests leave --------------------------------------------------------------------

    def _end(self, req: Req, reason: FinishReason, stop_match: int | None = None) -> Finished:
        """End an accepted request without an error. No other method does."""
        req.ended = True
        self.requests.stop(req)
        now = self.clock()
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
            prefix_differs_at=req.prefix_differs_at,
            num_chunks=req.num_chunks,
            num_retractions=req.num_retractions,
            num_drafted=req.num_drafted,
            num_accepted=req.num_accepted,
            queued_s=launched_at - req.queued_at,
            prefill_s=first_token_at - launched_at,
            decode_s=now - first_token_at,
            pooled=b"" if req.pooled is None else req.pooled.tobytes(),
        )

    def _fail(self, req: Req, error: MinisglError) -> list[Event]:
        """End an accepted request with an error, unless it has ended. No other method does."""
        if req.ended:
            return []
        req.ended = True
        self.requests.stop(req)
        return [Failed.of(req.uid, error)]


def _num_unreported(sampling: SamplingParams, num_prompt: int) -> int:
    """Return the first value of `Req.num_scored`."""
    if sampling.pooling == "last":
        return num_prompt - 1
    return ALL if sampling.prompt_logprobs is None and not sampling.pooling else 0
