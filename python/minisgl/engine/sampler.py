"""Sampling: from the hidden states of a step to ids, which become the last tokens of their rows.

Axes: S rows that sample, R those of this rank, V vocabulary, D hidden size, M rows that ask for the
K most likely tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from minisgl.engine.inputs import StepInputs
from minisgl.engine.logprobs import with_logprobs
from minisgl.engine.prompt_scores import PoolRows, sample_and_report
from minisgl.engine.tables import RequestTables

if TYPE_CHECKING:
    from minisgl.distributed import DistributedCommunicator
    from minisgl.engine.extras import LogitOptions, StepGuard
    from minisgl.kernel.ops import Ops
    from minisgl.models import BaseLLMModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """tables: get the sampled ids. guard: watches the logits.

    options, pool: None if no package has them. Used in stream order.
    """

    model: BaseLLMModel
    tables: RequestTables
    comm: DistributedCommunicator
    ops: Ops
    guard: StepGuard | None
    pool: PoolRows | None
    options: LogitOptions | None

    def sample(self, x_SD: Tensor, inputs: StepInputs) -> Tensor:
        """Sample a token for each row and write it to the tables as the row's last token.

        Returns int32 ids [S], padding included; if a row asks for log-probabilities, the output of
        `with_logprobs`; if prompt tokens are scored or pooled, that of `sample_and_report`. The id
        of a row whose logits are not finite is -1 (`Ops.sample`); the tables then have 0, a valid
        id.

        If S is large, each rank samples its part R of the rows, and the ranks gather the ids. If S
        is small, or a row has options, every rank samples all rows and rank 0's ids are broadcast,
        because two devices may compute logits that differ in the last bit.
        """
        if inputs.plan.reports:
            sample = partial(self._sample, inputs=inputs)
            return sample_and_report(self.model, sample, self.pool, x_SD, inputs.plan)
        return self._sample(x_SD, inputs)

    def _sample(self, x_SD: Tensor, inputs: StepInputs) -> Tensor:
        return self.choose(self.logits(x_SD, inputs), inputs)

    def logits(self, x_SD: Tensor, inputs: StepInputs) -> Tensor:
        """Return the logits of this rank's part of the rows that sample."""
        return self.model.logits(x_SD[: inputs.num_samples], self.split(inputs)[0])

    def choose(self, logits_RV: Tensor, inputs: StepInputs) -> Tensor:
        """Sample from the output of `logits`, as `sample` does."""
        is_split, rows = self.split(inputs)
        plan, table_idxs = inputs.plan, inputs["table_idxs"]
        if self.guard:
            is_padding_S = table_idxs == self.tables.padding_idx
            self.guard.watch(logits_RV, is_padding_S[rows.start : rows.stop])
        masked_RV = logits_RV
        options = self.options if plan.option_rows else None
        if options:
            masked_RV = options.apply(masked_RV, plan)
        if "masks" in inputs.tensors:
            masked_RV = self.ops.mask(masked_RV, inputs["mask_rows"], inputs["masks"])
        ids_R = self.ops.sample(masked_RV, inputs.sampling_args().take(rows))
        ids_S = self.comm.all_gather(ids_R, 0) if is_split else self.comm.broadcast(ids_R)
        known_S = ids_S.clamp(min=0)
        self.tables.last_token[table_idxs] = known_S
        if options:
            options.append(plan, known_S)
        if not plan.logprob_rows:
            return ids_S
        gather = partial(self.comm.all_gather, dim=0) if is_split else None
        return with_logprobs(
            self.ops, ids_S, known_S[rows.start : rows.stop], logits_RV, inputs, gather
        )

    def split(self, inputs: StepInputs) -> tuple[bool, range]:
        """Return whether the ranks split the sampling of the step's rows, and this rank's rows."""
        num_rows = inputs.num_samples
        is_split = self.comm.shares_rows(num_rows) and not inputs.has_options
        return is_split, self.comm.info.share(num_rows) if is_split else range(num_rows)
