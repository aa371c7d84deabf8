"""What a layer asks of attention, and what a backend must hold to.

Axes: T tokens of this step, N query heads, K key/value heads, H head dim (all local to the rank).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from minisgl.core import Plan, PoolBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class AttnLayer:
    """The constants of one attention layer; `num_q_heads` is a multiple of `num_kv_heads`.

    pool: its number in `Batch.pools`. layer_id: the layer's index in that pool. scale: multiplies
    q @ k. window: a query at position i sees the keys in (i - window, i], as in Hugging Face's
    sliding window; None is all of [0, i].
    """

    pool: int = 0
    layer_id: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None


class QKVSteps(Protocol):
    """What happens to projected queries, keys and values before attention, and the parts of it.

    q_norm_weight, k_norm_weight: [H], or None where the family has no norm of queries and keys.
    norm_eps: theirs. cos_sin: float32 [P, R], see `Ops.apply_rope`.
    """

    layer: AttnLayer

    @property
    def q_norm_weight(self) -> Tensor | None: ...
    @property
    def k_norm_weight(self) -> Tensor | None: ...
    @property
    def norm_eps(self) -> float: ...
    @property
    def cos_sin(self) -> Tensor: ...

    def split(self, qkv: Tensor, positions_T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[T, (N + 2K) * H] -> q [T, N, H] and k [T, K, H], normed and rotated; v [T, K, H]."""


class BaseAttnMetadata:
    """What a backend derives from a plan once per step, for all layers."""


class BaseAttnBackend(ABC):
    """One way to attend over the paged cache. Holds no state of a step: that is the metadata.

    graph_safe: decode reads what changes from step to step on the device, so that its launches
    can be captured once and replayed. prompts_graph_safe: the others do so too, see `prepare_any`.
    reads_window_only: no key behind a layer's window is read, not even to be masked.
    """

    name: str
    graph_safe = False
    prompts_graph_safe = False
    reads_window_only = False

    @abstractmethod
    def prepare(self, plan: Plan) -> BaseAttnMetadata:
        """The step's metadata, for `Batch.attn_metadata`."""

    def prepare_any(self, num_rows: int, num_tokens: int, longest: int) -> BaseAttnMetadata:
        """Metadata for every step with at most so many rows after the decode rows, tokens of these
        and of one's context: what a graph is captured with. Such a step is padded with rows of no
        tokens, and with tokens of no row behind them; what is attended for those is 0.

        Only where prompts_graph_safe.
        """
        raise AssertionError(f"{self.name} is not prompts_graph_safe: no graph is captured")

    def forward_qkv(self, qkv: Tensor, steps: QKVSteps, batch: PoolBatch) -> Tensor:
        """From projected q, k, v, side by side, to attended heads, [T, N * H].

        A backend that norms, rotates and stores in one kernel of its own replaces this.
        """
        q_TNH, k_TKH, v_TKH = steps.split(qkv, batch.positions)
        return self.forward(q_TNH, k_TKH, v_TKH, steps.layer, batch).flatten(1)

    @abstractmethod
    def forward(
        self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, layer: AttnLayer, batch: PoolBatch
    ) -> Tensor:
        """Store k and v at `batch.slots`, attend causally; [T, N, H] in q's dtype.

        T is the plan's tokens, rows one after another. All of k and v are stored before any row
        attends: a row may read pages that another row of the same step writes. Row r's keys are
        at positions [0, ends[r]) of the pages in `batch.context.page_table[table_idxs[r]]`;
        nothing past them is read. Pages and slots are trusted. Raises ValueError when k and v do
        not fit the pool.
        """
