"""Pools hidden states, in stream order.

Each row is summed by itself, so it does not depend on the step's other rows. The sums are float32.
Axes: U tokens that the model returned, D hidden size, R rows at a time, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minisgl.core.plan import Pooled
from minisgl.engine.prompt_scores import LOGIT_BYTES, MIN_ROWS

if TYPE_CHECKING:
    from minisgl.models import BaseLLMModel


def pool_rows(
    model: BaseLLMModel, x_UD: Tensor, spans: Sequence[tuple[int, Pooled]]
) -> list[Tensor]:
    """Return a row for each span (`minisgl.engine.prompt_scores.PoolRows`)."""
    rows: dict[int, Tensor] = {}
    single = [index for index, (_, pooled) in enumerate(spans) if pooled.num_tokens == 1]
    firsts_S = torch.tensor([spans[i][0] for i in single], dtype=torch.int64).to(x_UD.device)
    rows.update(zip(single, x_UD[firsts_S].float(), strict=True))
    for index, (first, pooled) in enumerate(spans):
        if pooled.num_tokens > 1:
            rows[index] = x_UD[first : first + pooled.num_tokens].sum(0, dtype=torch.float32)
    asking = [index for index in single if spans[index][1].logit_ids]
    at_a_time = max(MIN_ROWS, LOGIT_BYTES // (4 * model.config.vocab_size))
    for start in range(0, len(asking), at_a_time):
        part = asking[start : start + at_a_time]
        logits_RV = model.logits(x_UD[[spans[index][0] for index in part]]).float()
        for index, logits_V in zip(part, logits_RV, strict=True):
            rows[index] = logits_V[list(spans[index][1].logit_ids)]
    return [rows[index] for index in range(len(spans))]
