"""What turns texts into prompts to pool, and pooled rows into vectors and scores.

`minisgl_zoo.pooling` has it: `plugins.need("pooling", "recipe", ...)` is `ReadRecipe`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from minisgl.core.sampling import PoolingKind, SamplingParams
from minisgl.message import Prompt


class Pooling(Protocol):
    """The prompts of one call. scores, vectors: of its prompts' rows (`Finished.pooled`)."""

    @property
    def prompts(self) -> Sequence[Prompt]: ...
    @property
    def sampling(self) -> SamplingParams: ...

    def vectors(self, rows: Sequence[bytes]) -> Sequence[bytes]:
        """Return the embeddings, little-endian float32. Raises InvalidRequest."""

    def scores(self, rows: Sequence[bytes]) -> list[float]:
        """Return the score of each document."""


class Recipe(Protocol):
    """How a checkpoint embeds. is_embedder: whether its files say so."""

    @property
    def is_embedder(self) -> bool: ...

    def embed(
        self,
        texts: Sequence[Prompt],
        *,
        prompt_name: str | None = None,
        dimensions: int | None = None,
        pooling: PoolingKind | None = None,
        max_tokens: int | None = None,
    ) -> Pooling:
        """Return the prompts that embed texts. Raises InvalidRequest.

        prompt_name: of the released prompt that is put before each text. dimensions: keep so many,
        the first ones. pooling: instead of the checkpoint's. max_tokens: longer texts are cut.
        """

    def rank(
        self, queries: Sequence[str], documents: Sequence[str], *, instruction: str | None = None
    ) -> Pooling:
        """Return the prompts that score documents for a query, or each for one of its own.

        Rerankers read pairs, and embedders compare. instruction: what counts as relevant, for
        rerankers. Raises InvalidRequest.
        """


ReadRecipe = Callable[[Path], Recipe]
