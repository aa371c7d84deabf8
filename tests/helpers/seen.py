"""Chats with pictures, run by an engine, and what transformers computes for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from helpers.books import check_books
from helpers.pictures import Sample
from minisgl.core import Finished, SamplingParams, Token
from minisgl.core.event import Event, PromptLogprobs
from minisgl.engine import Engine, EngineConfig
from minisgl.message import ChatPrompt, UserMsg, ids_from_bytes
from minisgl.scheduler import Scheduler, SchedulerConfig, run
from minisgl.scheduler.loop import Outbox
from minisgl.tokenizer.tokenize import Encoded
from minisgl_bench.fakes import ListInbox, ListOutbox
from minisgl_zoo.vision.times import ImageTimes

NUM_TOP = 20
TOLERANCE = 1e-4


def start(sample: Sample, **options: Any) -> Engine:
    settings = {"num_pages": 256, "page_size": 4, "max_running_requests": 8, "dtype": "float32"}
    settings |= {"device": "cpu"}
    return Engine(EngineConfig(model=str(sample.folder), **(settings | options)))


def scheduler_of(engine: Engine, **options: Any) -> Scheduler:
    settings: dict[str, Any] = {
        "groups": engine.memory.groups,
        "page_size": engine.page_size,
        "max_seq_len": engine.max_seq_len,
        "vocab_size": engine.model_config.vocab_size,
        "eos_ids": frozenset[int](),
        "max_prefill_tokens": engine.max_prefill_tokens,
        "max_running": engine.max_running,
    }
    return Scheduler(SchedulerConfig(**(settings | options)))


@dataclass
class Answer:
    """What an engine has said of a chat. logprobs: of the prompt's tokens from the second on, if
    they were asked for, and of the output's. tops: likewise."""

    prompt: list[int]
    output: list[int]
    logprobs: list[float]
    tops: list[list[tuple[int, float]]]
    end: Finished


class Eyes:
    """An engine, a scheduler and an encoder for one model. Mutable."""

    def __init__(self, sample: Sample, engine: Engine, **options: Any) -> None:
        self.sample, self.engine = sample, engine
        self.scheduler = scheduler_of(engine, **options)
        self.encoder = sample.encoder
        self.observed: Callable[[Outbox], Outbox] = lambda outbox: outbox
        self._next = 0

    def count_images(self) -> None:
        """Let the ends of requests have `images`."""
        observer = ImageTimes()
        seat: Any = SimpleNamespace(engine=self.engine, scheduler=lambda: self.scheduler)
        observer.attach(seat)
        self.observed = observer.outbox

    def encode(self, messages: list[dict[str, Any]]) -> Encoded:
        return self.encoder.encode(ChatPrompt(messages=messages), self.engine.max_seq_len)

    def message(self, encoded: Encoded, **options: Any) -> UserMsg:
        given = {"temperature": 0.0, "max_tokens": 4, "logprobs": True, "top_logprobs": NUM_TOP}
        self._next += 1
        sampling = SamplingParams(**(given | options))
        return self.encoder.request(encoded, sampling, "", self._next)

    def ask(self, chats: Sequence[list[dict[str, Any]]], **options: Any) -> list[Answer]:
        """Run these chats as one batch."""
        encoded = [self.encode(chat) for chat in chats]
        messages = [self.message(each, **options) for each in encoded]
        events = self.run([messages])
        return [
            _answer(ids_from_bytes(each.ids).tolist(), message.uid, events)
            for each, message in zip(encoded, messages, strict=True)
        ]

    def run(self, turns: list[list[Any]], *, overlap: bool = True) -> list[Event]:
        outbox = ListOutbox()
        inbox = ListInbox(turns, more=lambda: [] if self.scheduler.runnable else None)
        run(self.scheduler, self.engine, inbox, self.observed(outbox), overlap=overlap)
        check_books(self.scheduler)
        return outbox.events


def _answer(prompt: list[int], uid: int, events: list[Event]) -> Answer:
    mine = [event for event in events if event.uid == uid]
    output = [event for event in mine if isinstance(event, Token)]
    logprobs, tops = [], []
    for event in mine:
        if isinstance(event, PromptLogprobs):
            logprobs += event.logprobs
            tops += event.tops
    [end] = [event for event in mine if isinstance(event, Finished)]
    return Answer(
        prompt=prompt,
        output=[event.id for event in output],
        logprobs=[*logprobs, *(event.logprob or 0.0 for event in output)],
        tops=[*tops, *(list(event.top) for event in output)],
        end=end,
    )


class Wide(TorchFunctionMode):
    """Makes float64 of all float32."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        func = torch.Tensor.double if func is torch.Tensor.float else func
        named = {name: _wide(value) for name, value in (kwargs or {}).items()}
        return func(*map(_wide, args), **named)


def _wide(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.dtype == torch.float32:
        return value.double()
    return torch.float64 if value is torch.float32 else value


@torch.inference_mode()
def reference(sample: Sample, model: Any, answer: Answer, pictures: list[Any]) -> torch.Tensor:
    """Return what a copy of the sample's model computes for an answer: logits, [tokens, V]."""
    ids = torch.tensor([answer.prompt + answer.output[:-1]])
    given = sample.pixels(sample.processor, pictures) if pictures else {}
    if sample.types:
        given[sample.types] = (ids == model.config.image_token_id).int()
    if sample.masks_of_generate:
        kwargs: Any = {"attention_mask": None, "cache": None, "position_ids": None}
        embeds = model.get_input_embeddings()(ids)
        given["attention_mask"] = model.create_masks_for_generate(
            model.config.get_text_config(), embeds, mm_token_type_ids=given[sample.types], **kwargs
        )
    if pictures:
        given["pixel_values"] = given["pixel_values"].to(model.dtype)
    logits: torch.Tensor = model(input_ids=ids, **given).logits[0]
    return logits


def check(sample: Sample, answer: Answer, pictures: list[Any]) -> None:
    """Compare an answer's log-probabilities with those of transformers in float64. In float32 its
    delta nets, which divide by lengths that may be small, are off by up to 1.1e-4 themselves."""
    with Wide():
        logits = reference(sample, sample.model, answer, pictures)
    assert logits.dtype == torch.float64
    expected = logits.log_softmax(-1)[-len(answer.tops) :]
    scale = float(logits.abs().max())
    next_ids = (answer.prompt + answer.output)[-len(answer.tops) :]
    for at, (row, next_id) in enumerate(zip(expected, next_ids, strict=True)):
        assert abs(answer.logprobs[at] - float(row[next_id])) < TOLERANCE * scale, at
        for token, logprob in answer.tops[at]:
            assert abs(logprob - float(row[token])) < TOLERANCE * scale, (at, token)
    assert answer.output == expected.argmax(-1)[-len(answer.output) :].tolist()
