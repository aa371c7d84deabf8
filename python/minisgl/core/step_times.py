"""A model of the time that a step takes, measured at start-up.

The scheduler plans with it to keep the stall bound. The model reads no clock, so all ranks plan the
same steps.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING

from minisgl.core.image import bytes_within

if TYPE_CHECKING:
    from minisgl.core.plan import Plan

USEFUL_RATE = 0.95
"""The default chunk is the smallest that reaches this share of the best prefill rate. Decision 0009
says what smaller and larger chunks cost."""

PLANNED_SHARE = 0.9
"""The part of the stall bound that the predicted time may use. The model errs by up to a tenth of
the bound, by the recorded steps of 0.6B on an H100 (decision 0009)."""

CHUNK_MULTIPLE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """The model of a step's time.

    prompt_us: (tokens, microseconds) of steps with one prompt and nothing cached; both ascend.
    decode_us, row_us: a decode step of one row, and what each further row adds.
    gap_us: what a short decode step takes longer if the host launches it when the one before has
        ended, instead of while it runs.
    context_ns: what one token of a decode row's context adds.
    resume_us: what the first chunk behind cached tokens adds to a step, whatever its size.
    attend_ns: what one pair of a prompt token and a cached token before the chunk adds.
    image_ns: what a byte of an image's pixels adds to a step in which the vision tower runs for it,
        at the largest size that was measured. A larger one's byte takes longer.
    padded_tokens: a step with prompts of up to this many tokens is replayed from a CUDA graph. It
        is padded to the next size of `prompt_us`, and takes as long. 0: no step is padded.
    """

    prompt_us: tuple[tuple[int, float], ...]
    decode_us: float = 0.0
    row_us: float = 0.0
    gap_us: float = 0.0
    context_ns: float = 0.0
    resume_us: float = 0.0
    attend_ns: float = 0.0
    image_ns: float = 0.0
    padded_tokens: int = 0

    def plan_s(self, plan: Plan) -> float:
        """Return the seconds that the step of `plan` takes."""
        decodes = plan.num_decodes
        chunks = zip(plan.starts[decodes:], plan.ends[decodes:], strict=True)
        pairs = sum((end - start) * start for start, end in chunks)
        return self.step_s(
            decodes, sum(plan.ends[:decodes]), plan.num_tokens - decodes, pairs=pairs
        )

    def images_s(self, plan: Plan) -> float:
        """Return the seconds that the step of `plan` takes longer if the vision tower runs for each
        image of which it computes a place."""
        spans = ((each, plan.starts[each.row], plan.ends[each.row]) for each in plan.images)
        num_bytes = sum(bytes_within(each.images, start, end) for each, start, end in spans)
        return self.image_ns * num_bytes * 1e-9

    def step_s(
        self, decode_rows: int, context: int = 0, prompt_tokens: int = 0, pairs: int = 0
    ) -> float:
        """Return the seconds that a step takes.

        decode_rows, context: the number of decode rows, and the tokens of all their contexts.
        prompt_tokens: the tokens of the prompt chunks. pairs: the number of pairs of one of these
        tokens and a token before its chunk.
        """
        us = self.decode_us + self.row_us * (decode_rows - 1) if decode_rows else 0.0
        if prompt_tokens:
            # One launch multiplies all rows of the step with the weights.
            us = max(self._prompt_us(decode_rows + prompt_tokens), us)
        if pairs:
            us += self.resume_us
        ns = self.context_ns * context + self.attend_ns * pairs
        return us * 1e-6 + ns * 1e-9

    def rate(self, num_tokens: int) -> float:
        """Return the prompt tokens per second of steps with `num_tokens` each."""
        return num_tokens / self.step_s(0, 0, num_tokens)

    @property
    def default_chunk(self) -> int:
        """The smallest chunk that reaches `USEFUL_RATE` of the best rate: a measured size, or a
        multiple of `CHUNK_MULTIPLE`."""
        sizes = [size for size, _ in self.prompt_us]
        least = USEFUL_RATE * max(map(self.rate, sizes))
        between = range(CHUNK_MULTIPLE, sizes[-1], CHUNK_MULTIPLE)
        chunks: list[int] = sorted([*sizes, *between])
        return chunks[[self.rate(size) >= least for size in chunks].index(True)]

    @property
    def default_stall_s(self) -> float:
        """The default stall bound in seconds: the default chunk just fits."""
        return self.step_s(0, prompt_tokens=self.default_chunk) / PLANNED_SHARE

    def _prompt_us(self, num_tokens: int) -> float:
        """Return the time of the padded step, or interpolate `prompt_us`. Beyond the last size, the
        slope is that of the last two sizes."""
        sizes = self.prompt_us
        index = bisect_left(sizes, num_tokens, key=lambda size: size[0])
        if index == 0:  # a step of few tokens reads all weights too
            return sizes[0][1]
        if num_tokens <= self.padded_tokens and index < len(sizes):
            return sizes[index][1]
        if len(sizes) == 1:
            return sizes[0][1] * num_tokens / sizes[0][0]
        (low, low_us), (high, high_us) = sizes[min(index, len(sizes) - 1) - 1 :][:2]
        return low_us + (high_us - low_us) * (num_tokens - low) / (high - low)
