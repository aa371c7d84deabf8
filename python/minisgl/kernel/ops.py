"""The math of a decoder, without attention and experts, in plain torch.

This class is the specification of every op, the fallback on every machine, and the oracle of the
fast twins (`kernel.cpu`, `kernel.cuda`). These subclass it and override the ops that they compute
faster. Layers get an `Ops` when they are built. Rounding follows Hugging Face transformers step by
step, so that a bfloat16 model samples the same tokens.

Axes: T tokens, N query heads, K key/value heads, H head dim, F intermediate size, D hidden size,
V vocabulary, L rows of it on a rank, S rows that sample, P positions, R rotary dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.core import BatchSamplingArgs
from minisgl.kernel.sampling import sample_random

if TYPE_CHECKING:
    from minisgl.kvcache.pool import LayerPool

Activation = Literal["silu", "gelu_tanh"]
"""The activation of a gated linear layer (GLU variants, Shazeer 2020), which computes two halves,
gate and up, and returns activation(gate) * up. GELU is in its tanh form."""


TABLE_ROWS = 1024
"""Rows of a table of 16 bits that `Ops.logits` converts to float32 at a time, so that they stay in
a cache of the processor."""


class Ops:
    """Stateless. Only `copy_finite`, `store_kv` and `write_pages` change an argument; the other ops
    return new tensors."""

    name = "torch"

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a new tensor for a weight, as `torch.empty` does."""
        return torch.empty(shape, dtype=dtype, device=device)

    def embed(self, ids_T: Tensor, weight_VD: Tensor) -> Tensor:
        """Return rows of the table; ids are trusted to be in [0, V)."""
        return F.embedding(ids_T, weight_VD)

    def embed_share(self, ids_T: Tensor, weight_LD: Tensor, share: range) -> Tensor:
        """Return rows of the table, of which weight_LD has only the rows `share`. Other ids give
        zeros. weight_LD: rows of padding may follow."""
        return rows_of_share(lambda ids_T: self.embed(ids_T, weight_LD), ids_T, share)

    def copy_finite(self, source: Tensor, target: Tensor) -> bool:
        """Copy floats to a contiguous target, with conversion. Returns whether the target has
        neither NaN nor infinity."""
        target.copy_(source)
        return self.all_finite(target)

    def all_finite(self, x: Tensor) -> bool:
        """Return whether contiguous floats have neither NaN nor infinity. Waits for the device."""
        return bool((x.float() if x.itemsize == 1 else x).isfinite().all())

    def packs(self, dtype: torch.dtype) -> bool:
        """Return whether plain matrices of `dtype` are packed (`minisgl.quantization.packed`)."""
        return False

    def linear(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        gate: Activation | None = None,
    ) -> Tensor:
        """Return x @ weight.T + bias over the last axis; with a `gate`, the result of `gated`."""
        y = F.linear(x, weight, bias)
        return self.gated(y, gate) if gate else y

    def gated(self, gate_up: Tensor, gate: Activation) -> Tensor:
        """[..., 2F], gate then up -> activation(gate) * up, [..., F]."""
        x, up = gate_up.chunk(2, dim=-1)
        return (F.silu(x) if gate == "silu" else F.gelu(x, approximate="tanh")) * up

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return the root-mean-square norm of the last axis (Zhang & Sennrich 2019).

        x: any leading shape. weight: of x's dtype or float32. Computed in float32 and rounded once.
        (In many families Hugging Face also rounds before it multiplies by the weight.)
        """
        x32 = x.float()
        normed = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
        return (normed * weight.float()).to(x.dtype)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Return (rms_norm(x + residual), x + residual)."""
        residual = x + residual
        return self.rms_norm(residual, weight, eps), residual

    def norm_linear(
        self, x: Tensor, residual: Tensor | None, norm_weight: Tensor | None, eps: float,
        weight: Tensor, bias: Tensor | None, gate: Activation | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Apply `normed`, then linear. Returns (output, x + residual)."""
        x, residual = self.normed(x, residual, norm_weight, eps)
        return self.linear(x, weight, bias, gate), residual

    def normed(
        self, x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        """`add_rms_norm` with optional arguments. residual: None counts as zero. weight: None if x
        is normed already; then there is no residual."""
        if weight is None:
            return x, x
        if residual is None:
            return self.rms_norm(x, weight, eps), x
        return self.add_rms_norm(x, residual, weight, eps)

    def apply_rope(
        self, q_TNH: Tensor, k_TKH: Tensor, cos_sin_PR: Tensor, positions_T: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Rotate the pairs (i, i + R/2) of the first R of H dims (RoFormer, the "neox" layout).

        cos_sin_PR: float32, R/2 cosines, then R/2 sines. positions_T: any integer type, trusted to
        be in [0, P). Cosines and sines are rounded to q's dtype before they multiply, as in HF.
        """
        rotary_dim = cos_sin_PR.shape[1]
        cos_sin = cos_sin_PR[positions_T].to(q_TNH.dtype)
        cos_T1R, sin_T1R = (half.repeat(1, 2)[:, None] for half in cos_sin.chunk(2, dim=-1))

        def rotate(x: Tensor) -> Tensor:
            rotary, rest = x[..., :rotary_dim], x[..., rotary_dim:]
            low, high = rotary.chunk(2, dim=-1)
            rotary = rotary * cos_T1R + torch.cat((-high, low), dim=-1) * sin_T1R
            return torch.cat((rotary, rest), dim=-1)

        return rotate(q_TNH), rotate(k_TKH)

    def route(self, logits_TE: Tensor, top_k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
        """Return each token's experts: (weights float32 [T, top_k], ids int32 [T, top_k]), the
        largest weight first.

        The weights come from a softmax over all E; with `renormalise` they are scaled to a sum of
        1. If logits are equal, the expert with the lower id goes first. Weights stay float32
        (transformers rounds them to the logits' dtype in some families). Both tensors are
        contiguous.
        """
        sorted_TE, ids_TE = logits_TE.float().sort(dim=-1, descending=True, stable=True)
        weights_TK = sorted_TE.softmax(-1)[:, :top_k]
        if renormalise:
            weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
        return weights_TK.contiguous(), ids_TE[:, :top_k].int().contiguous()

    def store_kv(self, k_TKH: Tensor, v_TKH: Tensor, slots_T: Tensor, pool: LayerPool) -> None:
        """Write this step's keys and values into their slots, in place. A pool of 8 bits quantises.

        slots_T: int32 token slots (page * page_size + offset), no duplicates; -1 skips (padding).
        Raises ValueError on a dtype or shape that is not the pool's. The slots' range is trusted:
        checking would wait for the device.
        """
        check_store(k_TKH, v_TKH, slots_T, pool)
        taken = slots_T >= 0
        pool.write(slots_T[taken], k_TKH[taken], v_TKH[taken])

    def take_ids(self, token_ids_T: Tensor, table_idxs_D: Tensor, last_token_R: Tensor) -> Tensor:
        """Return the ids of a step. A negative (promised) id among the first D is replaced by the
        last token of its table row."""
        ids_D = token_ids_T[: len(table_idxs_D)]
        taken_D = torch.where(ids_D < 0, last_token_R[table_idxs_D], ids_D)
        return torch.cat([taken_D, token_ids_T[len(taken_D) :]])

    def write_pages(self, page_table_RP: Tensor, new_pages_3N: Tensor) -> None:
        """Set page_table[row, index] = page for each of N (row, index, page), int64 [3, N]."""
        rows_N, columns_N, pages_N = new_pages_3N
        page_table_RP[rows_N, columns_N] = pages_N.int()

    def logits(self, x_SD: Tensor, weight_LD: Tensor) -> Tensor:
        """Return x @ weight.T in float32, whose sums are not rounded to the dtype of x: tokens
        whose logits differ by less than that rounding are not equally likely.

        Here 16-bit tables are converted some rows at a time.
        """
        x_SD = x_SD.float()
        if weight_LD.dtype == torch.float32:
            return F.linear(x_SD, weight_LD)
        parts = [F.linear(x_SD, part.float()) for part in torch.split(weight_LD, TABLE_ROWS)]
        return torch.cat(parts, dim=-1)

    def sample(self, logits_SV: Tensor, args: BatchSamplingArgs) -> Tensor:
        """Return the next token id of each row, int32 [S].

        A greedy row takes the first of its largest logits. For any other row, logits are divided by
        the temperature; then top-k, top-p and min-p apply, each to what the filter before it left;
        then the largest of log-probability + Gumbel noise is chosen, which is a draw from the
        distribution. Each filter is a threshold on the logits, so equal logits stay or go together;
        on a GPU also those that bfloat16 cannot tell apart.

        The noise of an entry is a function of (seed, output index, vocabulary id). It does not
        depend on the row, the other rows, or V.

        A row has -1 if its largest logit is infinite, or if all of its logits are NaN. If only some
        are NaN, it has -1 or any id.
        """
        ids_S = greedy_S = logits_SV.argmax(-1)
        if not args.all_greedy:
            ids_S = sample_random(logits_SV, greedy_S, args)
        largest_S = logits_SV.gather(1, greedy_S[:, None])[:, 0]
        return ids_S.where(largest_S.isfinite(), -1).int()

    def mask(self, logits_SV: Tensor, rows_M: Tensor, masks_MW: Tensor) -> Tensor:
        """Return a copy of the logits with -inf for the tokens that a mask forbids.

        rows_M: int64, the rows with a mask. masks_MW: int32 words, see `minisgl.core.req.Mask`.
        """
        bits_32 = torch.arange(32, dtype=torch.int32, device=masks_MW.device)
        is_allowed_MV = ((masks_MW[:, :, None] >> bits_32) & 1).bool().flatten(1)
        masked_SV = logits_SV.clone()
        masked_SV[rows_M] = masked_SV[rows_M].masked_fill(
            ~is_allowed_MV[:, : logits_SV.shape[1]], -torch.inf
        )
        return masked_SV

    def logprobs(self, logits_SV: Tensor, ids_S: Tensor) -> Tensor:
        """Return float32 [S]: the log-softmax of each row's logits at the row's id."""
        x_SV = logits_SV.float()
        chosen_S = x_SV.gather(1, ids_S.long()[:, None])[:, 0]
        return chosen_S - x_SV.logsumexp(-1)

    def top_logprobs(self, logits_SV: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return the ids, int32 [S, K], and the log-softmax, float32 [S, K], of each row's K
        largest logits, the largest first. K is `count`, or the vocabulary's size if that is
        smaller."""
        x_SV = logits_SV.float()
        top = x_SV.topk(min(count, x_SV.shape[1]))
        return top.indices.int(), top.values - x_SV.logsumexp(-1, keepdim=True)


def rows_of_share(rows: Callable[[Tensor], Tensor], ids_T: Tensor, share: range | None) -> Tensor:
    """Look up ids in a table whose first row is share.start. Ids outside of the share give zeros.
    rows: looks up ids of the table's own rows."""
    if share is None:
        return rows(ids_T)
    elsewhere_T = (ids_T < share.start) | (ids_T >= share.stop)
    x_TD = rows((ids_T - share.start).masked_fill(elsewhere_T, 0))
    return x_TD.masked_fill_(elsewhere_T[:, None], 0)


def check_store(k_TKH: Tensor, v_TKH: Tensor, slots_T: Tensor, pool: LayerPool) -> None:
    """Raise ValueError if `store_kv` cannot write these tensors into this pool."""
    for name, x, store in (("k", k_TKH, pool.k), ("v", v_TKH, pool.v)):
        fits = x.dtype == store.dtype or store.dtype.itemsize == 1
        if not fits or x.shape[1:] != store.shape[2:]:
            raise ValueError(
                f"store_kv: {name} is {x.dtype} {tuple(x.shape)}, but the pool takes "
                f"{store.dtype} (tokens, {store.shape[2]}, {store.shape[3]})"
            )
    if not len(k_TKH) == len(v_TKH) == len(slots_T):
        raise ValueError(f"store_kv: {len(k_TKH)} keys, {len(v_TKH)} values, {len(slots_T)} slots")
