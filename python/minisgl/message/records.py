"""Wire records, one tagged union per receiver.

::

    API server --FrontendMsg--> tokenizer --SchedulerMsg--> scheduler --DetokenizeMsg--> detokenizer
        ^                          |                            ^                          |    |
        |<-------UserReply---------+                            +--------StopMsg-----------+    |
        |<-------UserReply----------------------------------------------------------------------+

    scheduler rank 0 --BeatMsg--> every other rank

A uid names one request for as long as the server lives; the API server counts them up. Messages
of one uid keep their order: one tokenizer handles them all (uid modulo the number of tokenizers).
MessagePack is the encoding; token ids travel as little-endian int32 bytes.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import msgspec
import numpy as np

from minisgl.core.event import Accepted, Event, Failed, Finished
from minisgl.core.req import IdArray
from minisgl.core.sampling import SamplingParams

Uid = Annotated[int, msgspec.Meta(ge=0)]
Priority = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
MAX_NAMESPACE = 256
"""Characters of a namespace: enough for a hash or a tenant's id."""
Namespace = Annotated[str, msgspec.Meta(max_length=MAX_NAMESPACE)]


class _Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    pass


# --- prompts -----------------------------------------------------------------------------------


class TextPrompt(_Record, frozen=True, kw_only=True):
    """Text to encode as it is (special tokens are added as the tokenizer is configured)."""

    text: str


class ChatPrompt(_Record, frozen=True, kw_only=True):
    """Messages for the checkpoint's chat template: plain JSON objects with a role and content.

    ``template_args`` are further variables for the template (`enable_thinking`, say).
    """

    messages: list[dict[str, Any]]
    template_args: dict[str, Any] = {}


class TokenPrompt(_Record, frozen=True, kw_only=True):
    """Token ids, little-endian int32."""

    ids: bytes


Prompt = TextPrompt | ChatPrompt | TokenPrompt


# --- to the tokenizer --------------------------------------------------------------------------


class TokenizeMsg(_Record, frozen=True, kw_only=True):
    """A new request. `sampling.seed` is set: the API server draws one where the client did not.

    context_length: tokens of prompt and answer at most. The scheduler is who refuses more, but the
    tokenizer need not count the tokens of a text that is far too long. None: not known.
    namespace: of the prefix cache (`cache_salt` of the API).
    """

    uid: Uid
    prompt: Prompt
    sampling: SamplingParams
    priority: Priority = 0
    namespace: Namespace = ""
    context_length: Annotated[int, msgspec.Meta(ge=1)] | None = None


class AbortMsg(_Record, frozen=True, kw_only=True):
    """End the request now, with `Finished(reason="abort")`: its client is gone or does not want the
    rest. Goes through the tokenizer, behind its request. Unknown uids are ignored."""

    uid: Uid


class PingMsg(_Record, frozen=True, kw_only=True):
    """Goes round the whole pipeline and comes back as `PongMsg`, one from each rank of node 0: the
    loops make progress."""

    seq: int


class ProfileMsg(_Record, frozen=True, kw_only=True):
    """Start or stop the profiler of the engine; answered with a `ProfileReply` of the same seq."""

    seq: int
    action: Literal["start", "stop"]


FrontendMsg = TokenizeMsg | AbortMsg | PingMsg | ProfileMsg


# --- to the scheduler --------------------------------------------------------------------------


class UserMsg(_Record, frozen=True, kw_only=True):
    """A request as ids (little-endian int32 bytes), to be admitted or refused.

    Only requests of one `namespace` share a cached prefix.
    """

    uid: Uid
    ids: bytes
    sampling: SamplingParams
    priority: Priority = 0
    namespace: Namespace = ""


class StopMsg(_Record, frozen=True, kw_only=True):
    """The detokenizer cut this text at a stop string: end it with `Finished(reason="stop")`.

    Nothing is answered if it has ended meanwhile: that `Finished` is under way.

    ``num_tokens`` output tokens went into the text that the client was given.
    """

    uid: Uid
    num_tokens: int


class ExitMsg(_Record, frozen=True, kw_only=True):
    """Finish nothing, leave the loop."""


SchedulerMsg = UserMsg | AbortMsg | StopMsg | PingMsg | ExitMsg
"""What the loop handles. A `ProfileMsg` comes the same way and is handled by its inbox."""


# --- from rank 0 to the others -----------------------------------------------------------------


class Beat(_Record, frozen=True, kw_only=True):
    """One turn of rank 0's loop: what it received, if anything.

    step: counts the turns, from 0. now: rank 0's clock, in seconds. digest: of all plans before.
    """

    step: int
    now: float
    digest: int
    messages: list[SchedulerMsg | ProfileMsg]


class PlanCheck(_Record, frozen=True, kw_only=True):
    """What rank 0 has planned up to step `step`, to be compared before anybody launches that."""

    step: int
    digest: int


BeatMsg = Beat | PlanCheck


# --- to the detokenizer ------------------------------------------------------------------------


class StatusReply(_Record, frozen=True, kw_only=True):
    """How a scheduler is doing: what is now, and counters since its start.

    num_used_pages: held by running requests. num_cached_pages: kept for whoever comes with the
    same prefix. num_prompt_tokens and num_cached_tokens count requests when they first start,
    num_prefill_tokens what was computed of prompts (again after a retraction). part_s: seconds
    of the loop by part, in the order of `minisgl.scheduler.meter.PARTS`. peak_memory_bytes: of the
    rank's device, the most that was in use at a time (`Device.peak_memory_bytes`).
    """

    rank: int
    num_waiting: int
    num_running: int
    num_pages: int
    num_used_pages: int
    num_cached_pages: int
    num_steps: int
    num_retractions: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_prefill_tokens: int
    num_output_tokens: int
    part_s: list[float]
    peak_memory_bytes: int = 0


class ProfileReply(_Record, frozen=True, kw_only=True):
    """What came of a `ProfileMsg` on a rank. trace: the file that was written, by "stop"."""

    seq: int
    rank: int = 0
    failed: Failed | None = None
    trace: str | None = None
    num_steps: int = 0


class DetokenizeMsg(_Record, frozen=True, kw_only=True):
    """The events of one turn of the scheduler's loop, and the pings that it saw.

    ``pass_on`` goes to the API server as it is.
    """

    events: list[Event]
    pings: list[int] = []
    pass_on: list[StatusReply | ProfileReply] = []


# --- to the API server -------------------------------------------------------------------------


class TextReply(_Record, frozen=True, kw_only=True, omit_defaults=True):
    """Text that is final: no later token changes it. `token_ids` are the tokens that it came from.

    logprobs: one for each of `token_ids`; None unless the request asks for them.
    """

    uid: Uid
    text: str
    token_ids: list[int]
    logprobs: list[float] | None = None


class PongMsg(_Record, frozen=True, kw_only=True):
    seq: int


UserReply = TextReply | Accepted | Finished | Failed | PongMsg | StatusReply | ProfileReply


# --- encoding ----------------------------------------------------------------------------------

T = TypeVar("T")


def encode(batch: list[Any]) -> bytes:
    """Records of one union, as one frame: a turn's messages travel together."""
    return msgspec.msgpack.encode(batch)


def decoder(union: Any) -> msgspec.msgpack.Decoder[Any]:
    """A strict decoder of lists of `union`; its `decode` raises `msgspec.ValidationError`."""
    return msgspec.msgpack.Decoder(list[union])


def ids_to_bytes(ids: list[int] | IdArray) -> bytes:
    return np.asarray(ids, dtype="<i4").tobytes()


def ids_from_bytes(data: bytes) -> IdArray:
    """Read-only int32 array over `data`. Raises ValueError if it is no whole number of ids."""
    return np.frombuffer(data, dtype="<i4")
