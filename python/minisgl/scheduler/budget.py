"""How many prompt tokens a step may compute: the chunk size, and the stall bound.

The stall bound says how long the prompts of a step may delay the streams that decode in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil

from minisgl.core.image import Image, places_of
from minisgl.core.step_times import PLANNED_SHARE
from minisgl.scheduler.config import SchedulerConfig


class PromptBudget:
    """What is left of the prompt budget of one step, `max_prefill_tokens`. Mutable, short-lived.

    excess_s: seconds by which the step's images exceed the stall bound.
    """

    excess_s = 0.0

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._tokens = config.max_prefill_tokens

    def fitting(self, start: int, num_tokens: int, share: float = 1.0, least: int = 1) -> int:
        """Return how many tokens of the next chunk of a prompt fit into the budget.

        start: the prompt's computed tokens. num_tokens: the length of the chunk if all of it fits.
        share: the part of the whole budget that this chunk and those taken before may use together.
        least: of fewer tokens none is computed.
        """
        left = self._tokens - ceil((1 - share) * self._config.max_prefill_tokens)
        fits = min(left, num_tokens)
        return fits if fits >= least else 0

    def before_images(self, images: Sequence[Image], start: int, num_tokens: int) -> int:
        """Return how many tokens of a chunk that fits come before an image that does not fit. All
        fit without a stall bound."""
        return num_tokens

    def take(self, start: int, num_tokens: int, images: Sequence[Image] = ()) -> None:
        """Subtract a chunk of a prompt whose first `start` tokens are computed. images: the
        prompt's."""
        self._tokens -= num_tokens


class StallBudget(PromptBudget):
    """The prompt budget of a step with decode rows, if there is a stall bound.

    The prompts may make the step at most `PLANNED_SHARE` of `max_stall_s` longer than its decode
    rows alone, as `step_times` predict it. The first chunk may always have one page of tokens, or
    the least that it can have, and the step one image for which the vision tower runs, since
    neither can be divided. What that image takes beyond the bound is owed to the streams: each
    later step pays the bound, and until all is paid no image is read beside streams.
    """

    def __init__(self, config: SchedulerConfig, num_decodes: int, owed_s: float) -> None:
        super().__init__(config)
        assert config.step_times is not None
        assert config.max_stall_s is not None
        self._times = config.step_times
        self._bound_s = PLANNED_SHARE * config.max_stall_s
        self._num_decodes = num_decodes
        self._decodes_s = self._times.step_s(num_decodes)
        self._num_taken = self._num_pairs = 0  # of the chunks taken
        self._images_s = 0.0  # of the images that begin in them
        self._owed_s = owed_s

    def fitting(self, start: int, num_tokens: int, share: float = 1.0, least: int = 1) -> int:
        most = super().fitting(start, num_tokens, share, least)
        if not most:
            return 0
        limit_s = self._bound_s
        if share < 1:
            # The first prompt token has a fixed cost, because steps with prompts run differently.
            # Only the rest of the bound is shared.
            first_s = self._times.step_s(self._num_decodes, 0, 1) - self._decodes_s
            limit_s = first_s + share * (limit_s - first_s)
        low, high = 0, most
        middle = most  # usually the whole chunk fits
        while low < high:
            fits = self._stall_s(middle, start) <= limit_s
            low, high = (middle, high) if fits else (low, middle - 1)
            middle = (low + high + 1) // 2
        if not self._num_taken and share == 1:
            low = max(low, min(max(self._config.page_size, least), most))
        return low if low >= least else 0

    def before_images(self, images: Sequence[Image], start: int, num_tokens: int) -> int:
        images_s = 0.0  # of those that fit
        for before, image_s in self._images(images, start, num_tokens):
            fits = self._stall_s(before, start) + images_s + image_s <= self._bound_s
            if self._owed_s or (self._images_s + images_s and not fits):
                return before
            images_s += image_s
        return num_tokens

    def take(self, start: int, num_tokens: int, images: Sequence[Image] = ()) -> None:
        super().take(start, num_tokens)
        self._num_taken += num_tokens
        self._num_pairs += num_tokens * start
        self._images_s += sum(image_s for _, image_s in self._images(images, start, num_tokens))
        self.excess_s = max(self._images_s - self._bound_s, 0.0)

    def _images(
        self, images: Sequence[Image], start: int, num_tokens: int
    ) -> Iterator[tuple[int, float]]:
        """Yield the tokens of a chunk before each image that begins in it, and the seconds of its
        tower."""
        for image in images:
            if 0 <= (before := int(places_of(image)[0]) - start) < num_tokens:
                yield before, self._times.image_ns * image.num_bytes * 1e-9

    def _stall_s(self, num_tokens: int, start: int) -> float:
        """Return the seconds that the chunks taken and this one add to the decode rows."""
        num_prompt = self._num_taken + num_tokens
        pairs = self._num_pairs + num_tokens * start
        step_s = self._times.step_s(self._num_decodes, 0, num_prompt, pairs)
        return step_s - self._decodes_s + self._images_s


def left_owed_s(config: SchedulerConfig, owed_s: float) -> float:
    """Return what is owed to the streams after one more step."""
    assert config.max_stall_s is not None, "without a bound nothing is owed"
    return max(owed_s - PLANNED_SHARE * config.max_stall_s, 0.0)


def prompt_budget(config: SchedulerConfig, num_decodes: int, owed_s: float = 0.0) -> PromptBudget:
    """Return the budget of a step with `num_decodes` decode rows. owed_s: see `StallBudget`."""
    if config.max_stall_s is None or not num_decodes:
        return PromptBudget(config)
    return StallBudget(config, num_decodes, owed_s)
