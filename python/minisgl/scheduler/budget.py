"""How many prompt tokens a step may compute: the chunk size, and the stall bound.

The stall bound limits how long the prompts of a step may delay the streams that decode in it.
"""

from __future__ import annotations

from minisgl.scheduler.config import SchedulerConfig


class PromptBudget:
    """What is left of one step's prompt budget. Mutable and short-lived.

    A step has at most `max_prefill_tokens` prompt tokens. With decode rows and `max_stall_s`, its
    prompts must also add at most that time to a step of the decode rows alone, as `Tuning` models
    both. The first chunk of a step may have one page of tokens however short the time is.
    """

    def __init__(self, config: SchedulerConfig, num_decodes: int) -> None:
        self._config = config
        self._num_decodes = num_decodes
        self._tokens = config.max_prefill_tokens
        self._num_taken = 0
        self._attend_s = 0.0  # attention of the chunks taken to the tokens before them
        self._bound_s = config.max_stall_s if num_decodes else None

    def fitting(self, start: int, share: float = 1.0) -> int:
        """Return how many tokens fit, for a prompt whose first `start` tokens are computed.

        share: the part of the whole budget that this chunk and the chunks taken may use together.
        """
        most = self._tokens - round((1 - share) * self._config.max_prefill_tokens)
        if self._bound_s is None or most <= 0:
            return max(most, 0)
        # The first prompt token has a fixed cost, because steps with prompts run differently. Only
        # the rest of the bound is shared.
        first_s = self._stall_s(1, 0)
        limit_s = first_s + share * (self._bound_s - first_s)
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            fits = self._stall_s(middle, start) <= limit_s
            low, high = (middle, high) if fits else (low, middle - 1)
        return low if self._num_taken or share < 1 else max(low, min(self._config.page_size, most))

    def take(self, start: int, num_tokens: int) -> None:
        """Subtract a chunk of a prompt whose first `start` tokens are computed."""
        self._tokens -= num_tokens
        self._num_taken += num_tokens
        if self._bound_s is not None:
            self._attend_s += self._attention_s(num_tokens, start)

    def _stall_s(self, num_tokens: int, start: int) -> float:
        """Return the time that the chunks taken and one more chunk add to the decode rows."""
        tuning, rows = self._config.tuning, self._num_decodes
        assert tuning is not None
        with_prompts_s = tuning.step_s(rows, prompt_tokens=self._num_taken + num_tokens)
        attend_s = self._attend_s + self._attention_s(num_tokens, start)
        return with_prompts_s + attend_s - tuning.step_s(rows)

    def _attention_s(self, num_tokens: int, start: int) -> float:
        tuning = self._config.tuning
        assert tuning is not None
        return tuning.attend_ns * num_tokens * start * 1e-9
