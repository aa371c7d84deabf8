"""Serves checkpoints in this process: `python fresh_memory.py FOLDER ...` prints their tokens.

With FILL_FRESH_MEMORY=1, torch fills new tensors with NaN and the largest integers.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

from minisgl.core import SamplingParams, Token
from minisgl.engine import Engine, EngineConfig
from minisgl.message import UserMsg, ids_to_bytes
from minisgl.scheduler import Scheduler, SchedulerConfig, run
from minisgl_bench.fakes import ListInbox, ListOutbox

LENGTHS = (1, 30, 75, 140)
NUM_TOKENS = 8
PAGE_SIZE, CHUNK, MAX_RUNNING = 16, 48, 4


def tokens_of(folder: Path) -> list[tuple[int, int, float]]:
    """Return (request, token, log-probability) of prompts with common first tokens, in chunks and
    beside decodes, on the CPU's kernels."""
    config = EngineConfig(
        model=str(folder), device="cpu", attn="cpu", num_pages=64, page_size=PAGE_SIZE,
        max_prefill_length=CHUNK, max_running_requests=MAX_RUNNING,
    )  # fmt: skip
    engine = Engine(config)
    try:
        vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
        scheduler = Scheduler(
            SchedulerConfig(
                groups=engine.memory.groups, page_size=PAGE_SIZE, max_seq_len=engine.max_seq_len,
                vocab_size=vocab_size, eos_ids=frozenset(), max_prefill_tokens=CHUNK,
                max_running=MAX_RUNNING,
            )
        )  # fmt: skip
        sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, logprobs=True)
        messages = [
            UserMsg(
                uid=length,
                ids=ids_to_bytes([index * 7 % vocab_size for index in range(length)]),
                sampling=sampling,
            )
            for length in LENGTHS
        ]
        outbox = ListOutbox()
        # The last request arrives when the others have left used pages.
        arrivals = [messages[:-1], *([] for _ in range(6)), messages[-1:]]
        run(
            scheduler,
            engine,
            ListInbox(arrivals, lambda: [] if scheduler.runnable else None),
            outbox,
        )
        tokens = [event for event in outbox.events if isinstance(event, Token)]
        assert len(tokens) == len(LENGTHS) * NUM_TOKENS, outbox.events
        return [(token.uid, token.id, token.logprob or 0.0) for token in tokens]
    finally:
        engine.close()


if __name__ == "__main__":
    if os.environ.get("FILL_FRESH_MEMORY"):
        torch.use_deterministic_algorithms(True, warn_only=True)
        assert torch.empty(2).isnan().all()
    print(json.dumps({folder: tokens_of(Path(folder)) for folder in sys.argv[1:]}))
