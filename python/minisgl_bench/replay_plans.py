"""Plans a recording's steps again: the real scheduler over a fake device, without a model.

A plan is a function of the messages, the settings and the tokens. A recording (`--record`) has the
turn of each message, the settings, and digests of the tokens. So the scheduler plans the same steps
again, in milliseconds, and each plan is compared with the recorded one. The device checks at each
step that the KV cache has the right tokens.

A block's tokens are drawn from its digest, so equal prefixes are equal here, too. Pages are whole
blocks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from minisgl.core import SamplingParams
from minisgl.core.adapters import Adapter
from minisgl.core.plan import Plan
from minisgl.core.req import IdArray, Mask
from minisgl.core.step_times import StepTimes
from minisgl.errors import ConfigError, EngineError
from minisgl.message import (
    AbortMsg,
    CompiledMsg,
    ExitMsg,
    KeyShare,
    SchedulerMsg,
    StopMsg,
    UserMsg,
    ids_to_bytes,
)
from minisgl.scheduler import Scheduler, SchedulerConfig, run
from minisgl.scheduler.loop import Meter
from minisgl.utils.text import counted
from minisgl_bench.fakes import FakeExecutor, ListOutbox
from minisgl_bench.recording import records_of
from minisgl_gateway.watch.recorder import BLOCK_TOKENS
from minisgl_gateway.watch.xray import MAX_ROWS, Step
from minisgl_zoo.cache_groups.groups import GROUPS

VOCAB_SIZE: Final = 1 << 24  # large, so that hardly any drawn token is a stop token

Rows = tuple[int, int, list[int]]
"""Of a step: decodes, prompt tokens, and the first rows as [uid, tokens, ...]."""


class Recording:
    """A recording's steps, and the messages, settings and tokens that determine them."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError if the file is no recording, or has lost its start."""
        messages: list[tuple[str, dict[str, Any]]] = []
        ends: dict[int, dict[str, Any]] = {}
        stopped: set[int] = set()  # ended by a message, not by a token
        self.steps: dict[int, Rows] = {}
        settings: dict[str, Any] | None = None
        for record in records_of(path):
            [(kind, fields)] = record.items()
            if kind == "config":
                settings = fields
            elif settings is None:
                raise ConfigError(
                    f"{path} has no start: its ring has overwritten it, or an older version wrote "
                    "it. Plans can be made again from the first step only"
                )
            elif kind == "frame":
                before: list[int] = []
                for step in map(Step._make, fields["steps"]):
                    before = before if step.rows is None else step.rows
                    self.steps[step.step] = step.decodes, step.prompt_tokens, before
            elif kind == "end":
                ends[fields["uid"]] = fields
            else:
                if kind == "leave" and fields["uid"] not in ends:
                    stopped.add(fields["uid"])
                messages.append((kind, fields))
        if settings is None or not self.steps:
            raise ConfigError(f"{path} has no step")
        self.overlap: bool = settings.pop("overlap")
        self.config = _config(settings)
        self.tokens: dict[int, IdArray] = {}
        self.turns: dict[int, list[SchedulerMsg]] = {}
        for kind, fields in messages:
            message: SchedulerMsg
            if kind == "arrival":
                end = ends.get(fields["uid"], {})
                message = self._user_message(fields, end, stopped)
                if end.get("is_refused"):
                    continue  # the reason may be in what is not recorded, such as an unknown id
            elif kind == "compiled":
                message = CompiledMsg(uid=fields["uid"])
            elif fields["num_tokens"] is None:
                message = AbortMsg(uid=fields["uid"])
            else:
                message = StopMsg(uid=fields["uid"], num_tokens=fields["num_tokens"])
            self.turns.setdefault(fields["turn"], []).append(message)

    def _user_message(
        self, arrival: dict[str, Any], end: dict[str, Any], stopped: set[int]
    ) -> UserMsg:
        uid, num_prompt = arrival["uid"], arrival["input_length"]
        hashes = end.get("all_hash_ids", arrival["hash_ids"])
        length = num_prompt + end["output_length"] if "all_hash_ids" in end else num_prompt
        num_known = num_prompt + arrival.get("num_output", 0)
        block_tokens = arrival.get("block_tokens", BLOCK_TOKENS)
        blocks = [
            np.random.default_rng(one).integers(1, VOCAB_SIZE, block_tokens) for one in hashes
        ]
        tokens = np.concatenate(blocks)[:length].astype(np.int32)
        # Of a request that has not ended, the output is not known.
        tokens = np.pad(tokens, (0, max(num_known - length, 0)))
        self.tokens[uid] = tokens
        ends_by_token = end.get("reason") == "stop" and uid not in stopped
        sampling = SamplingParams(
            max_tokens=arrival["max_tokens"],
            ignore_eos=True,
            stop_token_ids=(int(tokens[-1]),) if ends_by_token else (),
            prompt_logprobs=0 if arrival["scored"] else None,
            pooling=arrival.get("pooling", ""),
        )
        return UserMsg(
            uid=uid, ids=ids_to_bytes(tokens[:num_prompt].tolist()), sampling=sampling,
            priority=arrival["priority"], share=KeyShare(*arrival["share"]),
            grammar="recorded" if arrival.get("has_grammar") else "",
            output=ids_to_bytes(tokens[num_prompt:num_known].tolist()) or None,
            adapter=Adapter(digest, "") if (digest := arrival.get("adapter")) else None,
        )  # fmt: skip


def _config(fields: dict[str, Any]) -> SchedulerConfig:
    times = fields["step_times"]
    return SchedulerConfig(
        **fields
        | {
            "vocab_size": VOCAB_SIZE,
            "eos_ids": frozenset(),
            "groups": tuple(
                msgspec.convert(group, GROUPS[group["kind"]]) for group in fields["groups"]
            ),
            "step_times": times and msgspec.convert(times, StepTimes),
        }
    )


class _RecordedDevice(FakeExecutor):
    """Samples the recorded tokens, and compares the tokens that a row reads with them."""

    def __init__(self, recording: Recording) -> None:
        config = recording.config
        super().__init__(
            page_size=config.page_size,
            max_running=config.max_running,
            vocab_size=VOCAB_SIZE,
            groups=config.cache_groups,
        )
        self._tokens = recording.tokens

    def _sample(
        self, plan: Plan, states: dict[tuple[int, int], int], masks: dict[int, Mask]
    ) -> list[int]:
        next_ids = []
        for row in plan.sample_rows:
            uid, table_idx, end = plan.uids[row], plan.table_idxs[row], plan.ends[row]
            tokens = self._tokens[uid]
            for index, group in enumerate(self.groups):
                if group.kind in ("full", "window"):
                    start = max(end - group.window, 0) if group.kind == "window" else 0
                    held = self._read(index, table_idx, start, min(end, len(tokens)))
                    if not np.array_equal(held, tokens[start:end]):
                        raise EngineError(
                            f"step {plan.step}: the KV cache of request {uid} holds other tokens "
                            f"than its own before position {end}"
                        )
            token = int(tokens[end]) if end < len(tokens) else 0  # discarded: the request has ended
            self._last_token[table_idx] = token
            next_ids.append(token)
        return next_ids


class _Inbox:
    """Returns the messages of each turn, then `ExitMsg`. Mutable: it counts the turns."""

    def __init__(self, recording: Recording, scheduler: Scheduler) -> None:
        self._turns, self._scheduler = recording.turns, scheduler
        self._turn = -1
        self._last_turn = max(recording.turns, default=-1)
        self._last_step = max(recording.steps)

    def take(self, timeout_s: float) -> Sequence[SchedulerMsg]:
        self._turn += 1
        is_past = self._scheduler.stats.num_steps > self._last_step
        if self._turn > self._last_turn and (is_past or not self._scheduler.runnable):
            return [ExitMsg()]
        return self._turns.get(self._turn, [])


class _Comparer(Meter):
    """Compares each plan with the recorded one. Mutable: it counts them."""

    def __init__(self, steps: dict[int, Rows]) -> None:
        self._steps = steps
        self.num_same = self.num_unknown = 0

    def launched(self, plan: Plan) -> None:
        lengths = np.subtract(plan.ends, plan.starts)[:MAX_ROWS].tolist()
        rows = [value for pair in zip(plan.uids, lengths, strict=False) for value in pair]
        step = plan.num_decodes, plan.num_tokens - plan.num_decodes, rows
        recorded = self._steps.get(plan.step)
        if recorded is None:
            self.num_unknown += 1
        elif recorded == step:
            self.num_same += 1
        else:
            raise EngineError(
                f"step {plan.step} differs after {counted(self.num_same, 'equal step')}: recorded "
                f"{_said(recorded)}; now {_said(step)}"
            )


def _said(step: Rows) -> str:
    decodes, prompt, rows = step
    said = ", ".join(f"{uid}: {tokens}" for uid, tokens in zip(rows[::2], rows[1::2], strict=True))
    return f"{decodes} decodes, {counted(prompt, 'prompt token')} (tokens by request: {said})"


def replay_plans(path: Path) -> str:
    """Plan a recording's steps again. Returns a sentence about the result.

    Raises ConfigError if the recording cannot be planned again; EngineError at the first plan that
    differs, or that has a wrong KV cache.
    """
    recording = Recording(path)
    comparer = _Comparer(recording.steps)
    began = time.perf_counter()
    scheduler = Scheduler(recording.config)
    run(
        scheduler,
        _RecordedDevice(recording),
        _Inbox(recording, scheduler),
        ListOutbox(),
        overlap=recording.overlap,
        meter=comparer,
    )
    seconds = time.perf_counter() - began
    unknown = comparer.num_unknown
    more = (
        f"; {counted(unknown, 'step')} more that the recording has no room for" if unknown else ""
    )
    return (
        f"planned again in {seconds:.1f} s: {counted(comparer.num_same, 'step')} of "
        f"{counted(len(recording.tokens), 'request')}, all as recorded, each with the right tokens "
        f"in the KV cache{more}"
    )
