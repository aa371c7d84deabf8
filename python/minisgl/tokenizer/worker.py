"""The process that turns text into ids, ids into text, or both.

``--num-tokenizer 0`` runs one such process with both roles; N > 0 runs N that tokenize and one
that detokenizes. It sleeps until a message comes, takes all that are there, and sends the text of
all running requests as one frame. A message that cannot be handled fails its request only.
"""

from __future__ import annotations

from collections import deque
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from minisgl.core import Event, Failed
from minisgl.message import (
    AbortMsg,
    DetokenizeMsg,
    ProfileMsg,
    SchedulerMsg,
    TokenizeMsg,
    UserMsg,
    WatchMsg,
)
from minisgl.message.frontend import (
    CodecReply,
    DecodeMsg,
    EncodeMsg,
    FrontendMsg,
    PongMsg,
    UserReply,
)
from minisgl.tokenizer.detokenize import Detokenizer
from minisgl.tokenizer.tokenize import PromptEncoder
from minisgl.tokenizer.tokenizer import load_tokenizer, warn_of_unknown_ids
from minisgl.utils.process import WorkerStatus
from minisgl.utils.zmq import Endpoints, PullQueue, PushQueue, wait

TURN_S: Final = 30.0
"""What a turn may take: a prompt of a million tokens, or a chat template, on a slow CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextWorkerConfig:
    """folder: the checkpoint. tokenizer_index: None for no tokenizer. detokenizer: that role.

    dry_run: only find out whether the tokenizer is any good.
    """

    folder: Path
    endpoints: Endpoints
    tokenizer_index: int | None
    detokenizer: bool
    tool_call_parser: str | None = None
    dry_run: bool = False


def tokenize_worker(config: TextWorkerConfig, status: WorkerStatus) -> None:
    """Serve until SIGTERM, in a dry run not at all.

    Raises ConfigError, before it is ready, if the tokenizer is no good.
    """
    assert config.tokenizer_index is not None or config.detokenizer, "a worker needs a role"
    tokenizer = load_tokenizer(config.folder)
    encoder = PromptEncoder(
        tokenizer=tokenizer, folder=config.folder, tool_call_parser=config.tool_call_parser
    )
    has_chat_template = encoder.template.is_usable  # loads it: a broken one is reported now
    encoder.template.is_alone = True
    detokenizer = Detokenizer(tokenizer)
    if config.detokenizer:  # one of a server
        warn_of_unknown_ids(tokenizer, config.folder)
    if config.dry_run:
        status.ready({})
        return
    with ExitStack() as stack:
        inboxes: list[PullQueue[Any]] = []
        if config.tokenizer_index is not None:
            address = config.endpoints.tokenizer(config.tokenizer_index)
            inboxes.append(stack.enter_context(closing(PullQueue(address, FrontendMsg))))
        if config.detokenizer:
            address = config.endpoints.detokenizer
            inboxes.append(stack.enter_context(closing(PullQueue(address, DetokenizeMsg))))
        to_scheduler = stack.enter_context(closing(PushQueue(config.endpoints.scheduler)))
        to_api = stack.enter_context(closing(PushQueue(config.endpoints.api)))
        status.ready({"has_chat_template": has_chat_template})

        pulse = status.pulse
        pulse.allowed_s = lambda: TURN_S
        waiting: deque[FrontendMsg] = deque()
        while True:
            events: list[Event] = []
            passed_on: list[UserReply] = []
            if not waiting:
                pulse.rest()
            ready = wait(inboxes, 0 if waiting else None)
            pulse.turn()
            for inbox in ready:
                for message in inbox.get(0):
                    if isinstance(message, DetokenizeMsg):
                        events += message.events
                        passed_on += [PongMsg(seq=seq) for seq in message.pings]
                        passed_on += message.pass_on
                    elif isinstance(message, AbortMsg):
                        _take_back(waiting, message)
                    else:
                        waiting.append(message)
            replies, stops = detokenizer.handle(events)
            to_api.put([*replies, *passed_on])
            to_scheduler.put(stops)
            if waiting:  # one prompt a turn: a long one must not stall the running streams twice
                answer = _forward(encoder, waiting.popleft())
                (to_api if isinstance(answer, Failed | CodecReply) else to_scheduler).put([answer])


def _take_back(waiting: deque[FrontendMsg], abort: AbortMsg) -> None:
    """Forget a prompt that still waits; one that has gone on is aborted before all that waits."""
    for message in waiting:
        if isinstance(message, TokenizeMsg) and message.uid == abort.uid:
            waiting.remove(message)
            return
    waiting.appendleft(abort)


def _forward(
    encoder: PromptEncoder, message: FrontendMsg
) -> SchedulerMsg | ProfileMsg | WatchMsg | Failed | CodecReply:
    if isinstance(message, TokenizeMsg):
        return _clamped(message, encoder.tokenize(message))
    if isinstance(message, EncodeMsg | DecodeMsg):
        from minisgl.tokenizer.codec import answer_codec

        return answer_codec(encoder, message)
    return message


def _clamped(asked: TokenizeMsg, message: UserMsg | Failed) -> UserMsg | Failed:
    """`message` with `max_tokens` lowered to what the context leaves, if the request wants that."""
    wanted = asked.sampling.max_tokens
    if (
        not asked.is_clamped
        or not wanted
        or not asked.context_length
        or isinstance(message, Failed)
    ):
        return message
    left = max(asked.context_length - len(message.ids) // 4, 1)
    sampling = msgspec.structs.replace(message.sampling, max_tokens=min(wanted, left))
    return msgspec.structs.replace(message, sampling=sampling)
