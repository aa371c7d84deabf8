"""What turns texts into prompts to pool, and pooled rows into vectors and scores.

`minisgl_zoo.pooling` has it: `plugins.need("pooling", "recipe", ...)` is `ReadRecipe`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, Protocol, TypeVar

from minisgl import plugins
from minisgl.core.req import FloatArray
from minisgl.core.sampling import PoolingKind, SamplingParams
from minisgl.errors import RequestError
from minisgl.message import Prompt

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pooling(Generic[T]):
    """The prompts of one call. finish: makes the result of their rows (`Finished.pooled`). about:
    the argument that a refusal of each prompt is about, such as documents[1]; empty if prompts are
    called prompts."""

    prompts: Sequence[Prompt]
    sampling: SamplingParams
    finish: Callable[[Sequence[bytes]], T]
    about: Sequence[str] = ()

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Let a refusal that the block raises name its argument instead of its prompt."""
        try:
            yield
        except RequestError as error:
            param = error.param or ""
            at = re.match(r"prompt[ [](\d+)\]?: ", error.message)
            if self.about and (at or param == "prompt"):
                name = self.about[int(at[1]) if at else 0]
                error.param = name if param.startswith("prompt") else param
                error.message = f"{name}: {error.message[at.end() if at else 0 :]}"
            raise


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
        context: int | None = None,
    ) -> Pooling[FloatArray]:
        """Return the prompts that embed texts, as rows of float32 [N, D]. Raises InvalidRequest.

        prompt_name: of the released prompt that is put before each text. dimensions: keep so many,
        the first ones. pooling: instead of the checkpoint's. max_tokens: longer texts are cut; -1
        is the most for a model that has this `context`.
        """

    def rank(
        self,
        queries: Sequence[str],
        documents: Sequence[str],
        *,
        instruction: str | None = None,
        max_tokens: int | None = None,
        context: int | None = None,
    ) -> Pooling[list[float]]:
        """Return the prompts that score documents for a query, or each for one of its own.

        Rerankers read pairs, and embedders compare. instruction: what counts as relevant, for
        rerankers that read it. The others are those of `embed`; of a pair, the document is cut.
        Raises InvalidRequest.
        """


OnlyTask = Literal["", "embeddings", "rerank"]


def only_task(config: Mapping[str, Any]) -> OnlyTask:
    """Return what the model of a config.json does if it writes no text: an encoder embeds, or with
    a head scores pairs."""
    names = config.get("architectures") or [""]
    name = str(names[0]) if isinstance(names, list) else ""
    if plugins.row_of("encoders", name) is None:
        return ""
    return "rerank" if name.endswith("ForSequenceClassification") else "embeddings"


ReadRecipe = Callable[[Path], Recipe]
