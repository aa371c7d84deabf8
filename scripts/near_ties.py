"""Whether answers in a format of few bits differ only by near ties, as `minisgl selfcheck` defines.

Prompts and single tokens have other kernels, so an answer that another engine goes on with may have
other last bits: its ids may differ from an undisturbed answer's where two tokens score alike.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Final

import httpx
import numpy as np

VOCABULARY: Final = 1400
"""Ids of the built-in model that are no special tokens are below it."""
LENGTHS: Final = (1, 17, 64, 97, 330, 900)
"""The lengths of the prompts, in tokens; each is asked greedily and with a seed."""

_DRAW: Final = np.random.default_rng(0)
Asks = dict[str, tuple[str, dict[str, Any]]]
ASKS: Final[Asks] = {
    f"{'seeded' if number % 2 else 'greedy'} behind {length}": (
        "/generate",
        {
            "input_ids": _DRAW.integers(VOCABULARY, size=length).tolist(), "max_tokens": 200,
            "temperature": number % 2, "seed": number, "top_k": 0, "top_p": 1.0, "min_p": 0.0,
            "ignore_eos": True, "logprobs": True, "stream": True,
        },
    )
    for number, length in enumerate(length for length in LENGTHS for _ in range(2))
}  # fmt: skip


def longer(num_tokens: int) -> Asks:
    """Return the requests with answers of this length."""
    asks = ASKS.items()
    return {name: (path, {**body, "max_tokens": num_tokens}) for name, (path, body) in asks}


class NearTies:
    """Compares answers with undisturbed ones of the server at `url`. Mutable: it counts.

    whole: (ids, log-probabilities) by the name of the request.
    """

    def __init__(
        self, url: str, dtype: str, whole: Mapping[str, tuple[Sequence[int], Sequence[float]]]
    ) -> None:
        from minisgl_bench.comparer import ROUNDING, Comparer, Condition  # imports torch

        self._url, self._names = url, list(whole)
        reference: list[Any] = [
            SimpleNamespace(token_ids=ids, logprobs=logprobs) for ids, logprobs in whole.values()
        ]
        self._comparer = Comparer(reference, ROUNDING[dtype], self._scores)
        self.seen = Condition(name=dtype)

    def difference(self, name: str, ids: Sequence[int], logprobs: Sequence[float]) -> str:
        """Return what differs, or "" if nothing does, or a near tie."""
        answer: Any = SimpleNamespace(token_ids=ids, logprobs=logprobs)
        num_before = len(self.seen.differences)
        try:
            self._comparer.compare(self.seen, [self._names.index(name)], [answer])
        except ValueError:
            return f"{len(ids)} ids"
        return "".join(map(str, self.seen.differences[num_before:]))

    def _scores(
        self, request: int, answer: Sequence[int], tokens: Sequence[int]
    ) -> dict[int, float]:
        """Return the scores of `tokens` behind the first tokens of an answer, each computed alone
        in an empty cache."""
        import torch

        from minisgl.kernel.sampling import gumbel_noise

        asked = ASKS[self._names[request]][1]
        scores = {}
        for token in tokens:
            ids = [*asked["input_ids"], *answer, token]
            body = {"input_ids": ids, "max_tokens": 0, "prompt_logprobs": 0, "temperature": 0}
            body |= {"cache_salt": uuid.uuid4().hex}
            while (said := self._post(body)).status_code == 503:  # the engine starts
                time.sleep(0.2)
            scores[token] = said.json()["prompt_logprobs"][-1]["logprob"]
        if not asked["temperature"]:
            return scores
        at = torch.tensor([asked["seed"]]), torch.tensor([len(answer)])
        (noise,) = gumbel_noise(*at, max(tokens) + 1)
        return {token: score + float(noise[token]) for token, score in scores.items()}

    def _post(self, body: dict[str, Any]) -> httpx.Response:
        return httpx.post(f"{self._url}/generate", json=body, timeout=200)
