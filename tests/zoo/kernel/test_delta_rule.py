"""The gated delta rule against its definition, token by token, and against transformers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from transformers.models.nemotron_h.modeling_nemotron_h import mamba2_chunk_scan
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from minisgl_zoo.recurrent.delta_rule import Rows, delta_rule, next_state, short_conv

NUM_HEADS, NUM_KEY_HEADS, KEY_DIM, VALUE_DIM = 6, 2, 12, 20


def inputs(count: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """q, k, v, g and beta of so many tokens."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(count, *sizes, generator=generator)

    return (
        normal(NUM_KEY_HEADS, KEY_DIM),
        normal(NUM_KEY_HEADS, KEY_DIM),
        normal(NUM_HEADS, VALUE_DIM),
        -F.softplus(normal(NUM_HEADS)),
        normal(NUM_HEADS).sigmoid(),
    )


def by_definition(
    state_NHV: torch.Tensor, tokens: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    outputs = []
    for q, k, v, g, beta in zip(*tokens, strict=True):
        q_NH, k_NH = (
            (x / x.square().sum(-1, keepdim=True).add(1e-6).sqrt()).repeat_interleave(3, 0)
            for x in (q, k)
        )
        state_NHV = state_NHV * g.exp()[:, None, None]
        known_NV = torch.einsum("nhv,nh->nv", state_NHV, k_NH)
        update_NV = beta[:, None] * (v - known_NV)
        state_NHV = state_NHV + k_NH[:, :, None] * update_NV[:, None]
        outputs.append(torch.einsum("nhv,nh->nv", state_NHV, q_NH * KEY_DIM**-0.5))
    return torch.stack(outputs), state_NHV


def no_rows() -> Rows:
    return Rows(
        torch.empty(0, NUM_KEY_HEADS, KEY_DIM),
        torch.empty(0, NUM_HEADS, VALUE_DIM),
        torch.empty(0, NUM_HEADS),
    )


@pytest.mark.parametrize("cuts", [[64], [1] * 40, [17, 1, 1, 30, 15]], ids=str)
def test_it_is_the_recurrence(cuts: list[int]) -> None:
    state = torch.randn(NUM_HEADS, KEY_DIM, VALUE_DIM, generator=torch.Generator().manual_seed(9))
    tokens = inputs(sum(cuts))
    expected, last = by_definition(state, tokens)
    outputs, rows = [], no_rows()
    for parts in zip(*(x.split(cuts) for x in tokens), strict=True):
        out, rows = delta_rule(state, rows, *parts)
        outputs.append(out)
    torch.testing.assert_close(torch.cat(outputs), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(next_state(state, rows), last, atol=1e-4, rtol=1e-4)


def test_it_is_that_of_transformers() -> None:
    q, k, v, g, beta = tokens = inputs(50)
    expected, last = torch_chunk_gated_delta_rule(
        q[None], k[None], v[None], g[None], beta[None],
        output_final_state=True, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    zero = torch.zeros(NUM_HEADS, KEY_DIM, VALUE_DIM)
    out, rows = delta_rule(zero, no_rows(), *tokens)
    torch.testing.assert_close(out, expected[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(next_state(zero, rows), last[0], atol=1e-5, rtol=1e-5)


def test_the_convolution_sees_the_inputs_before() -> None:
    x, weight = torch.randn(30, 7), torch.randn(7, 4)
    padded = F.pad(x, (0, 0, 3, 0))
    whole = F.silu(F.conv1d(x.T[None], weight[:, None], padding=3, groups=7)[0, :, :30].T)
    torch.testing.assert_close(short_conv(padded, weight.T), whole)
    torch.testing.assert_close(short_conv(padded[10:], weight.T), whole[10:])


@pytest.mark.parametrize("cuts", [[40], [17, 1, 1, 21]], ids=str)
def test_without_the_delta_it_is_mamba2_of_transformers(cuts: list[int]) -> None:
    q, k, v, _, _ = inputs(sum(cuts))
    dt, a_N = torch.rand(len(q), NUM_HEADS) + 0.01, -torch.rand(NUM_HEADS)
    expected, last = mamba2_chunk_scan(
        v[None], dt[None], a_N, k[None], q[None], chunk_size=16, return_final_states=True
    )
    zero, outputs, rows = torch.zeros(NUM_HEADS, KEY_DIM, VALUE_DIM), [], no_rows()
    for parts in zip(*(x.split(cuts) for x in (q, k, v, dt * a_N, dt)), strict=True):
        out, rows = delta_rule(zero, rows, *parts, is_delta=False)
        outputs.append(out)
    torch.testing.assert_close(torch.cat(outputs), expected[0], atol=1e-4, rtol=1e-4)
    state = next_state(zero, rows, is_delta=False)
    torch.testing.assert_close(state, last[0].mT, atol=1e-4, rtol=1e-4)
