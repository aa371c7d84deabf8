"""The records that cross process boundaries, as one tagged union for each receiver.

What it is for: the records that processes exchange. Decoding is strict: an unknown tag, an unknown
field or a wrong type is an error at the receiver. What it does not know: sockets
(`minisgl.utils.zmq`) and what a receiver does with a record. Read next: `minisgl.tokenizer`.

::

    API server --FrontendMsg--> tokenizer --SchedulerMsg--> scheduler --DetokenizeMsg--> detokenizer
        ^                          |                            ^                          |    |
        |<-------UserReply---------+                            +--------StopMsg-----------+    |
        |<-------UserReply----------------------------------------------------------------------+

    scheduler rank 0 --StepBroadcastMsg--> every other rank

The events of `minisgl.core.event` are records too. `minisgl.message.frontend` has the unions of the
API server, and the records of requests that run no model (encode, decode). A uid is a number that
the API server gives each prompt; only another engine that goes on with it gets the same one. The
messages of a uid keep their order, because one tokenizer (uid modulo the number of tokenizers)
handles all of them. The encoding is MessagePack; token ids are little-endian int32 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import numpy as np

from minisgl.core.adapters import Adapter
from minisgl.core.event import Accepted, Event, Failed, Finished, Record
from minisgl.core.image import Image
from minisgl.core.req import IdArray
from minisgl.core.sampling import SamplingParams

Natural = Annotated[int, msgspec.Meta(ge=0)]
Uid = Natural
Priority = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
MAX_NAMESPACE = 256
"""Characters of a namespace: enough for a hash or a tenant's id."""
Namespace = Annotated[str, msgspec.Meta(max_length=MAX_NAMESPACE)]
OwnNamespace = Annotated[str, msgspec.Meta(max_length=1024)]
"""Of a message: it may be longer than what a client may send (`Adapter.namespace`)."""


Role = Literal["system", "developer", "user", "assistant", "tool"]


# --- prompts -----------------------------------------------------------------------------------


class TextPrompt(Record, frozen=True, kw_only=True):
    """Text to encode. add_special_tokens: add those that the tokenizer's configuration names. pair:
    a second text, which follows the first as the tokenizer's template for pairs says."""

    text: str
    add_special_tokens: bool = True
    pair: str | None = None


class ChatPrompt(Record, frozen=True, kw_only=True):
    """Messages for the checkpoint's chat template: plain JSON objects with a role and content.

    template_args: further variables for the template, for example `enable_thinking`. tools: in
    OpenAI's form. tool_choice: "auto", "required", or a tool's name. parallel_tool_calls: whether a
    required answer may have several calls. is_split: split the answer into reasoning, content and
    tool calls. thinking_budget: the most reasoning tokens. prediction: text that the answer may
    repeat; drafts are taken from it.
    """

    messages: list[dict[str, Any]]
    template_args: dict[str, Any] = msgspec.field(default_factory=dict)
    tools: list[dict[str, Any]] = msgspec.field(default_factory=list)
    tool_choice: str = "auto"
    parallel_tool_calls: bool = False
    is_split: bool = False
    thinking_budget: int | None = None
    prediction: str = ""


class TokenPrompt(Record, frozen=True, kw_only=True):
    """Token ids, little-endian int32."""

    ids: bytes


Prompt = TextPrompt | ChatPrompt | TokenPrompt


# --- to the tokenizer --------------------------------------------------------------------------


class KeyShare(NamedTuple):
    """A request's place among those of other keys (`minisgl_gateway.keys.shares`)."""

    tag: Natural = 0
    key: Natural = 0  # the key's number


NO_KEY = KeyShare()


class TokenizeMsg(Record, frozen=True, kw_only=True):
    """A new request. `sampling.seed` is set: the API server draws a seed if the client sends none.

    share: of the API key. namespace: of the prefix cache (`cache_salt` of the API). context_length:
    the most tokens of prompt and answer, None if unknown. The scheduler refuses more; the tokenizer
    stops early on a text that is far too long. is_clamped: `max_tokens` is lowered to what the
    context leaves. returns_ids: `Accepted` has the prompt's ids. output, repeats: as in `UserMsg`.
    ids: of the prompt, int32, if an earlier engine has accepted it; a template may write another
    text now.
    """

    uid: Uid
    prompt: Prompt
    sampling: SamplingParams
    priority: Priority = 0
    namespace: OwnNamespace = ""
    adapter: Adapter | None = None
    context_length: Annotated[int, msgspec.Meta(ge=1)] | None = None
    is_clamped: bool = False
    returns_ids: bool = False
    share: KeyShare = NO_KEY
    output: bytes | None = None
    repeats: bool = False
    ids: bytes = b""


class AbortMsg(Record, frozen=True, kw_only=True):
    """End the request now, with `because` if given, else with `Finished(reason="abort")`.

    The API server sends it through the tokenizer, so that it arrives after the request. Unknown
    uids are ignored.
    """

    uid: Uid
    because: Failed | None = None


class PingMsg(Record, frozen=True, kw_only=True):
    """A message that passes through all processes. Each rank of node 0 answers with a `PongMsg`,
    which shows that its loop makes progress."""

    seq: int


class ProfileMsg(Record, frozen=True, kw_only=True):
    """Start or stop the engine's profiler. The answer is a `ProfileReply` with the same seq."""

    seq: int
    action: Literal["start", "stop"]


class AdapterMsg(Record, frozen=True, kw_only=True):
    """Ask each rank whether it can use an adapter. The answer is an `AdapterReply` of this seq."""

    seq: int
    adapter: Adapter


class WatchMsg(Record, frozen=True, kw_only=True):
    """Ask rank 0 for `WatchReply`s during `seconds` (`minisgl_gateway.watch.xray`). With `seq`, ask
    for one that has the same seq and the state of the replica
    (`minisgl_gateway.router.replica_state`). With memory, each rank answers with its `EngineMemory`
    (`minisgl_gateway.upgrade.memory`)."""

    seconds: float = 0.0
    seq: int | None = None
    memory: bool = False


# --- to the scheduler --------------------------------------------------------------------------


class UserMsg(Record, frozen=True, kw_only=True):
    """A request as ids (little-endian int32 bytes), to be admitted or refused.

    namespace: requests find only cached prefixes of their own namespace. grammar: the output
    follows it (`minisgl_zoo.grammar`); "" is none. With a grammar, `sampling` has no
    `structured_outputs`, and the request starts after its `CompiledMsg`. form: JSON of the
    `AnswerForm` by which the answer is split; "" if it is text alone. returns_ids: `Accepted` has
    the ids. prediction: ids that the answer may repeat, in the same form as `ids`. output: None for
    a new request. Otherwise the request goes on that an earlier engine had, and these are the ids
    of its output that the client has the text of, in the same form, perhaps none. repeats: the API
    server gets the text of `output`, too, in one reply before all others. images: those of the
    prompt, in order; `minisgl.core.image` says which ids it has at their places.
    """

    uid: Uid
    ids: bytes
    sampling: SamplingParams
    priority: Priority = 0
    share: KeyShare = NO_KEY
    namespace: OwnNamespace = ""
    adapter: Adapter | None = None
    grammar: str = ""
    form: str = ""
    returns_ids: bool = False
    prediction: bytes = b""
    output: bytes | None = None
    repeats: bool = False
    images: tuple[Image, ...] = ()


class StopMsg(Record, frozen=True, kw_only=True):
    """The detokenizer cut the text at a stop string: end the request with `Finished("stop")`.

    Not answered if the request has ended already: its `Finished` is on the way. num_tokens: the
    output tokens up to the one that completed the stop string, which counts.
    """

    uid: Uid
    num_tokens: int


class CompiledMsg(Record, frozen=True, kw_only=True):
    """Rank 0 has compiled the request's grammar: it may start. Unknown uids are ignored."""

    uid: Uid


class ExitMsg(Record, frozen=True, kw_only=True):
    """Leave the loop without finishing requests."""


SchedulerMsg = UserMsg | CompiledMsg | AbortMsg | StopMsg | PingMsg | ExitMsg
"""The messages that the loop handles. Its inbox handles those of `Control`."""
Control = ProfileMsg | WatchMsg | AdapterMsg
"""Messages for the engine's process, but not for its scheduler."""


# --- from rank 0 to the others -----------------------------------------------------------------


class StepBroadcast(Record, frozen=True, kw_only=True):
    """The messages that rank 0 received in one turn of its loop, often none.

    step: the turn's number, from 0. now: rank 0's clock, in seconds. digest: of all earlier plans
    (`minisgl.scheduler.step_broadcast`).
    """

    step: int
    now: float
    digest: int
    messages: list[SchedulerMsg | Control]


class PlanCheck(Record, frozen=True, kw_only=True):
    """The digest of rank 0's plans up to `step`. Ranks compare it before they launch the step."""

    step: int
    digest: int


StepBroadcastMsg = StepBroadcast | PlanCheck


# --- to the detokenizer ------------------------------------------------------------------------


class StatusReply(Record, frozen=True, kw_only=True):
    """The state of a rank's scheduler, and its counters since the start.

    num_used_pages: held by running requests. num_cached_pages: held only by the prefix cache.
    num_prompt_tokens, num_cached_tokens: counted when a request first starts. num_prefill_tokens:
    prompt tokens computed; those computed again after a retraction count again. part_s: seconds of
    the loop by part, in the order of `minisgl.scheduler.loop.PARTS`. peak_memory_bytes: see
    `Device.peak_memory_bytes`. num_drafted, num_accepted: see `Finished`. drafted_by, accepted_by:
    the same by drafter.
    """

    rank: int
    num_waiting: int
    num_running: int
    num_pages: int
    num_used_pages: int
    num_cached_pages: int
    num_steps: int
    num_finished: int = 0
    num_retractions: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_prefill_tokens: int
    num_output_tokens: int
    num_drafted: int = 0
    num_accepted: int = 0
    drafted_by: dict[str, int] = msgspec.field(default_factory=dict)
    accepted_by: dict[str, int] = msgspec.field(default_factory=dict)
    part_s: list[float]
    peak_memory_bytes: int = 0


class ProfileReply(Record, frozen=True, kw_only=True):
    """A rank's answer to a `ProfileMsg`. trace: the file that the action "stop" has written.
    num_steps: those in it."""

    seq: int
    rank: int = 0
    failed: Failed | None = None
    trace: str | None = None
    num_steps: int = 0


class AdapterReply(Record, frozen=True, kw_only=True):
    """A rank's answer to an `AdapterMsg`. failed: why it cannot use the adapter."""

    seq: int
    failed: Failed | None = None


class WatchReply(Record, frozen=True, kw_only=True):
    """The answer to a `WatchMsg`. frame: JSON of a frame of the X-ray; with seq, which is the
    message's, of what it asks for."""

    frame: bytes
    seq: int | None = None


Report = StatusReply | ProfileReply | AdapterReply | WatchReply
"""Records that the detokenizer sends to the API server unchanged."""


class DetokenizeMsg(Record, frozen=True, kw_only=True):
    """The events of one turn of the scheduler's loop, and the pings that arrived in it."""

    events: list[Event]
    pings: Sequence[int] = ()
    pass_on: Sequence[Report] = ()


# --- to the API server -------------------------------------------------------------------------


class TokenText(Record, frozen=True, kw_only=True, omit_defaults=True):
    """An output token of a request that asks for log-probabilities.

    data: its UTF-8 bytes, which may be a part of a character. offset: the characters of the text
    before it. top: (id, bytes, log-probability) of the most likely tokens at its position.
    """

    data: bytes
    offset: int
    top: Sequence[tuple[int, bytes, float]] = ()


class PromptToken(TokenText, frozen=True, kw_only=True):
    """A token of the prompt. logprob: None for the first. offset: in the prompt's text."""

    id: int
    logprob: float | None = None


class TextReply(Record, frozen=True, kw_only=True, omit_defaults=True):
    """Text that no later token changes.

    token_ids: the tokens of the text. logprobs, tokens: one for each of `token_ids`; none unless
    the request asks for them. prompt: the next tokens of the prompt, if the request asks for their
    log-probabilities. parts: (kind, text) of an answer that is split, as in
    `minisgl.core.answer`; `text` then has the content.
    """

    uid: Uid
    text: str
    token_ids: list[int]
    logprobs: list[float] | None = None
    tokens: Sequence[TokenText] = ()
    prompt: Sequence[PromptToken] = ()
    parts: Sequence[tuple[Literal["content", "reasoning", "call", "arguments"], str]] = ()


RequestReply = Accepted | TextReply | Finished | Failed
"""The replies to a request."""


# --- token ids ---------------------------------------------------------------------------------


def ids_to_bytes(ids: list[int] | IdArray) -> bytes:
    """Return token ids as little-endian int32 bytes."""
    return np.asarray(ids, dtype="<i4").tobytes()


def ids_from_bytes(data: bytes) -> IdArray:
    """Return a read-only int32 array over `data`. Raises ValueError if an id is incomplete."""
    return np.frombuffer(data, dtype="<i4")
