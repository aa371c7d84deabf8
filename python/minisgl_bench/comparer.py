"""Compares answers with those of a reference, for `minisgl_bench.selfcheck`.

Token ids must be equal. Log-probabilities must be equal up to the rounding of the number format. If
two answers differ first in tokens whose scores differ by less than the rounding, this is a near
tie. The score of a token of a seeded request includes its noise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from minisgl.llm.output import RequestOutput

ROUNDING: Final = {"float32": 1e-3, "float16": 0.02, "bfloat16": 0.15}
"""Number format -> how much another order of summation may change a score, in nats. In bfloat16 a
logit of 16 to 32 has steps of 0.125. The largest change seen with the built-in model is 0.04."""
ROUNDING_8_BIT: Final = 0.05
"""The least rounding with a KV cache of 8 bits: a key that differs in its last bit may be stored as
the next number. The largest change seen in float32 is 0.018 with int8 and 0.052 with fp8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Where an answer differs from the reference.

    index: of the output token. gap: how much higher the reference scores its own token, in nats;
    None if the ids are equal and only the log-probability differs, by `drift`.
    """

    request: int
    index: int
    token: int
    expected: int
    gap: float | None
    drift: float = 0.0

    def __str__(self) -> str:
        where = f"request {self.request}, output token {self.index}"
        if self.gap is None:
            return f"{where}: the log-probability of {self.token} differs by {self.drift:.3g}"
        return (
            f"{where}: {self.token} instead of {self.expected}, which the reference prefers by "
            f"{self.gap:.3g}"
        )


@dataclass(slots=True, kw_only=True)
class Condition:
    """The comparisons under one condition. Mutable: a `Comparer` adds to it.

    note: a number that shows that the condition took place. failure: the error of a request, which
    ended the condition.
    """

    name: str
    note: str = ""
    num_requests: int = 0
    num_tokens: int = 0
    max_drift: float = 0.0
    ties: list[Difference] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    failure: str = ""

    @property
    def differs(self) -> bool:
        return bool(self.differences or self.failure)

    def __str__(self) -> str:
        if self.failure:
            return f"{self.name:<24} {'FAILED':<10} {self.failure}"
        ties = f", {len(self.ties)} near ties" if self.ties else ""
        verdict = "DIFFERENT" if self.differences else "same"
        line = (
            f"{self.name:<24} {verdict:<10} {self.num_requests} answers, {self.num_tokens} tokens, "
            f"log-probabilities within {self.max_drift:.2g}{ties}{self.note}"
        )
        return "\n".join([line, *(f"    {each}" for each in self.differences[:1])])


class Comparer:
    """Fills conditions. Stateless."""

    def __init__(
        self,
        reference: Sequence[RequestOutput],
        rounding: float,
        scores: Callable[[int, Sequence[int], Sequence[int]], Mapping[int, float]],
    ) -> None:
        """reference: the answer of each request. rounding: in nats. scores: called with a request,
        the first tokens of its answer, and candidates for the next token; returns the reference's
        score of each candidate."""
        self._reference = reference
        self._rounding = rounding
        self._scores = scores

    def compare(
        self, condition: Condition, requests: Sequence[int], outputs: Sequence[RequestOutput]
    ) -> None:
        """Compare the outputs of these requests with the reference."""
        for request, output in zip(requests, outputs, strict=True):
            self._compare_one(condition, request, output)

    def _compare_one(self, condition: Condition, request: int, output: RequestOutput) -> None:
        reference = self._reference[request]
        ids, expected = output.token_ids, reference.token_ids
        pairs = enumerate(zip(ids, expected, strict=True))
        num_same = next((i for i, (a, b) in pairs if a != b), len(expected))
        condition.num_requests += 1
        condition.num_tokens += num_same
        for i in range(num_same):
            drift = abs((output.logprobs or [])[i] - (reference.logprobs or [])[i])
            condition.max_drift = max(condition.max_drift, drift)
            if not drift <= 2 * self._rounding:
                condition.differences.append(
                    Difference(
                        request=request,
                        index=i,
                        token=ids[i],
                        expected=ids[i],
                        gap=None,
                        drift=drift,
                    )
                )
                return
        if num_same == len(expected):
            return
        token, preferred = ids[num_same], expected[num_same]
        scores = self._scores(request, ids[:num_same], (token, preferred))
        gap = abs(scores[preferred] - scores[token])
        found = condition.ties if gap <= 2 * self._rounding else condition.differences
        found.append(
            Difference(request=request, index=num_same, token=token, expected=preferred, gap=gap)
        )
