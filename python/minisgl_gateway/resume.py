"""Open requests go on after a restart: a client sees a pause, and the same text.

A request is its prompt, its output so far, its seed and the index of the next output token. The
noise is a function of (seed, index, vocabulary id), so another engine continues with the same
tokens. For each open request the API process keeps the message that it sent and the ids of the
output whose text it got::

    submit    TokenizeMsg ------------------------------------> first engine
              kept         <--- Accepted, TextReply(ids) ...--- dies
    resume    TokenizeMsg with output=ids --------------------> second engine

The second scheduler computes prompt and output as it does after a retraction. The detokenizer reads
the ids without sending their text, which restores what it held back: parts of characters, of stop
strings and of calls. A grammar matches the ids again. Tokens whose text was not sent yet are
sampled again, and are the same.

A request goes on once. If the second engine ends too, the request may be the cause. A request that
fails because its step found no memory is submitted again, too, to the engine that goes on.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from minisgl.core import Accepted, Failed, Finished
from minisgl.errors import EngineError, OutOfDeviceMemory
from minisgl.message import (
    ChatPrompt,
    RequestReply,
    TextReply,
    TokenizeMsg,
    ids_from_bytes,
    ids_to_bytes,
)
from minisgl.utils.logger import get_logger
from minisgl.utils.text import size_of
from minisgl_gateway.upgrade.guests import HostFrontend
from minisgl_gateway.upgrade.link import Link

logger = get_logger(__name__)

MAX_KEPT_BYTES: Final = 256 * 2**20
"""The most bytes of all kept prompts, so that many long prompts do not fill the memory of the API
process. A request beyond it ends with the engine."""


_NO_MEMORY: Final = OutOfDeviceMemory.code


class EndedTwice(EngineError):
    """The engine ended for the second time while the request was open."""

    code = "engine_ended_twice"

    def __init__(self, cause: EngineError) -> None:
        super().__init__(
            f"{cause}; this request was open when another engine ended, too, and may be the cause, "
            "so it is not tried again"
        )


@dataclass(slots=True, kw_only=True, eq=False)
class _Kept:
    """What makes an open request go on. Mutable: its output grows.

    num_bytes: of the prompt, which counts once for each choice. is_sent: to an engine. output: ids
    whose text has come. accepted: the first engine's. num_chars, num_scored: text and tokens of the
    prompt that came before any output (`echo`, `prompt_logprobs`). lost_s: once it was submitted
    again, the time until then, of waiting and of decoding.
    """

    message: TokenizeMsg
    num_bytes: int
    submitted_at: float
    is_sent: bool = True
    output: array[int] = field(default_factory=lambda: array("i"))
    accepted: Accepted | None = None
    num_chars: int = 0
    num_scored: int = 0
    lost_s: tuple[float, float] | None = None

    def again(self, context_length: int | None) -> TokenizeMsg:
        """Return the message for another engine."""
        lost_s = time.perf_counter() - self.submitted_at
        self.lost_s = (0.0, lost_s) if self.output else (lost_s, 0.0)
        message, accepted = self.message, self.accepted
        if accepted is None:
            return replace(message, output=message.output or b"", context_length=context_length)
        # Without a limit of its own it keeps the one that it got, unless the new pool is smaller.
        most = accepted.sampling.max_tokens
        return replace(
            message,
            sampling=replace(message.sampling, max_tokens=most),
            is_clamped=message.is_clamped or message.sampling.max_tokens is None,
            context_length=context_length,
            output=ids_to_bytes(self.output.tolist()) or message.output or b"",
            repeats=message.repeats and not self.output,
            ids=accepted.prompt_ids,
        )

    def passed(self, reply: RequestReply) -> RequestReply | None:
        """Note a reply. Returns what the client gets of it; None if the client has it already."""
        if isinstance(reply, TextReply):
            return self._text(reply)
        if isinstance(reply, Accepted):
            if self.accepted:
                return None
            self.accepted = reply
            return reply if self.message.returns_ids else replace(reply, prompt_ids=b"")
        if isinstance(reply, Finished) and self.lost_s is not None:
            queued_s, decode_s = self.lost_s
            return replace(
                reply,
                num_resumed=1,
                queued_s=queued_s + reply.queued_s,
                decode_s=decode_s + reply.decode_s,
            )
        return reply

    def _text(self, reply: TextReply) -> TextReply | None:
        is_shown = self.message.sampling.shows_prompt and not self.output
        self.output.extend(reply.token_ids)
        if not is_shown:
            return reply
        if self.lost_s is None:
            self.num_chars += len(reply.text)
            self.num_scored += len(reply.prompt)
        else:  # the prompt is scored again
            chars, scored = len(reply.text), len(reply.prompt)
            reply = replace(
                reply, text=reply.text[self.num_chars :], prompt=reply.prompt[self.num_scored :]
            )
            self.num_chars -= chars - len(reply.text)
            self.num_scored -= scored - len(reply.prompt)
        return reply if reply.text or reply.prompt or reply.token_ids else None


class ResumingFrontend(HostFrontend):
    """A frontend whose open calls outlive an engine. Mutable."""

    def __init__(self, *parts: Any, **options: Any) -> None:
        """parts, options: the arguments of `Frontend`."""
        super().__init__(*parts, **options)
        self._kept: dict[int, _Kept] = {}
        self._num_bytes = 0
        self._waits: EngineError | None = None

    def hold(self, why: EngineError) -> None:
        """Keep new requests for `resume` instead of sending them. why: refuses those that find no
        room."""
        self._waits = why

    @property
    def is_paused(self) -> bool:
        """Whether requests wait because there is no engine."""
        return self.failure is not None and self.failure is self._waits

    @property
    def num_sent(self) -> int:
        """The number of open prompts that the engine has."""
        return self.num_open - sum(not kept.is_sent for kept in self._kept.values())

    def pause(self, error: EngineError, why: EngineError, *, is_planned: bool = False) -> None:
        """Keep the open calls, and new ones, for `resume`. error: the end of the engine, with which
        calls end that cannot go on. why: the server's state until `reconnect`. is_planned: no
        request can be the cause of the end."""
        self.failure = self._waits = why
        for uid, call in list(self._calls.items()):
            kept = self._kept.get(uid)
            if kept is None:
                call.fail(error)  # it is too large to be kept, or another of its prompts is
            elif kept.lost_s is not None and not is_planned:
                logger.error("request %d was open when two engines ended: it fails", uid)
                call.fail(EndedTwice(error))
        self.round_trips.fail(error)
        self.on_frame(None)

    def settle(self, error: EngineError, *, only_new: bool) -> None:
        """End the calls that cannot go on, before `reconnect` to an engine that takes over.
        only_new: those go on that no engine has had, here or at another server."""
        for uid, call in list(self._calls.items()):
            kept = self._kept.get(uid)
            if kept is None or (only_new and (kept.is_sent or kept.message.output)):
                call.fail(error)

    def adopt(self, message: TokenizeMsg, link: Link) -> int:
        uid = super().adopt(message, link)
        if kept := self._kept.get(uid):
            # The ids of an output that is repeated come again, with its text.
            known = b"" if message.repeats else message.output or b""
            kept.output.extend(ids_from_bytes(known).tolist())
        return uid

    def hold_on(self) -> None:
        """Tell the clients of streams that their answers go on."""
        for call in set(self._calls.values()):
            call.hold_on()

    def resume(self) -> None:
        """Submit the open requests again, and the new ones, after `reconnect`."""
        self._waits = None
        for kept in self._kept.values():
            if kept.is_sent:
                super()._send([kept.again(self.context_length)])
            else:
                kept.is_sent = True
                message = replace(kept.message, context_length=self.context_length)
                super()._send([_with_ids(message)])
        logger.info("open requests that go on: %d", len(self._kept))

    def _send(self, messages: Sequence[TokenizeMsg]) -> None:
        now = time.perf_counter()
        kept: dict[int, _Kept] = {}
        prompt, size = None, 0
        for message in messages:
            if message.prompt is not prompt:  # all choices have one
                prompt, size = message.prompt, len(msgspec.msgpack.encode(message.prompt))
            kept[message.uid] = _Kept(
                message=message, num_bytes=size, submitted_at=now, is_sent=not self._waits
            )
        num_bytes = sum(each.num_bytes for each in kept.values())
        has_room = self._num_bytes + num_bytes <= MAX_KEPT_BYTES
        if self._waits and not has_room:
            raise self._waits
        if not self._waits:
            super()._send([_with_ids(each) for each in messages])
        if not has_room:
            logger.warning("%s of prompts are not kept: others fill the limit", size_of(num_bytes))
            return
        self._num_bytes += num_bytes
        self._kept |= kept

    def _check_failure(self) -> None:
        if not self.is_paused:
            super()._check_failure()

    def _deliver(self, reply: RequestReply, now: float) -> None:
        kept = self._kept.get(reply.uid)
        if kept and kept.lost_s is None and isinstance(reply, Failed) and reply.code == _NO_MEMORY:
            self._try_again(reply.uid, kept)
            return
        passed = kept.passed(reply) if kept else reply
        if passed is not None:
            super()._deliver(passed, now)

    def _try_again(self, uid: int, kept: _Kept) -> None:
        """Submit a request again whose step found no memory, while the engine goes on. The engine
        may still know the uid."""
        new = next(self._uids)
        kept.message = replace(kept.message, uid=new)
        call = self._calls[new] = self._calls.pop(uid)
        self._kept[new] = self._kept.pop(uid)
        if job := self._jobs.pop(uid, None):
            self._jobs[new] = job
        call.rename(uid, new)
        self.observer.rename(uid, new)
        super()._send([kept.again(self.context_length)])
        logger.info("request %d found no memory: it goes on as request %d", uid, new)

    def _close(self, uid: int) -> None:
        if kept := self._kept.pop(uid, None):
            self._num_bytes -= kept.num_bytes
        super()._close(uid)


def _with_ids(message: TokenizeMsg) -> TokenizeMsg:
    """Return the message with the wish for a chat's ids: its template may write the time."""
    is_chat = isinstance(message.prompt, ChatPrompt)
    return replace(message, returns_ids=message.returns_ids or is_chat)
