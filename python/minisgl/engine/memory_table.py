"""Formats a `MemoryPlan` as the table that the log and `--dry-run` show."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minisgl.core.groups import CacheGroup
from minisgl.utils.text import counted, size_of

if TYPE_CHECKING:
    from minisgl.engine.memory import MemoryPlan


def memory_table(plan: MemoryPlan) -> str:
    """Return the table, one line for each use of the memory."""
    groups = zip(plan.groups, plan.group_page_bytes, strict=True)
    rows = [
        ("free before loading", size_of(plan.free_bytes), ""),
        ("weights", size_of(plan.weight_bytes), ""),
        ("activations, at most", size_of(plan.activation_bytes), ""),
        *(_pool_row(plan, group, page_bytes) for group, page_bytes in groups),
        *_limit_rows(plan),
        ("tokens that fit", f"{plan.num_tokens:,}", ""),
        ("requests at full length", f"{plan.num_requests:,}", f"of {plan.max_seq_len:,} tokens"),
    ]
    return "\n".join(f"  {name:<24}{value:>12}  {note}".rstrip() for name, value, note in rows)


def _limit_rows(plan: MemoryPlan) -> list[tuple[str, str, str]]:
    if plan.kv_limit_bytes is None:
        return []
    note = "a quarter of the machine's memory, unless --memory-ratio or --num-pages says more"
    return [("KV cache, at most", size_of(plan.kv_limit_bytes), note)]


def _pool_row(plan: MemoryPlan, group: CacheGroup, page_bytes: int) -> tuple[str, str, str]:
    name = "KV pool" if len(plan.groups) == 1 else f"KV pool, {group.kind}"
    pages = f"{group.num_pages:,} page{'' if group.num_pages == 1 else 's'}"
    if group.kind == "state":
        note = f"{pages}, a state every {counted(group.interval, 'token')}"
    else:
        per_token = size_of(page_bytes // plan.page_size)
        note = f"{pages} of {counted(plan.page_size, 'token')} ({per_token} a token)"
    if group.kind == "window":
        note += f", window {group.window:,}"
    return name, size_of(group.num_pages * page_bytes), note
