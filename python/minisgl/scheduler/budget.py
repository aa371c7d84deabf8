"""How many prompt tokens a step may compute: the chunk size."""

from __future__ import annotations

from minisgl.scheduler.config import SchedulerConfig


class PromptBudget:
    """What is left of the prompt budget of one step, `max_prefill_tokens`. Mutable, short-lived."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._tokens = config.max_prefill_tokens

    def fitting(self, start: int, num_tokens: int, share: float = 1.0) -> int:
        """Return how many tokens of the next chunk of a prompt fit into the budget.

        start: the prompt's computed tokens. num_tokens: the length of the chunk if all of it fits.
        share: the part of the whole budget that this chunk and those taken before may use together.
        """
        left = self._tokens - round((1 - share) * self._config.max_prefill_tokens)
        return max(min(left, num_tokens), 0)

    def take(self, start: int, num_tokens: int) -> None:
        """Subtract a chunk of a prompt whose first `start` tokens are computed."""
        self._tokens -= num_tokens


def prompt_budget(config: SchedulerConfig, num_decodes: int) -> PromptBudget:
    """Return the budget of a step with `num_decodes` decode rows."""
    if config.max_stall_s is None or not num_decodes:
        return PromptBudget(config)
    from minisgl.scheduler.stall_budget import StallBudget

    return StallBudget(config, num_decodes)
