"""The interface between attention layers and attention backends.

Axes: T tokens of this step, N query heads, K key/value heads, H head dim, V dims of a value (heads
are those of the rank).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from torch import Tensor

from minisgl.core import Plan, PoolBatch

ATTENTION_BACKENDS: Final = ("auto", "cpu", "torch")
"""The values of `--attn` on a CPU. On a GPU they are auto, torch, one of `CUDA_BACKENDS`, or two
names as PREFILL,DECODE."""
CUDA_BACKENDS: Final = ("triton", "fa")
PREFILL_BACKENDS: Final = ("fa2", "fi")  # only as PREFILL
DECODE_BACKENDS: Final = ("trtllm",)  # only as DECODE

SINKS: Final = "sinks"
SOFTCAP: Final = "softcap"
KV_SHARING: Final = "layer that reads another's keys and values"
LATENTS: Final = "attention to latents"
"""What some models need of a backend. The backends cpu and torch serve all needs;
`minisgl.attention.cuda.SERVED` says what the others serve."""


class Sinks(Protocol):
    """weight: float32 [N], one more logit for each query head, in the softmax over the keys. It has
    no value (Xiao et al. 2024, as in gpt-oss)."""

    weight: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class AttnLayer:
    """The constants of one attention layer; `num_q_heads` is a multiple of `num_kv_heads`.

    pool: the index of its pool in `Batch.pools`. layer_id: the layer's index in that pool. scale:
    multiplies q @ k. latent: V, if a key's first V dims are its value, so that backends get the
    keys as values; None if values are tensors of their own, with H dims. window: a query at
    position i sees the keys in (i - window, i], as in Hugging Face's sliding window; None is all of
    [0, i]. two_way: a query of an image that is computed whole also sees the image's later keys
    (`PoolBatch.key_ends`). softcap: scores s become softcap * tanh(s / softcap). sinks: None if the
    heads have none.
    """

    pool: int = 0
    layer_id: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    latent: int | None = None
    window: int | None = None
    two_way: bool = False
    softcap: float | None = None
    sinks: Sinks | None = None


class QKVSteps(Protocol):
    """The steps between q/k/v projection and attention: `split`, and its weights for fused kernels.

    q_norm_weight, k_norm_weight: [H], or None if the family does not norm queries and keys.
    norm_eps: the epsilon of these norms. cos_sin: float32 [P, R], see `Ops.apply_rope`. by_place: a
    token's position is its place in the request, so a kernel need not read `PoolBatch.positions`.
    norms_values: values are normed too, without a weight.
    """

    layer: AttnLayer
    norms_values: bool

    @property
    def q_norm_weight(self) -> Tensor | None: ...
    @property
    def k_norm_weight(self) -> Tensor | None: ...
    @property
    def norm_eps(self) -> float: ...
    @property
    def cos_sin(self) -> Tensor: ...
    @property
    def by_place(self) -> bool: ...

    def split(self, qkv: Tensor, positions_T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[T, (N + 2K) * H] -> q [T, N, H] and k [T, K, H], normed and rotated; v [T, K, H]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseAttnMetadata:
    """Data that a backend derives from a plan once per step, for all layers. memo: see `once`."""

    memo: dict[str, Any] = field(default_factory=dict)

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """Return the result of `make`, which only the step's first layer calls. name: of the
        result."""
        if name not in self.memo:
            self.memo[name] = make()
        return self.memo[name]


class BaseAttnBackend(ABC):
    """Attention over the paged KV cache. The metadata holds the state of a step, not the backend.

    graph_safe: decode rows read everything that changes between steps from device memory, so that
    their launches can be captured and replayed. prompts_graph_safe: prompt rows do, too; see
    `prepare_any`. reads_window_only: keys before a layer's window are never read, even masked.
    takes_queries: `forward_qkv` takes only queries, for a layer that reads the keys and values of
    another. takes_two_way: prompts may have layers that are `two_way`. short_rows: decode steps of
    up to so many rows have kernels of their own if all contexts are short
    (`PagedMetadata.is_short`).
    """

    name: str
    graph_safe = False
    prompts_graph_safe = False
    reads_window_only = False
    takes_queries = False
    takes_two_way = False
    short_rows = 0

    @abstractmethod
    def prepare(self, plan: Plan) -> BaseAttnMetadata:
        """Return the step's metadata, for `PoolBatch.attn_metadata`."""

    def prepare_any(self, num_rows: int, num_tokens: int, longest: int) -> BaseAttnMetadata:
        """Return metadata for capturing a graph. It is valid for every step up to this size.

        num_rows, num_tokens: the most prompt rows and prompt tokens. longest: the longest context.
        A smaller step is padded with rows that have no tokens, and then with tokens that belong to
        no row; their output is 0. Only for backends with `prompts_graph_safe`.
        """
        raise AssertionError(f"{self.name} is not prompts_graph_safe: no graph is captured")

    def forward_qkv(self, qkv: Tensor, steps: QKVSteps, batch: PoolBatch) -> Tensor:
        """Attend with the projected q, k and v, which are side by side. Returns [T, N * H].

        A backend that norms, rotates and stores in one fused kernel overrides this.
        """
        q_TNH, k_TKH, v_TKH = steps.split(qkv, batch.positions)
        return self.forward(q_TNH, k_TKH, v_TKH, steps.layer, batch).flatten(1)

    @abstractmethod
    def forward(
        self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, layer: AttnLayer, batch: PoolBatch
    ) -> Tensor:
        """Store k and v at `batch.slots` and attend causally. Returns [T, N, V] in q's dtype.

        The tokens are those of row 0, then row 1, ... All of k and v are stored before any row
        attends, because a row may read pages that another row of the step writes. Row r's keys are
        at positions [0, ends[r]) of the pages in `batch.context.page_table[table_idxs[r]]`; no
        later positions are read. Pages and slots are not checked. Raises ValueError if k and v do
        not fit the pool.
        """
