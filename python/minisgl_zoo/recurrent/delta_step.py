"""What the kernels of the delta rule, and of Mamba2, read and write in a step on a GPU.

Axes: T tokens of this step, B rows, N value heads, K key heads, H key dim, V value dim, S slots.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


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
