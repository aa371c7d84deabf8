"""Engines that run requests, and a reference with the right answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, Qwen3Config

from helpers.books import check_books
from helpers.model_harness import make_reference
from minisgl.core import Finished, SamplingParams, Token
from minisgl.core.adapters import Adapter
from minisgl.engine import Engine, EngineConfig
from minisgl.message import SchedulerMsg, UserMsg, ids_to_bytes
from minisgl.scheduler import Scheduler, SchedulerConfig, run
from minisgl_bench.fakes import ListInbox, ListOutbox

VOCAB = 101
NUM_TOKENS = 64
Reference = tuple[Path, PreTrainedModel]
Request = tuple[list[int], SamplingParams]


def save_reference(folder: Path) -> Reference:
    """Write a tiny Qwen3 with random weights into the folder."""
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=20,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    model = make_reference(config)
    model.save_pretrained(folder)
    return folder, model


def make_engine(reference: Reference, **options: Any) -> Engine:
    settings = {"num_pages": 4096 // options.get("page_size", 16), "max_running_requests": 16}
    return Engine(
        EngineConfig(model=str(reference[0]), max_prefill_length=64, **(settings | options)),
    )


def greedy(count: int = NUM_TOKENS) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count)


def drive(
    engine: Engine,
    requests: list[Request],
    *,
    turns: list[int] | None = None,
    overlap: bool = True,
    scheduler: Scheduler | None = None,
    first_uid: int = 0,
    outbox: ListOutbox | None = None,
    adapter: Adapter | None = None,
    **options: Any,
) -> list[list[int]]:
    """Return the tokens of each request. turns[i]: the loop's turn at which request i arrives."""
    scheduler = scheduler or make_scheduler(engine, **options)
    arrivals: list[list[SchedulerMsg]] = [[] for _ in range(max(turns or [0]) + 1)]
    for index, (prompt, sampling) in enumerate(requests):
        message = UserMsg(
            uid=first_uid + index,
            ids=ids_to_bytes(prompt),
            sampling=sampling,
            adapter=adapter,
            namespace=adapter.namespace("") if adapter else "",
        )
        arrivals[turns[index] if turns else 0].append(message)
    outbox = outbox or ListOutbox()
    inbox = ListInbox(arrivals, more=lambda: [] if scheduler.runnable else None)
    run(scheduler, engine, inbox, outbox, overlap=overlap)
    check_books(scheduler)
    uids = range(first_uid, first_uid + len(requests))
    ended = [event.uid for event in outbox.events if isinstance(event, Finished)]
    assert sorted(ended) == list(uids), outbox.events
    return [[e.id for e in outbox.events if isinstance(e, Token) and e.uid == uid] for uid in uids]


def make_scheduler(engine: Engine, **options: Any) -> Scheduler:
    settings: dict[str, Any] = {
        "groups": () if "num_pages" in options else engine.memory.groups,
        "page_size": engine.page_size,
        "max_seq_len": engine.max_seq_len,
        "vocab_size": VOCAB,
        "eos_ids": frozenset[int](),
        "max_prefill_tokens": engine.max_prefill_tokens,
        "max_running": engine.max_running,
    }
    return Scheduler(SchedulerConfig(**(settings | options)))


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 120, (count,), generator=generator).tolist()
    return [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in lengths]
