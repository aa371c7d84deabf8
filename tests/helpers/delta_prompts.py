"""Steps of prompts through `minisgl_kernels.triton.delta_extend.extend`, and their reference."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minisgl_kernels.delta_hopper import DIM, INTERVAL, DeltaPrompts
from minisgl_kernels.triton.delta_extend import extend
from minisgl_zoo.recurrent.delta_rule import DeltaStep, Rows, delta_rule, next_state

Span = tuple[int, int]  # of a prompt's tokens, from the first to before the last


class Prompts:
    """Random inputs of a layer for prompts of some lengths, and a pool full of NaN. Mutable."""

    def __init__(
        self,
        lengths: Sequence[int],
        heads: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
        *,
        page_size: int = 16,
    ) -> None:
        """heads: value heads and key heads."""
        torch.manual_seed(0)
        num_heads, num_key_heads = heads
        self.heads, self.page_size, self.device = heads, page_size, device
        num_pages = -(-max(lengths) // page_size)
        self.row_table, self.state_table = (
            torch.randperm(len(lengths) * num_pages).int().view(len(lengths), -1).to(device)
            for _ in range(2)
        )
        width = (2 * num_key_heads + num_heads) * DIM
        silu = torch.nn.functional.silu
        self.mixed = [silu(torch.randn(n, width)).to(device, dtype) for n in lengths]
        self.g = [torch.randn(n, num_heads).to(device).exp() * -0.1 for n in lengths]
        self.beta = [torch.rand(n, num_heads).to(device) for n in lengths]

        def pool(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.full(sizes, torch.nan, dtype=dtype, device=device)

        num_slots = self.row_table.numel() * page_size
        self.states = pool(self.state_table.numel(), num_heads, DIM, DIM)
        self.keys = pool(num_slots, num_key_heads, DIM, dtype=dtype)
        self.updates, self.decays = pool(num_slots, num_heads, DIM), pool(num_slots, num_heads)

    def slots(self, prompt: int, positions: Tensor) -> Tensor:
        at = positions.to(self.device)
        return self.row_table[prompt, at // self.page_size] * self.page_size + at % self.page_size

    def state(self, prompt: int, position: int) -> Tensor:
        return self.states[self.state_table[prompt, position // self.page_size - 1].long()]

    def step(
        self, spans: Sequence[Span], hopper: DeltaPrompts | None, hidden: Sequence[int] = ()
    ) -> list[Tensor]:
        """Compute these tokens of the prompts. hidden: positions that have no slot. Returns the
        outputs of each."""
        order = [i for i, (start, end) in enumerate(spans) if end > start]
        parts = [slice(*spans[i]) for i in order]
        lengths = torch.tensor([spans[i][1] - spans[i][0] for i in order])
        mixed, g, beta = (
            torch.cat([of[i][part] for i, part in zip(order, parts, strict=True)])
            for of in (self.mixed, self.g, self.beta)
        )
        positions_of = [torch.arange(*spans[i]) for i in order]
        slots = torch.cat([self.slots(i, at) for i, at in zip(order, positions_of, strict=True)])
        slots, positions = slots.int(), torch.cat(positions_of)
        slots[torch.isin(positions, torch.tensor(hidden, dtype=torch.long)).to(self.device)] = -1
        ends = torch.tensor([spans[i][1] for i in order])
        rows = torch.stack((torch.tensor(order), lengths.cumsum(0) - lengths, lengths, ends))
        out = torch.full(
            (len(mixed), self.heads[0], DIM), torch.nan, dtype=mixed.dtype, device=self.device
        )
        step = DeltaStep(
            mixed_TD=mixed, g_TN=g, beta_TN=beta, states=self.states, keys=self.keys,
            updates=self.updates, decays=self.decays, slots=slots,
            rows=rows.int().to(self.device), row_table=self.row_table,
            state_table=self.state_table, out_TNV=out, skip_N=None, interval=INTERVAL,
            page_size=self.page_size,
        )  # fmt: skip
        assert hopper is None or hopper.takes(step)
        extend(step, len(mixed), hopper)
        found = dict(zip(order, out.split(lengths.tolist()), strict=True))
        return [found.get(i, out[:0]) for i in range(len(spans))]

    def reference(self, prompt: int) -> tuple[Tensor, list[Tensor], Tensor]:
        """Return a prompt's outputs, its states after each whole interval and the updates of the
        tokens after the last."""
        num_heads, num_key_heads = self.heads
        x, g, beta = (of[prompt].float() for of in (self.mixed, self.g, self.beta))
        q, k, v = x.split([num_key_heads * DIM, num_key_heads * DIM, num_heads * DIM], 1)
        q, k, v = (y.reshape(len(x), -1, DIM) for y in (q, k, v))
        state, states, outputs = x.new_zeros(num_heads, DIM, DIM), [], []
        none = Rows(k[:0], v[:0], g[:0])
        rows = none
        for part in torch.arange(len(x), device=self.device).split(INTERVAL):
            out, rows = delta_rule(
                state, none, q[part], k[part], v[part], g[part], beta[part]
            )  # fmt: skip
            outputs.append(out)
            if len(part) == INTERVAL:
                state = next_state(state, rows)
                states.append(state)
                rows = none
        return torch.cat(outputs), states, rows.updates
