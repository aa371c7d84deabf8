"""The gated delta rule, in plain torch: the specification of the backends' kernels.

A head has a state S [H, V]. Token t has a query q, a key k, a value v, a log decay g <= 0 and a
weight beta::

    S  <-  exp(g) S                     decay
    u  =   beta (v - S^T k)             what the state does not know about k yet
    S  <-  S + k u^T
    out =  S^T q

With G the sum of the log decays since a state S_0, this is the same as

    S   =  exp(G_t) S_0 + sum over j <= t: exp(G_t - G_j) k_j u_j^T

so that S_0 and the rows (k, u, G) since then are the state after any token (decision 0024). The
updates u of a span of tokens solve a triangular system (Yang et al., "Gated Delta Networks", 2024).
All is float32.

Mamba2 (Dao & Gu, 2024) is the same without the delta: u = beta v. There k and q (B and C) are not
normed, and beta is the time step. So its states and rows are cached alike.

Axes: O old tokens (rows since S_0), T new tokens, J = O + T, N value heads, K key heads (N a
multiple of K), H key dim, V value dim; in a step on a GPU also B rows and S slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

EPS = 1e-6
"""Added in the norm of queries and keys, as in Hugging Face."""


@dataclass(frozen=True, slots=True)
class Rows:
    """What later tokens need of the tokens since a state. keys: [J, K, H], outputs of the
    convolution. updates: float32 [J, N, V]. decays: float32 [J, N], the sums of the log decays
    since the state."""

    keys: Tensor
    updates: Tensor
    decays: Tensor


def delta_rule(
    state_NHV: Tensor,
    old: Rows,
    q_TKH: Tensor,
    k_TKH: Tensor,
    v_TNV: Tensor,
    g_TN: Tensor,
    beta_TN: Tensor,
    is_delta: bool = True,
) -> tuple[Tensor, Rows]:
    """Return the outputs, float32 [T, N, V], and the rows of old and new tokens. is_delta: False
    for Mamba2."""
    num_old, num_heads = len(old.keys), state_NHV.shape[0]
    keys = torch.cat((old.keys, k_TKH))
    decays = g_TN.cumsum(0) + (old.decays[-1] if num_old else 0)
    decays_JN = torch.cat((old.decays, decays))
    scale = q_TKH.shape[-1] ** -0.5 if is_delta else 1.0
    q_TNH = _unit(q_TKH, num_heads, is_delta) * scale
    k_JNH = _unit(keys, num_heads, is_delta)
    k_TNH = k_JNH[num_old:]

    count = len(q_TKH)
    age = torch.arange(num_old + count, device=keys.device)[None] - num_old
    age = age - torch.arange(count, device=keys.device)[:, None]  # of token j for token t, <= 0
    between_NTJ = (decays.T[:, :, None] - decays_JN.T[:, None]).masked_fill(age > 0, -torch.inf)
    between_NTJ = between_NTJ.exp()
    seen_NTJ = torch.einsum("tnh,jnh->ntj", q_TNH, k_JNH) * between_NTJ
    mixed_NTJ = torch.einsum("tnh,jnh->ntj", k_TNH, k_JNH) * between_NTJ * is_delta
    mixed_NTJ = mixed_NTJ.masked_fill(age == 0, 0) * beta_TN.T[:, :, None]

    decay_TN1 = decays.exp()[:, :, None]
    known_TNV = torch.einsum("tnh,nhv->tnv", k_TNH, state_NHV) * decay_TN1
    right_NTV = (beta_TN[:, :, None] * (v_TNV.float() - known_TNV * is_delta)).transpose(0, 1)
    right_NTV = right_NTV - mixed_NTJ[:, :, :num_old] @ old.updates.transpose(0, 1)
    new_NTV = torch.linalg.solve_triangular(
        mixed_NTJ[:, :, num_old:], right_NTV, upper=False, unitriangular=True
    )
    updates = torch.cat((old.updates, new_NTV.transpose(0, 1)))
    out_TNV = torch.einsum("tnh,nhv->tnv", q_TNH, state_NHV) * decay_TN1
    out_TNV = out_TNV + torch.einsum("ntj,jnv->tnv", seen_NTJ, updates)
    return out_TNV, Rows(keys, updates, decays_JN)


def next_state(state_NHV: Tensor, rows: Rows, is_delta: bool = True) -> Tensor:
    """Return the state after the last of these rows, [N, H, V]."""
    last_N = rows.decays[-1]
    k_JNH = _unit(rows.keys, len(state_NHV), is_delta) * (last_N - rows.decays).exp()[:, :, None]
    added = torch.einsum("jnh,jnv->nhv", k_JNH, rows.updates)
    return state_NHV * last_N.exp()[:, None, None] + added


def short_conv(x_JD: Tensor, weight_WD: Tensor, bias_D: Tensor | None = None) -> Tensor:
    """A causal convolution of each channel with its W taps, plus a bias, then SiLU. The first W - 1
    of the J inputs are of the tokens before. Returns [J - W + 1, D] in x's dtype."""
    weight = weight_WD.T[:, None]
    x = torch.nn.functional.conv1d(x_JD.T[None], weight, bias_D, groups=len(weight))
    return torch.nn.functional.silu(x)[0].T


def _unit(x_JKH: Tensor, num_heads: int, is_delta: bool) -> Tensor:
    """Return x as float32 [J, N, H], normed to length 1 if is_delta; value heads that share a key
    head get the same."""
    x = x_JKH.float()
    if is_delta:
        x = x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS)
    return x.repeat_interleave(num_heads // x.shape[1], dim=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaStep:
    """The tensors of decode rows or of prompts, in one layer.

    mixed_TD: queries, keys and values behind the convolution. g_TN, beta_TN, skip_N: see
    `minisgl_zoo.recurrent.backend.RecurrentInputs`. states, keys, updates, decays: the layer's
    cache, see `minisgl_zoo.recurrent.pool.RecurrentLayer`. slots: of each token. rows: int32 [4,
    B], some columns of `PoolBatch.rows`. row_table, state_table: the page tables of rows and
    states. out_TNV: the kernels write the outputs of these rows. interval: tokens between two
    states.
    """

    mixed_TD: Tensor
    g_TN: Tensor
    beta_TN: Tensor
    states: Tensor
    keys: Tensor
    updates: Tensor
    decays: Tensor
    slots: Tensor
    rows: Tensor
    row_table: Tensor
    state_table: Tensor
    out_TNV: Tensor
    skip_N: Tensor | None
    interval: int
    page_size: int

    @property
    def num_heads(self) -> int:
        return self.states.shape[1]

    @property
    def num_key_heads(self) -> int:
        return self.keys.shape[1]
