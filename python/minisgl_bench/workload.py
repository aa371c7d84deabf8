"""The workloads of a server: sessions of turns, with or without arrival times.

A session is one client, whose turns follow one another, each after the answer to the turn before. A
plain request is a session of one turn. Prompts are token ids.

Sources: Poisson arrivals as in Orca and vLLM; the 256-request random workload is the field's (the
nano-vllm README); trace formats are Mooncake's (Qin et al., FAST 2025) and Qwen-Bailian's (Wang et
al., "KVCache Cache in the Wild", ATC 2025).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from minisgl.errors import ConfigError
from minisgl_bench.sessions import Ids, Session, Turn

FIRST_ID = 100  # in many vocabularies smaller ids are special tokens or raw bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Sessions. notes: their settings and the number of clipped ones, for the result."""

    sessions: list[Session]
    notes: dict[str, Any] = field(default_factory=dict)

    def arriving(self, times: Sequence[float]) -> Workload:
        """Return the same sessions at these times."""
        sessions = [
            Session(turns=session.turns, at_s=float(at))
            for session, at in zip(self.sessions, times, strict=True)
        ]
        return Workload(sessions=sessions, notes=self.notes)


def at_once(prompts: Iterable[npt.ArrayLike], outputs: Iterable[int]) -> list[Session]:
    """Return requests that all arrive at the start. prompts: token ids. outputs: max_tokens."""
    return [
        Session(turns=(Turn(ids=np.asarray(ids, np.int32), max_tokens=output),), at_s=0.0)
        for ids, output in zip(prompts, outputs, strict=True)
    ]


def poisson_times(count: int, rate_per_s: float, seed: int) -> list[float]:
    """Return the arrival times of an open-loop Poisson process, the first at 0."""
    gaps = np.random.default_rng(seed).exponential(1 / rate_per_s, count)
    gaps[0] = 0.0
    return [float(at) for at in gaps.cumsum()]


def random_requests(
    count: int, inputs: tuple[int, int], outputs: tuple[int, int], vocab_size: int, seed: int
) -> Workload:
    """Return unrelated prompts with uniform lengths, both bounds included."""
    rng = np.random.default_rng(seed)
    sessions = []
    for _ in range(count):
        num_input, num_output = (
            int(rng.integers(*span, endpoint=True)) for span in (inputs, outputs)
        )
        turn = Turn(ids=_random_ids(rng, num_input, vocab_size), max_tokens=num_output)
        sessions.append(Session(turns=(turn,)))
    notes = {"kind": "random", "inputs": inputs, "outputs": outputs, "seed": seed}
    return Workload(sessions=sessions, notes=notes)


def shared_prefix(
    count: int,
    groups: int,
    prefix: int,
    inputs: tuple[int, int],
    outputs: tuple[int, int],
    vocab_size: int,
    seed: int,
) -> Workload:
    """Return prompts with `groups` prefixes of `prefix` tokens in turn; `inputs` tokens follow."""
    rng = np.random.default_rng(seed)
    prefixes = [_random_ids(rng, prefix, vocab_size) for _ in range(groups)]
    base = random_requests(count, inputs, outputs, vocab_size, seed + 1)
    sessions = [
        Session(
            turns=(
                Turn(
                    ids=np.concatenate([prefixes[index % groups], session.turns[0].ids]),
                    max_tokens=session.turns[0].max_tokens,
                ),
            )
        )
        for index, session in enumerate(base.sessions)
    ]
    notes = {**base.notes, "kind": "shared-prefix", "groups": groups, "prefix": prefix}
    return Workload(sessions=sessions, notes=notes)


def multi_turn(
    count: int,
    turns: int,
    inputs: tuple[int, int],
    outputs: tuple[int, int],
    think_s: float,
    vocab_size: int,
    seed: int,
) -> Workload:
    """Return conversations. Each turn sends all earlier messages and answers."""
    base = random_requests(count * turns, inputs, outputs, vocab_size, seed)
    flat = [session.turns[0] for session in base.sessions]
    sessions = []
    for start in range(0, len(flat), turns):
        first, *rest = flat[start : start + turns]
        later = [Turn(ids=turn.ids, max_tokens=turn.max_tokens, think_s=think_s) for turn in rest]
        sessions.append(Session(turns=(first, *later)))
    notes = {**base.notes, "kind": "multi-turn", "turns": turns, "think_s": think_s}
    return Workload(sessions=sessions, notes=notes)


def trace(
    path: Path,
    *,
    vocab_size: int,
    scale: float = 1.0,
    max_len: int | None = None,
    speed: float = 1.0,
    start: int = 0,
    count: int | None = None,
    seed: int = 0,
) -> Workload:
    """Return requests `start` to `start + count` of a trace, as token ids with its prefixes.

    Mooncake has blocks of 512 tokens and milliseconds; Qwen-Bailian, which has a `chat_id`, blocks
    of 16 and seconds. `scale` multiplies all lengths. A request that is then longer than `max_len`
    tokens loses the end of its prompt. `speed` divides the times. Another `seed` gives other tokens
    with the same common prefixes. Raises ConfigError.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the trace cannot be read: {error}") from error
    lines = lines[start : None if count is None else start + count]
    if not lines:
        raise ConfigError(f"{path} has no requests from number {start} on")
    sessions, num_clipped = [], 0
    first_at: float | None = None
    for number, line in enumerate(lines, start + 1):
        try:
            row = json.loads(line)
            bailian = "chat_id" in row
            at = float(row["timestamp"]) / (1 if bailian else 1000)
            num_input = max(round(row["input_length"] * scale), 1)
            num_output = max(round(row["output_length"] * scale), 1)
            ids = _block_ids(row["hash_ids"], (16 if bailian else 512) * scale, vocab_size, seed)
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path}, line {number}: expected an object with timestamp, input_length, "
                f"output_length and hash_ids, but {type(error).__name__}: {error}"
            ) from error
        first_at = at if first_at is None else first_at
        if max_len is not None and num_input + num_output > max_len:
            num_clipped += 1
            num_output = min(num_output, max_len // 2)
            num_input = min(num_input, max_len - num_output)
        turn = Turn(ids=ids[:num_input], max_tokens=num_output)
        sessions.append(Session(turns=(turn,), at_s=(at - first_at) / speed))
    notes = {
        "kind": "trace",
        "file": path.name,
        "start": start,
        "scale": scale,
        "speed": speed,
        "max_len": max_len,
        "num_clipped": num_clipped,
        "reusable_share": round(reusable_share(sessions), 4),
    }
    return Workload(sessions=sessions, notes=notes)


def reusable_share(sessions: Sequence[Session]) -> float:
    """Return the share of prompt tokens that an unlimited prefix cache of 16-token pages has."""
    seen: set[bytes] = set()
    hits = total = 0
    for session in sessions:
        ids = session.turns[0].ids
        total += len(ids)
        data, prefix = ids.tobytes(), b""
        for end in range(64, len(data) + 1, 64):
            prefix = blake2b(prefix + data[end - 64 : end], digest_size=16).digest()
            hits += 16 * (prefix in seen)
            seen.add(prefix)
    return hits / max(total, 1)


def _block_ids(hash_ids: Sequence[int], block_tokens: float, vocab_size: int, seed: int) -> Ids:
    """Return the tokens of blocks. Equal hash ids at the same place give equal tokens."""
    parts = []
    for index, hash_id in enumerate(hash_ids):
        size = round((index + 1) * block_tokens) - round(index * block_tokens)
        parts.append(_random_ids(np.random.default_rng((seed, hash_id)), size, vocab_size))
    return np.concatenate(parts) if parts else np.empty(0, np.int32)


def _random_ids(rng: np.random.Generator, count: int, vocab_size: int) -> Ids:
    if vocab_size <= FIRST_ID:
        raise ConfigError(f"the vocabulary must be larger than {FIRST_ID}, got {vocab_size}")
    return rng.integers(FIRST_ID, vocab_size, count, dtype=np.int32)
