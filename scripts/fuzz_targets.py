"""The targets of `fuzz.py`: each decoder of bytes from clients, workers or checkpoints.

A target takes any bytes. It returns if they are accepted, or refused with an error that we promise;
any other exception is a finding. Assertions check further promises.
"""

from __future__ import annotations

import asyncio
import json
from functools import cache
from pathlib import Path
from typing import Any, Final

import msgspec

from fuzz_checkpoints import OF_CHECKPOINTS, Fuzz
from minisgl.builtin import model_path
from minisgl.errors import RequestError

# --- between processes ---------------------------------------------------------------------------


@cache
def _unions() -> list[Any]:
    from minisgl import message
    from minisgl.message.frontend import FrontendMsg, UserReply
    from minisgl_gateway.nodes import link
    from minisgl_gateway.router.replica_state import ReplicaState

    lists = [message.SchedulerMsg, message.StepBroadcastMsg, message.DetokenizeMsg]
    unions = [FrontendMsg, UserReply, ReplicaState, *lists]
    records = [each for each in vars(link).values() if isinstance(each, type)]
    return unions + [each for each in records if issubclass(each, msgspec.Struct)]


@cache
def _decoders() -> list[msgspec.msgpack.Decoder[Any]]:
    return [msgspec.msgpack.Decoder(list[union]) for union in _unions()]


def records(data: bytes) -> None:
    """A frame of records. An accepted frame is the same after another round trip."""
    if not data:
        return
    decoder = _decoders()[data[0] % len(_decoders())]
    try:
        found = decoder.decode(data[1:])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return
    again = msgspec.msgpack.encode(found)
    assert msgspec.msgpack.encode(decoder.decode(again)) == again


def _record_seeds() -> list[bytes]:
    from minisgl.core import SamplingParams
    from minisgl.core.event import Finished
    from minisgl.message import (
        AbortMsg,
        ChatPrompt,
        DetokenizeMsg,
        StepBroadcast,
        TextPrompt,
        TokenizeMsg,
        UserMsg,
        ids_to_bytes,
    )

    params = SamplingParams(max_tokens=3, stop=("a",), logit_bias={1: 2.0})
    user = UserMsg(uid=1, ids=ids_to_bytes([1, 2]), sampling=params, share=(1, 2))
    chat = ChatPrompt(messages=[{"role": "user", "content": "x"}])
    texts = [
        TokenizeMsg(uid=1, prompt=TextPrompt(text="é"), sampling=params),
        TokenizeMsg(uid=2, prompt=chat, sampling=params),
    ]
    end = Finished(uid=1, reason="stop", num_prompt_tokens=1, num_output_tokens=2)
    lists: list[list[Any]] = [
        [user, AbortMsg(uid=1)],
        texts,
        [StepBroadcast(step=1, now=0.5, digest=7, messages=[user])],
        [DetokenizeMsg(events=[end])],
        [end],
    ]
    return [
        bytes([index]) + msgspec.msgpack.encode(each)
        for each in lists
        for index in range(len(_decoders()))
    ]


# --- from clients --------------------------------------------------------------------------------

PATHS: Final = (
    *("/v1/chat/completions", "/v1/completions", "/generate", "/v1/messages", "/v1/responses"),
    *("/api/chat", "/api/generate", "/tokenize", "/detokenize", "/v1/messages/count_tokens"),
)


class _Refusing:
    """Stands for a tokenizer: it takes each record as the real one reads it, and refuses it."""

    def __init__(self) -> None:
        self.frontend: Any = None

    def put(self, records: list[Any]) -> None:
        from minisgl.core import Failed
        from minisgl.message.frontend import CodecReply, FrontendMsg

        decoder = msgspec.msgpack.Decoder(list[FrontendMsg])
        for record in decoder.decode(msgspec.msgpack.encode(records)):
            loop = asyncio.get_running_loop()
            if hasattr(record, "uid"):
                failed = Failed(uid=record.uid, message="fuzz", code="fuzz", status=400)
                loop.call_soon(self.frontend._deliver, failed, 0.0)
            else:
                failed = Failed(uid=0, message="fuzz", code="fuzz", status=400)
                reply = CodecReply(seq=record.seq or 0, failed=failed)
                loop.call_soon(self.frontend.round_trips.deliver, reply)


@cache
def _server() -> tuple[asyncio.AbstractEventLoop, Any]:
    from minisgl.core import SamplingParams
    from minisgl.server.api_server import create_app
    from minisgl.server.frontend import Frontend
    from minisgl.server.model import ServedModel

    tokenizer: Any = _Refusing()
    no_replies: Any = None  # `_Refusing` delivers them
    tokenizer.frontend = Frontend([tokenizer], no_replies)
    tokenizer.frontend.info = {"context_length": 4096}
    model = ServedModel(
        names=("m",), defaults=SamplingParams(), created=1, folder=Path(model_path())
    )
    return asyncio.new_event_loop(), create_app(tokenizer.frontend, model)


def requests(data: bytes) -> None:
    """A body for the endpoint that the first byte names. It is refused as the client's mistake, or
    it asks Ollama's API to load the model, which is loaded."""
    if not data:
        return
    from minisgl.server.web.http import ABORT_CONNECTION

    loop, app = _server()
    path, events = PATHS[data[0] % len(PATHS)], list[dict[str, Any]]()
    messages = [{"type": "http.request", "body": data[1:], "more_body": False}]

    async def receive() -> dict[str, Any]:
        return messages.pop() if messages else await asyncio.Future()

    async def send(event: dict[str, Any]) -> None:
        events.append(event)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
        ABORT_CONNECTION: lambda: None,
    }

    async def ask() -> None:
        await app(scope, receive, send)
        watchers = asyncio.all_tasks() - {asyncio.current_task()}
        for task in watchers:
            task.cancel()
        await asyncio.gather(*watchers, return_exceptions=True)

    loop.run_until_complete(ask())
    status, answer = events[0]["status"], b"".join(event.get("body", b"") for event in events)
    is_load = path == "/api/generate" and status == 200 and b'"done_reason":"load"' in answer
    assert is_load or 400 <= status < 500, f"{path}: {status}"


def _request_seeds() -> list[bytes]:
    chat = {"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 5}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    bodies: list[dict[str, Any]] = [
        chat | {"stream": True, "tools": [tool], "tool_choice": "auto", "temperature": 0.5},
        {"prompt": ["a", "b"], "n": 2, "stop": ["x"], "logit_bias": {"1": 1}, "timeout": 1},
        {"text": "a", "sampling_params": {"max_new_tokens": 1}},
        chat | {"system": "s", "thinking": {"type": "enabled", "budget_tokens": 1024}},
        {"model": "m", "input": [{"role": "user", "content": "x"}], "text": {"format": {}}},
        chat | {"options": {"num_predict": 1}, "format": "json"},
        {"model": "m", "prompt": "x", "options": {"seed": 1}},
        {"prompt": "x"},
        {"tokens": [1, 2]},
        chat,
    ]
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    more = [bytes([0]) + json.dumps(chat | {"response_format": schema}).encode()]
    return more + [bytes([i]) + json.dumps(body).encode() for i, body in enumerate(bodies)]


def answers(data: bytes) -> None:
    """A model's answer, through each parser. Its pieces give the same parts as the whole."""
    from minisgl_zoo.calls.known import PARSERS, REASONING
    from minisgl_zoo.calls.parser import AnswerForm, AnswerParser

    if len(data) < 3:
        return
    reasonings = ("", *REASONING, "harmony")
    form = AnswerForm(
        calls=PARSERS[data[0] % len(PARSERS)],
        reasoning=reasonings[data[1] % len(reasonings)],
        is_open=data[2] > 127,
        types={"f": {"a": "integer", "b": "object", "c": "boolean"}},
    )
    text, size = data[3:].decode(errors="ignore"), data[2] % 7 + 1

    def parts(pieces: list[str]) -> list[tuple[str, str]]:
        parser = AnswerParser(form)
        found: list[tuple[str, str]] = []
        for part in [part for piece in pieces for part in parser.feed(piece)] + parser.flush():
            if found and found[-1][0] == part[0] and part[0] != "call":
                found[-1] = part[0], found[-1][1] + part[1]
            else:
                found.append((part[0], part[1]))
        return found

    cut = [text[i : i + size] for i in range(0, len(text), size)]
    assert parts(cut) == parts([text]), (form, text)


def _answer_seeds() -> list[bytes]:
    from minisgl_zoo.calls.known import CALLS, PARSERS

    head = '{"name": "f", "arguments": {"a": 1}}'
    seeds = []
    for index, name in enumerate(PARSERS):
        form = CALLS.get(name)
        begin, end = (form.begin, form.end) if form else ("<|channel|>commentary to=f", "<|call|>")
        text = f"<think>x</think>a{begin}{head}{end}b"
        seeds += [bytes([index, kind, kind]) + text.encode() for kind in (0, 1, 200)]
    return seeds


def grammars(data: bytes) -> None:
    """A grammar that a request asks for."""
    from minisgl.core import SamplingParams
    from minisgl_zoo.grammar import compile as grammar_compile

    if not data:
        return
    text = data[1:].decode(errors="ignore")
    kind = ("json", "regex", "grammar", "choice")[data[0] % 4]
    value: Any = text
    try:
        if kind == "json":
            value = msgspec.json.decode(text)
        elif kind == "choice":
            value = text.split("\n")
        params = SamplingParams(structured_outputs={kind: value})
        assert params.structured_outputs
        grammar_compile.compiled(params.structured_outputs)
    except (RequestError, msgspec.DecodeError):
        pass


def _grammar_seeds() -> list[bytes]:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 3}, "b": {"enum": ["x", 1]}},
        "required": ["a"],
        "$defs": {"x": {"anyOf": [{"$ref": "#/$defs/x"}, {"pattern": "^a+$", "type": "string"}]}},
    }
    lark = 'start: "a" item+\nitem: /[0-9]+/ | "(" start ")"\n'
    texts = json.dumps(schema), r"(a|b){1,3}[^c-e]*\d", lark, "yes\nno"
    return [bytes([index]) + text.encode() for index, text in enumerate(texts)]


TARGETS: Final[dict[str, Fuzz]] = {
    "records": Fuzz(run=records, seeds=_record_seeds),
    "requests": Fuzz(
        run=requests,
        seeds=_request_seeds,
        words=('"stream"', '"tools"', '"role"', '"logprobs"', '"response_format"', "null", "1e9"),
    ),
    "answers": Fuzz(
        run=answers,
        seeds=_answer_seeds,
        words=("<tool_call>", "</tool_call>", '{"name"', '"arguments"', "<think>", "<|channel|>"),
    ),
    "grammars": Fuzz(
        run=grammars, seeds=_grammar_seeds, words=('"anyOf"', '"$ref"', '"pattern"', "{1,9}", "%")
    ),
    **OF_CHECKPOINTS,
}
