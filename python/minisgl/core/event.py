"""Events: the records of what happens to a request, in order.

::

    Accepted  PromptLogprobs*  Token*  (Finished | Failed)      or, refused:   Failed

Every accepted request ends with exactly one `Finished` or `Failed`. The scheduler makes these
events and sends them to the detokenizer, which turns `Token` into text and sends the others on to
the API process. Events cross processes, so they are `msgspec` records.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from minisgl.core.sampling import SamplingParams
from minisgl.errors import EngineError, RequestError, class_of

FinishReason = Literal["stop", "length", "abort"]


class Record(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True, gc=False
):
    """A record that crosses processes (`minisgl.message`).

    gc=False: records are in no cycles, and many of them would make the collector run often.
    """


class _Event(Record, frozen=True, kw_only=True, omit_defaults=True):
    uid: int


class Accepted(_Event, frozen=True, kw_only=True):
    """The request fits and is queued. The detokenizer needs the other fields to make its text.

    sampling: its `max_tokens` is a number, the most output tokens that the request can have. form:
    see `UserMsg`. prompt_ids: little-endian int32; empty unless the answer has the prompt's ids,
    text or log-probabilities. output, repeats: see `UserMsg`.
    """

    num_prompt_tokens: int
    prompt_ids: bytes = b""
    sampling: SamplingParams
    form: str = ""
    output: bytes = b""
    repeats: bool = False


class PromptLogprobs(_Event, frozen=True, kw_only=True):
    """Log-probabilities of prompt tokens, in order. The first event begins with the second token.

    tops: for each of them the most likely tokens as (id, logprob), as many as
    `SamplingParams.prompt_logprobs`.
    """

    logprobs: list[float]
    tops: list[list[tuple[int, float]]]


class Token(_Event, frozen=True, kw_only=True):
    """One output token is committed. silent: it has no text (end of sequence, a stop id).

    logprob: natural logarithm; None unless the request asks for it (`SamplingParams.logprobs`).
    top: (id, logprob) of the most likely tokens, as many as `SamplingParams.top_logprobs`.
    """

    id: int
    silent: bool = False
    logprob: float | None = None
    top: Sequence[tuple[int, float]] = ()


class Finished(_Event, frozen=True, kw_only=True):
    """The request ended without an error. Times are seconds on the scheduler's clock.

    stop_match: the stop token id (set by the scheduler) or stop string (set by the detokenizer)
    that ended it; None for the model's end-of-sequence tokens and for other reasons.
    queued_s: from acceptance to the first launch. prefill_s: from there to the first token.
    decode_s: from there to the end. num_reasoning_tokens: output tokens of reasoning, counted by
    the detokenizer. prefix_differs_at: the first position at which the prompt's token differs from
    that of the best cached branch; None if no branch has another token there. num_chunks: steps in
    which prompt tokens were computed. num_drafted, num_accepted: drafts that steps have computed,
    and those of them that became output tokens (`minisgl.scheduler.drafting`). cost: device seconds
    and joules (`minisgl_gateway.watch.cost`), None if no energy can be read. num_resumed: how often
    another engine went on with it (`minisgl_gateway.resume`). images: how many the prompt has, for
    how many of them the vision tower ran, and the seconds of that (`minisgl_zoo.vision.times`);
    None without images. pooled: the prompt's pooled hidden state or logits, little-endian float32;
    empty unless `SamplingParams.pooling`.
    """

    reason: FinishReason
    stop_match: str | int | None = None
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int = 0
    num_reasoning_tokens: int = 0
    prefix_differs_at: int | None = None
    num_chunks: int = 0
    num_retractions: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    queued_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    cost: tuple[float, float] | None = None
    num_resumed: int = 0
    images: tuple[int, int, float] | None = None
    pooled: bytes = b""


class Failed(_Event, frozen=True, kw_only=True):
    """The request was refused or its computation failed. The first fields are those of OpenAI's
    error object. fields: those of the error's class (`minisgl.errors`)."""

    message: str
    code: str
    status: int
    param: str | None = None
    fields: dict[str, int | float | str | None] = msgspec.field(default_factory=dict)

    @classmethod
    def of(cls, uid: int, error: Exception) -> Failed:
        """Return the record of an exception. Exceptions that are not ours become engine errors."""
        if not isinstance(error, RequestError | EngineError):
            error = EngineError(f"{type(error).__name__}: {error}")
        return cls(
            uid=uid,
            message=str(error),
            code=error.code,
            status=error.status,
            param=getattr(error, "param", None),
            fields={name: getattr(error, name) for name in error.fields},
        )

    def to_error(self) -> RequestError | EngineError:
        """Return the exception with the same class and content."""
        kind = class_of(self.code, self.status)
        error = kind.__new__(kind)  # a class may write its message itself
        if isinstance(error, RequestError):
            RequestError.__init__(error, self.message, param=self.param)
        else:
            EngineError.__init__(error, self.message)
        vars(error).update(self.fields, code=self.code, status=self.status)
        return error


Event = Accepted | PromptLogprobs | Token | Finished | Failed
