"""Checks of log-probabilities."""

from __future__ import annotations

import numpy as np
import torch

from helpers.engine_runs import Reference, Request
from minisgl.core import Token
from minisgl_bench.fakes import ListOutbox

TOLERANCE = 1e-4  # float32 computations in another order


def check_logprobs(reference: Reference, requests: list[Request], outbox: ListOutbox) -> None:
    """Compare with NumPy's log-softmax of the reference's logits before temperature and filters."""
    for uid, (prompt, sampling) in enumerate(requests):
        tokens = [event for event in outbox.events if isinstance(event, Token) and event.uid == uid]
        assert len(tokens) == sampling.max_tokens
        if not sampling.logprobs:
            assert all(token.logprob is None and not token.top for token in tokens)
            continue
        ids = [token.id for token in tokens]
        with torch.inference_mode():
            logits_TV = reference[1](torch.tensor([prompt + ids])).logits[0].double().numpy()
        logits_TV = logits_TV[len(prompt) - 1 : -1]
        largest_T1 = logits_TV.max(-1, keepdims=True)
        log_sum_T1 = largest_T1 + np.log(np.exp(logits_TV - largest_T1).sum(-1, keepdims=True))
        want = (logits_TV - log_sum_T1)[np.arange(len(ids)), ids]
        got = np.array([token.logprob for token in tokens])
        assert np.abs(got - want).max() < TOLERANCE
        logprobs_TV = logits_TV - log_sum_T1
        for token, logprobs_V in zip(tokens, logprobs_TV, strict=True):
            assert len(token.top) == sampling.top_logprobs
            at = [index for index, _ in token.top]
            values = np.array([logprob for _, logprob in token.top])
            assert np.abs(values - logprobs_V[at]).max(initial=0) < TOLERANCE
            assert np.abs(values - np.sort(logprobs_V)[::-1][: len(at)]).max(initial=0) < TOLERANCE
