"""Options of requests that change the logits: penalties, biases, allowed and forbidden tokens.

The device keeps the tokens so far of such a request, in a row for each row of the request tables. A
step counts them and appends the tokens that it samples, in stream order. So the next step counts a
token that the host does not have yet. A request that starts or resumes brings all its tokens along
(`Plan.histories`), because the prefix cache has none.

A row takes 4 bytes for each token. (A table of counts would take 4 bytes for each vocabulary id.)
Nothing is allocated until a request uses an option. Axes: M rows with options, L tokens, V
vocabulary, S rows that sample, N biases, W forbidden sequences, P tokens of the longest sequence
without its last.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from minisgl.core import Plan, SamplingParams
from minisgl.scheduler.drafting import draft_rows

FORBIDDEN_LOGIT = -1e30
"""Added to the logit of a forbidden sequence's last token. It is finite, so that this token can be
sampled if a grammar or other options leave no other token. The request then does not fail."""
EARLY_STOP_LOGIT = -1e31
"""Added to the logits of stop tokens before `min_tokens`. Finite for the same reason."""
ROWS_AT_ONCE = 16
"""Rows that are counted at once: 16 rows of 152,000 float32 counts take 10 MB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """The options of a running request. disallowed: bool [V] on the device; None if all tokens are
    allowed. sequences: None if none is forbidden."""

    num_prompt: int
    sampling: SamplingParams
    stop_ids: tuple[int, ...]
    disallowed: Tensor | None
    sequences: _ForbiddenSequences | None

    @property
    def keeps_tokens(self) -> bool:
        """Whether the logits depend on the tokens so far."""
        return self.sampling.has_penalties or self.sequences is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class _ForbiddenSequences:
    """Forbidden sequences. prefixes: [W, P], all tokens of each except its last, aligned to the
    right and padded with -1. last: int64 [W], the last tokens. lengths: int64 [W], of the
    prefixes."""

    prefixes: Tensor
    last: Tensor
    lengths: Tensor


class LogitOptions:
    """Mutable; used only by the engine's steps, in stream order."""

    def __init__(self, device: torch.device, num_rows: int, vocab_size: int) -> None:
        self._device = device
        self._vocab_size = vocab_size
        self._rows: dict[int, _Row] = {}
        self._tokens_RL = torch.zeros(num_rows, 0, dtype=torch.int32, device=device)

    def begin(self, plan: Plan) -> None:
        """Keep the tokens so far of the requests with options that start in this step."""
        sampling_of = dict(plan.begins)
        for table_idx, num_prompt, stop_ids, ids in plan.histories:
            sampling = sampling_of[table_idx]
            assert sampling.max_tokens is not None, "the scheduler resolves it"
            disallowed = None
            if sampling.allowed_token_ids is not None:
                disallowed = torch.ones(self._vocab_size, dtype=torch.bool)
                disallowed[list(sampling.allowed_token_ids)] = False
                disallowed = disallowed.to(self._device)
            row = self._rows[table_idx] = _Row(
                num_prompt=num_prompt,
                sampling=sampling,
                stop_ids=stop_ids,
                disallowed=disallowed,
                sequences=self._forbidden(sampling.bad_words_ids),
            )
            if row.keeps_tokens:
                self._grow(num_prompt + max(sampling.max_tokens, 1))
                ids_L = torch.from_numpy(np.frombuffer(ids, "<i4").astype(np.int32))
                self._tokens_RL[table_idx, : len(ids_L)] = ids_L.to(self._device)

    def apply(self, logits_SV: Tensor, plan: Plan) -> Tensor:
        """Return a float32 copy of the logits of the plan's `sample_rows`, with the rows' options.

        The order: the repetition penalty, the frequency and presence penalties, the biases, the
        forbidden sequences and early stops, then -inf for the tokens that are not allowed.
        """
        x_SV = logits_SV.to(torch.float32, copy=True)
        if plan.num_drafts:
            self._append_drafts(plan)
        penalised = [
            (index, table_idx, length)
            for index, table_idx, length in self._with_tokens(plan)
            if self._rows[table_idx].sampling.has_penalties
        ]
        for first in range(0, len(penalised), ROWS_AT_ONCE):
            self._penalise(x_SV, penalised[first : first + ROWS_AT_ONCE])
        biases: list[tuple[int, int, float]] = []
        for index in plan.option_rows:
            row, output_idx = self._rows[_table_idx(plan, index)], plan.output_idxs[index]
            biases += [(index, token, bias) for token, bias in row.sampling.logit_bias.items()]
            if output_idx < row.sampling.min_tokens:
                biases += [(index, token, EARLY_STOP_LOGIT) for token in row.stop_ids]
            if row.sequences:
                x_SV[index] += self._next_forbidden(plan, index, row, row.sequences)
            if row.disallowed is not None:
                x_SV[index].masked_fill_(row.disallowed, -torch.inf)
        if biases:
            rows, tokens, values = zip(*biases, strict=True)
            at_N = (self._tensor(rows, torch.int64), self._tensor(tokens, torch.int64))
            x_SV.index_put_(at_N, self._tensor(values, torch.float32), accumulate=True)
        return x_SV

    def append(self, plan: Plan, ids_S: Tensor) -> None:
        """Append the sampled tokens to those of their rows."""
        if kept := self._with_tokens(plan):
            indices, table_idxs, lengths = zip(*kept, strict=True)
            at_M = (self._tensor(table_idxs, torch.int64), self._tensor(lengths, torch.int64))
            self._tokens_RL[at_M] = ids_S[self._tensor(indices, torch.int64)]

    def _append_drafts(self, plan: Plan) -> None:
        """Append each draft to the tokens of its request: the rows behind it count it. `append`
        overwrites those that are wrong."""
        for index, table_idx, length in self._with_tokens(plan):
            if (row := plan.sample_rows[index]) in draft_rows(plan):
                self._tokens_RL[table_idx, length - 1] = int(plan.token_ids[row])

    def _with_tokens(self, plan: Plan) -> list[tuple[int, int, int]]:
        """Return (index into `sample_rows`, table row, number of tokens so far) of each row whose
        tokens are kept."""
        found = []
        for index in plan.option_rows:
            table_idx = _table_idx(plan, index)
            row = self._rows[table_idx]
            if row.keeps_tokens:
                found.append((index, table_idx, row.num_prompt + plan.output_idxs[index]))
        return found

    def _forbidden(self, sequences: tuple[tuple[int, ...], ...]) -> _ForbiddenSequences | None:
        if not sequences:
            return None
        longest = max(map(len, sequences)) - 1
        padded = [[-1] * (longest + 1 - len(ids)) + list(ids[:-1]) for ids in sequences]
        return _ForbiddenSequences(
            prefixes=torch.tensor(padded, dtype=torch.int32).to(self._device),
            last=self._tensor([ids[-1] for ids in sequences], torch.int64),
            lengths=self._tensor([len(ids) - 1 for ids in sequences], torch.int64),
        )

    def _next_forbidden(
        self, plan: Plan, index: int, row: _Row, sequences: _ForbiddenSequences
    ) -> Tensor:
        """Return the numbers to add to a row's logits, float32 [V]. Sequences match only tokens of
        the output."""
        end = row.num_prompt + plan.output_idxs[index]
        longest = sequences.prefixes.shape[1]
        first = max(end - longest, 0)
        tail_P = torch.full((longest,), -2, dtype=torch.int32, device=self._device)
        tail_P[longest - (end - first) :] = self._tokens_RL[_table_idx(plan, index), first:end]
        is_next_W = ((sequences.prefixes == tail_P) | (sequences.prefixes < 0)).all(1)
        is_next_W &= sequences.lengths <= plan.output_idxs[index]
        added_V = torch.zeros(self._vocab_size, device=self._device)
        return added_V.index_put_(
            (sequences.last,), FORBIDDEN_LOGIT * is_next_W.float(), accumulate=True
        )

    def _penalise(self, x_SV: Tensor, penalised: list[tuple[int, int, int]]) -> None:
        """Apply the penalties of these rows in place."""
        indices, table_idxs, lengths = zip(*penalised, strict=True)
        rows = [self._rows[table_idx] for table_idx in table_idxs]
        params = [row.sampling for row in rows]
        index_M = self._tensor(indices, torch.int64)
        lengths_M1 = self._tensor(lengths, torch.int64)[:, None]
        prompts_M1 = self._tensor([row.num_prompt for row in rows], torch.int64)[:, None]
        repetition_M1 = self._tensor([p.repetition_penalty for p in params], torch.float32)[:, None]
        frequency_M1 = self._tensor([p.frequency_penalty for p in params], torch.float32)[:, None]
        presence_M1 = self._tensor([p.presence_penalty for p in params], torch.float32)[:, None]
        longest = max(lengths)
        ids_ML = self._tokens_RL[self._tensor(table_idxs, torch.int64), :longest].long()
        positions_L = torch.arange(longest, device=self._device)
        is_known_ML = positions_L < lengths_M1
        is_output_ML = is_known_ML & (positions_L >= prompts_M1)
        ids_ML = ids_ML.masked_fill(~is_known_ML, 0)  # left over from another request
        x_MV = x_SV[index_M]
        seen_MV = torch.zeros_like(x_MV).scatter_add_(1, ids_ML, is_known_ML.float()) > 0
        counts_MV = torch.zeros_like(x_MV).scatter_add_(1, ids_ML, is_output_ML.float())
        repeated_MV = torch.where(x_MV > 0, x_MV / repetition_M1, x_MV * repetition_M1)
        x_MV = torch.where(seen_MV, repeated_MV, x_MV)
        x_SV[index_M] = x_MV - frequency_M1 * counts_MV - presence_M1 * (counts_MV > 0)

    def _grow(self, length: int) -> None:
        """Make room for rows of `length` tokens."""
        num_rows, room = self._tokens_RL.shape
        if length > room:
            grown_RL = self._tokens_RL.new_zeros(num_rows, 1 << (length - 1).bit_length())
            grown_RL[:, :room] = self._tokens_RL
            self._tokens_RL = grown_RL

    def _tensor(self, values: tuple[float, ...] | list[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(self._device)


def _table_idx(plan: Plan, index: int) -> int:
    return plan.table_idxs[plan.sample_rows[index]]
