"""How many prompt tokens a step may have: docs/decisions/0009 has why, and what it does.

A chunk of prompts holds up each decoding request for a step, and brings each waiting one nearer to
its start. The large chunk is for when the latter are at least as many. It also is if it starts
many, and such stalls stay rare until all that can start now have started.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from minisgl.core.req import Req

STALLED_PER_START = 16
STALLED_SHARE = 0.009
"""Of tokens, that may wait for a large chunk: the 99th percentile of what lies between two tokens
is then that of all others, and a tenth is left for prompts that are still to come."""
LIKELY_OUTPUTS = 256  # tokens; many allow as many as the context holds, and few give them


def prefill_budget(
    decoding: Sequence[Req],
    coming: Iterable[tuple[Req, int]],
    *,
    num_waiting: int,
    large: int,
    small: int,
) -> int:
    """`large` or `small`.

    num_waiting: requests that have not started, all of them. coming: those that can start now, in
    order, each with the tokens that are to be computed first; not looked at where counts decide.
    """
    if len(decoding) <= num_waiting:
        return large
    requests, prompts = [*decoding], list[int]()
    for req, num_tokens in coming:
        requests.append(req)
        prompts.append(num_tokens)
    num_starts, num_stalls = large_chunks(prompts, large, len(decoding))
    if len(decoding) > STALLED_PER_START * num_starts:
        return small
    num_stalls += sum(req.num_stalls for req in requests)  # retracted ones have had some
    is_rare = num_stalls <= STALLED_SHARE * sum(map(_likely_outputs, requests))
    return large if is_rare else small


def large_chunks(prompts: Sequence[int], large: int, num_decoding: int) -> tuple[int, int]:
    """Prompts of so many tokens in large chunks alone: how many of them the first chunk starts, and
    how often all chunks together hold up a request, those that they start included. The last
    counts in full, though it may turn out no larger than a small one."""
    end = num_starts = num_stalls = 0
    for index, num_tokens in enumerate(prompts):
        # Chunks that begin with this prompt's tokens hold up whom those before them started.
        num_chunks = -(-(end + num_tokens) // large) - -(-end // large)
        num_stalls += num_chunks * (num_decoding + index)
        end += num_tokens
        num_starts += end <= large
    return num_starts, num_stalls


def _likely_outputs(req: Req) -> int:
    """Tokens that a request gives in all, as far as one can tell before it does."""
    return min(req.max_len - req.num_prompt, max(LIKELY_OUTPUTS, len(req.output)))
