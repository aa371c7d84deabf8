"""The process that turns text into ids, ids into text, or both.

``--num-tokenizer 0`` runs one such process with both roles; N > 0 runs N that tokenize and one
that detokenizes. The process sleeps until a message comes, takes all that have arrived, and sends
the text of all running requests as one frame. `minisgl.tokenizer.work` encodes prompts. A message
that causes an error fails its request only.
"""

from __future__ import annotations

from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from minisgl.core import Event, Failed
from minisgl.errors import EngineError
from minisgl.message import AbortMsg, DetokenizeMsg
from minisgl.message.frontend import CodecReply, FrontendMsg, PongMsg, UserReply
from minisgl.tokenizer.detokenize import Detokenizer
from minisgl.tokenizer.tokenize import PromptEncoder
from minisgl.tokenizer.tokenizer import load_tokenizer, warn_of_unknown_ids
from minisgl.tokenizer.work import JOB_S, Work
from minisgl.utils.process import WorkerStatus
from minisgl.utils.zmq import Endpoints, PullQueue, PushQueue, wait

NATIVE_S: Final = 60.0
"""The most CPU seconds in one piece of native code. The largest tokenizer loads in 4 s."""

LOOK_S: Final = 10.0
"""How often an idle worker looks whether one of its threads hangs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextWorkerConfig:
    """The roles of one worker.

    folder: the checkpoint. tokenizer_index: the worker's index among those that tokenize; None if
    it does not. detokenizer: whether it detokenizes. dry_run: load the tokenizer, then end.
    """

    folder: Path
    endpoints: Endpoints
    tokenizer_index: int | None
    detokenizer: bool
    tool_call_parser: str | None = None
    dry_run: bool = False


def tokenize_worker(config: TextWorkerConfig, status: WorkerStatus) -> None:
    """Serve until SIGTERM. In a dry run, return as soon as the tokenizer is loaded.

    Raises ConfigError, before it is ready, if the tokenizer cannot be used.
    """
    assert config.tokenizer_index is not None or config.detokenizer, "a worker needs a role"
    status.bound_native_code(NATIVE_S)
    tokenizer = load_tokenizer(config.folder)
    encoder = PromptEncoder(
        tokenizer=tokenizer, folder=config.folder, tool_call_parser=config.tool_call_parser
    )
    info: dict[str, object] = {}
    if config.tokenizer_index is not None:  # this loads the template, and logs if it is broken
        info["has_chat_template"] = encoder.template.is_usable
    detokenizer = Detokenizer(tokenizer)
    if config.detokenizer:  # a server has one
        warn_of_unknown_ids(tokenizer, config.folder)
    if config.dry_run:
        status.ready(info)
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
        status.ready(info)

        work = Work(encoder)
        pulse = status.pulse
        while True:
            events: list[Event] = []
            passed_on: list[UserReply] = []
            if not work:
                pulse.rest()
            ready = wait(inboxes, 0 if work else LOOK_S, news=work.news)
            if work.is_late:
                raise EngineError(f"a prompt or a grammar has taken more than {JOB_S:g} s")
            pulse.turn()
            aborts: list[AbortMsg] = []
            for inbox in ready:
                for message in inbox.get(0):
                    if isinstance(message, DetokenizeMsg):
                        events += message.events
                        passed_on += [PongMsg(seq=seq) for seq in message.pings]
                        passed_on += message.pass_on
                    elif not isinstance(message, AbortMsg):
                        work.add(message)
                    elif not work.cancel(message.uid):  # otherwise it was not sent on
                        aborts.append(message)
            replies, stops = detokenizer.handle(events)
            to_api.put([*replies, *passed_on])
            to_scheduler.put([*stops, *aborts])
            work.step()  # one short prompt a turn, so that streams wait for one at most
            for answer in work.take():
                (to_api if isinstance(answer, Failed | CodecReply) else to_scheduler).put([answer])
