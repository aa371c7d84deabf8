"""The process that turns text into ids, ids into text, or both.

``--num-tokenizer 0`` runs one such process with both roles; N > 0 runs N that tokenize and one
that detokenizes. The process sleeps until a message comes, takes all that have arrived, and sends
the text of all running requests as one frame. A message that causes an error fails its request
only.

Nobody waits for all the work of another's API key. A request of one kind waits only for its own
kind, and the keys take turns in each::

    short texts, ids   the worker's loop, one a turn, as it takes less time than a thread
    chats              a thread, because a process of its own renders them
    long ones          two threads; the library of tokenizers releases Python's lock
    with images        eight threads, which wait for files of the web, and for a process that
                       decodes pictures
    grammars           two threads, after the prompt, because two processes compile them
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final

from msgspec.structs import replace

from minisgl import plugins
from minisgl.core import Event, Failed
from minisgl.core.image import NO_MEDIA, Media
from minisgl.errors import EngineError
from minisgl.message import (
    AbortMsg,
    ChatPrompt,
    Control,
    DetokenizeMsg,
    SchedulerMsg,
    TextPrompt,
    TokenizeMsg,
    TokenPrompt,
    UserMsg,
)
from minisgl.message.frontend import (
    CodecMsg,
    CodecReply,
    DecodeMsg,
    EncodeMsg,
    FrontendMsg,
    PongMsg,
    UserReply,
)
from minisgl.tokenizer.detokenize import Detokenizer
from minisgl.tokenizer.tokenize import Encoded, Kept, PromptEncoder, has_images
from minisgl.tokenizer.tokenizer import load_tokenizer, warn_of_unknown_ids
from minisgl.utils.process import WorkerStatus
from minisgl.utils.turns import TurnQueue, TurnThreads
from minisgl.utils.zmq import Endpoints, PullQueue, PushQueue, wait

NATIVE_S: Final = 60.0
"""The most CPU seconds in one piece of native code. The largest tokenizer loads in 4 s."""

LOOK_S: Final = 10.0
"""How often an idle worker looks whether one of its threads hangs."""

SHORT: Final = 8 * 1024
"""Characters of a short text: at most some milliseconds."""

LONG: Final = 32 * 1024
"""Characters from which a chat is a long one; also the tokens of a long list of ids."""

LONG_THREADS: Final = 2
"""Long texts at a time, of different keys. 15 MiB of one character take 2.2 GB of memory."""

IMAGE_THREADS: Final = 8
"""A picture of the web may take `minisgl_zoo.vision.sources.FETCH_S`, and holds up no text."""

GRAMMAR_THREADS: Final = 2
"""As many as `minisgl_zoo.grammar.trial` has helpers."""

JOB_S: Final = 300.0
"""The longest time of a thread's work. It is bounded by seconds of CPU time, so this is a hang."""

Codec = Callable[[PromptEncoder, CodecMsg], CodecReply]
"""The row `codec` of the table `tokenizers`: encodes or decodes; an error is in the reply."""
Answer = SchedulerMsg | Control | Failed | CodecReply


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
    media: Media = NO_MEDIA
    dry_run: bool = False


def tokenize_worker(config: TextWorkerConfig, status: WorkerStatus) -> None:
    """Serve until SIGTERM. In a dry run, return as soon as the tokenizer is loaded.

    Raises ConfigError, before it is ready, if the tokenizer cannot be used.
    """
    assert config.tokenizer_index is not None or config.detokenizer, "a worker needs a role"
    status.bound_native_code(NATIVE_S)
    tokenizer = load_tokenizer(config.folder)
    encoder = PromptEncoder(
        tokenizer=tokenizer,
        folder=config.folder,
        tool_call_parser=config.tool_call_parser,
        media=config.media,
    )
    info: dict[str, object] = {}
    if config.tokenizer_index is not None:  # this loads the template, and logs if it is broken
        info["has_chat_template"] = encoder.template.is_usable
        if encoder.images and not config.dry_run:
            encoder.images.load()
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


class Work:
    """Mutable. news: a file descriptor that is readable when `take` has answers."""

    def __init__(self, encoder: PromptEncoder) -> None:
        self._encoder = encoder
        self._codec: Codec | None = plugins.find("tokenizers", "codec")
        self._short: TurnQueue[Callable[[], None]] = TurnQueue()
        self._chats = TurnThreads("chats")
        self._long = TurnThreads("long texts", LONG_THREADS)
        self._images = TurnThreads("images", IMAGE_THREADS)
        self._grammars = TurnThreads("grammars", GRAMMAR_THREADS)
        self._open: dict[int, TokenizeMsg] = {}  # by uid; what waits has the uid alone
        self.news, self._done_fd = os.pipe()
        os.set_blocking(self.news, False)
        self._done: SimpleQueue[Answer] = SimpleQueue()

    @property
    def is_late(self) -> bool:
        """Whether a thread makes no progress."""
        threads = (self._chats, self._long, self._images, self._grammars)
        return max(each.longest_s() for each in threads) > JOB_S

    def add(self, message: FrontendMsg) -> None:
        """Work on a request. Other messages have a turn of their own among the short ones."""
        threads: TurnThreads | None = None
        if isinstance(message, TokenizeMsg):
            self._open[message.uid] = message
            task, threads = partial(self._encode, message.uid), self._threads_for(message)
        elif isinstance(message, EncodeMsg | DecodeMsg):
            task, threads = partial(self._code, message), self._threads_for(message)
        else:
            task = partial(self._answer, message)
        if threads:
            threads.submit(_key(message), task)
        else:
            self._short.put(_key(message), task)

    def cancel(self, uid: int) -> bool:
        """Drop a request. Returns False if it was answered, or is unknown."""
        return self._open.pop(uid, None) is not None

    def __bool__(self) -> bool:
        """Whether `step` has something to do."""
        return bool(self._short)

    def step(self) -> None:
        """Work on the next short request."""
        if found := self._short.take():
            found[1]()

    def take(self) -> list[Answer]:
        """Return the answers since the last call."""
        answers: list[Answer] = []
        try:
            num_done = len(os.read(self.news, 4096))
        except BlockingIOError:
            return answers
        for _ in range(num_done):
            answer = self._done.get()
            if isinstance(answer, UserMsg | Failed) and not self._open.pop(answer.uid, None):
                continue  # the request was cancelled
            answers.append(answer)
        return answers

    def _threads_for(self, message: TokenizeMsg | CodecMsg) -> TurnThreads | None:
        """Return the threads that encode the message; None if the loop does."""
        if isinstance(message, DecodeMsg):
            return self._long if len(message.ids) // 4 > SHORT else None
        match message.prompt:
            case TextPrompt(text=text, pair=pair):
                is_long = len(text) + len(pair or "") > SHORT
            case TokenPrompt(ids=ids):
                is_long = len(ids) // 4 > LONG
            case ChatPrompt() as chat:
                if self._encoder.images and has_images(chat.messages):
                    return self._images
                given = [chat.messages, chat.tools, chat.template_args, chat.prediction]
                return self._long if _is_longer(given, LONG) else self._chats
        if isinstance(message, TokenizeMsg) and not is_long:
            is_long = sum(map(len, message.sampling.bad_words)) > SHORT
        return self._long if is_long else None

    def _encode(self, uid: int) -> None:
        if not (message := self._open.get(uid)):
            return
        with self._failing(message):
            is_cut = message.sampling.truncate_prompt_tokens is not None
            kept: Kept = ("first" if message.sampling.pooling else "last") if is_cut else "all"
            encoded = self._encoder.encode(message.prompt, message.context_length, kept)
            if has_grammar(message):
                self._grammars.submit(_key(message), partial(self._finish, uid, encoded))
            else:
                self._finish(uid, encoded)

    def _finish(self, uid: int, encoded: Encoded) -> None:
        if message := self._open.get(uid):
            with self._failing(message):
                self._answer(user_msg(self._encoder, encoded, message))

    def _code(self, message: CodecMsg) -> None:
        assert self._codec, "the package whose route asks is installed"
        with self._failing(message):
            self._answer(self._codec(self._encoder, message))

    @contextmanager
    def _failing(self, message: TokenizeMsg | CodecMsg) -> Iterator[None]:
        """Fail a request for an error, and for a panic of a library."""
        try:
            yield
        except SystemExit:  # SIGTERM, in the loop
            raise
        except BaseException as raised:
            error = raised
            if not isinstance(error, Exception):
                error = EngineError(f"a library fails with this text: {raised}")
            if isinstance(message, TokenizeMsg):
                self._answer(Failed.of(message.uid, error))
            else:
                self._answer(CodecReply(seq=message.seq, failed=Failed.of(message.seq, error)))

    def _answer(self, answer: Answer) -> None:
        self._done.put(answer)
        os.write(self._done_fd, b".")


def user_msg(encoder: PromptEncoder, encoded: Encoded, message: TokenizeMsg) -> UserMsg:
    """Return the record for the scheduler. Raises InvalidSampling for a grammar that cannot be
    compiled."""
    sampling = message.sampling
    if message.ids:
        encoded = encoder.accepted(encoded, message.ids)
    request = encoder.request(
        encoded, sampling, message.namespace, message.uid, message.priority, message.adapter
    )
    num_output = len(message.output or b"") // 4
    if message.is_clamped and sampling.max_tokens and message.context_length:
        left = max(message.context_length - len(request.ids) // 4, num_output + 1)
        clamped = replace(request.sampling, max_tokens=min(sampling.max_tokens, left))
        request = replace(request, sampling=clamped)
    return replace(
        request,
        share=message.share,
        returns_ids=message.returns_ids,
        output=message.output,
        repeats=message.repeats,
    )


def has_grammar(message: TokenizeMsg) -> bool:
    """Whether the request has a grammar that must be checked."""
    if message.sampling.structured_outputs is not None:
        return True
    prompt = message.prompt
    return isinstance(prompt, ChatPrompt) and (
        prompt.tool_choice != "auto" or prompt.thinking_budget is not None
    )


def _key(message: FrontendMsg) -> Hashable:
    """Return the number of the request's API key. Without keys each request is a key of its own;
    a message that is no request has another one."""
    if isinstance(message, TokenizeMsg):
        return message.share.key or ("uid", message.uid)
    if isinstance(message, EncodeMsg | DecodeMsg):
        return message.key or ("seq", message.seq)
    return None


def _is_longer(value: Any, most: int) -> bool:
    """Return whether a JSON value has more characters than `most`; each value counts as one."""
    left, values = most, [value]
    while values and left >= 0:
        match values.pop():
            case str(text):
                left -= len(text)
            case dict() as items:
                left -= sum(map(len, items)) + len(items)
                values += items.values()
            case list() as items:
                left -= len(items)
                values += items
    return left < 0
