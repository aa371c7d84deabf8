"""How a checkpoint embeds, as its files say it.

sentence-transformers writes `modules.json`, which names a folder with the pooling's config.json,
and `config_sentence_transformers.json` with the texts that are put before a query or a document. A
GGUF file has the pooling in its metadata. A model without either embeds by its last token,
normalised. Sources: the files of Qwen3-Embedding, E5-Mistral and GTE-Qwen2; the configs that
sentence-transformers 6.2 writes; llama.cpp's enumeration of poolings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from minisgl.core.req import FloatArray
from minisgl.core.sampling import PoolingKind, SamplingParams
from minisgl.errors import CheckpointError, InvalidRequest, InvalidSampling
from minisgl.message import Prompt, TextPrompt
from minisgl.utils.hf import read_json
from minisgl.utils.text import brief, counted
from minisgl_zoo.pooling.rerank import Pairs, pairs_of

POOLINGS: Final = ("last", "mean", "cls")
_MODES: Final[Mapping[str, PoolingKind]] = {"lasttoken": "last", "mean": "mean", "cls": "cls"}
"""sentence-transformers' names -> ours."""
_FLAGS: Final = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
"""The flags of older files -> the names of later ones."""
GGUF_POOLINGS: Final[Mapping[int, PoolingKind]] = {1: "mean", 2: "cls", 3: "last"}
_CHARACTERS: Final = 16
"""Of a text that is cut at a number of tokens, so many characters for each are read: a word and its
space have fewer, and the rest would be tokenized for nothing."""


def checked(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that `SamplingParams.pooling` sets. Raises InvalidSampling."""
    if given["pooling"] not in POOLINGS:
        raise InvalidSampling(
            f"pooling must be {', '.join(POOLINGS[:-1])} or {POOLINGS[-1]}, got "
            f"{brief(given['pooling'])}",
            param="pooling",
        )
    for name in ("prompt_logprobs", "echo", "structured_outputs", "logprobs"):
        if given.get(name) not in (None, False):
            raise InvalidSampling(f"{name} needs an output, which pooling has not", param=name)
    return {"max_tokens": 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Embeds:
    """The prompts of texts (`minisgl.message.pooling.Pooling`). num_queries: so many come first;
    the others are compared with the only one, or each with its own."""

    prompts: Sequence[Prompt]
    sampling: SamplingParams
    size: int
    normalises: bool = True
    dimensions: int | None = None
    num_queries: int = 0

    def vectors(self, rows: Sequence[bytes]) -> list[bytes]:
        x_ND = _rows_of(rows, self.size)[:, : self.dimensions]
        x_ND = _normalised(x_ND) if self.normalises else x_ND
        return [x_D.tobytes() for x_D in x_ND]

    def scores(self, rows: Sequence[bytes]) -> list[float]:
        x_ND = _normalised(_rows_of(rows, self.size))
        queries_QD, documents_ND = x_ND[: self.num_queries], x_ND[self.num_queries :]
        similarities: list[float] = (documents_ND * queries_QD).sum(1).tolist()
        return similarities


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a checkpoint embeds (`minisgl.message.pooling.Recipe`).

    size: of a vector. normalises: vectors get the length 1. prompts: texts to put before a text, by
    name. default: the name of the one for texts without another. longest: the most tokens that the
    checkpoint was trained for; None if it does not say.
    """

    folder: Path
    size: int
    pooling: PoolingKind = "last"
    normalises: bool = True
    is_embedder: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    default: str | None = None
    longest: int | None = None

    def embed(
        self,
        texts: Sequence[Prompt],
        *,
        prompt_name: str | None = None,
        dimensions: int | None = None,
        pooling: PoolingKind | None = None,
        max_tokens: int | None = None,
    ) -> Embeds:
        if prompt_name is not None and prompt_name not in self.prompts:
            known = f"; it has {', '.join(self.prompts)}" if self.prompts else ""
            raise InvalidRequest(
                f"this checkpoint has no prompt {brief(prompt_name)}{known}", param="prompt_name"
            )
        if dimensions is not None and not 1 <= dimensions <= self.size:
            raise InvalidRequest(
                f"dimensions must be 1 to {self.size}, got {brief(dimensions)}", param="dimensions"
            )
        if max_tokens is not None and self.longest is not None:
            max_tokens = min(max_tokens, self.longest)
        before = self.prompts.get(prompt_name or self.default or "", "")
        return Embeds(
            prompts=[_begun(text, before, max_tokens) for text in texts],
            sampling=SamplingParams(
                pooling=pooling or self.pooling, truncate_prompt_tokens=max_tokens
            ),
            size=self.size,
            normalises=self.normalises,
            dimensions=dimensions,
        )

    def rank(
        self, queries: Sequence[str], documents: Sequence[str], *, instruction: str | None = None
    ) -> Embeds | Pairs:
        if len(queries) not in (1, len(documents)):
            raise InvalidRequest(
                f"there must be one query, or one for each of {counted(len(documents), 'document')}"
                f", got {len(queries)}",
                param="query",
            )
        if not self.is_embedder:
            return pairs_of(self.folder, queries, documents, instruction)
        if instruction is not None:
            raise InvalidRequest(
                "instruction is for rerankers, and this model compares embeddings; write it into "
                "the query",
                param="instruction",
            )
        asked = self.prompts.get("query", "")
        names = ("document", "passage", "corpus")
        about = next((self.prompts[name] for name in names if name in self.prompts), "")
        texts = [asked + query for query in queries] + [about + text for text in documents]
        return Embeds(
            prompts=[TextPrompt(text=text) for text in texts],
            sampling=SamplingParams(pooling=self.pooling),
            size=self.size,
            num_queries=len(queries),
        )


def read_recipe(folder: Path) -> Recipe:
    """Return the recipe of a checkpoint. Raises CheckpointError for one that cannot be followed."""
    config = read_json(folder / "config.json")
    if config.get("is_causal") is False or config.get("use_bidirectional_attention"):
        raise CheckpointError(
            f"{folder} embeds with attention in both directions, and a decoder here attends to "
            "earlier tokens only; serve it with sentence-transformers or text-embeddings-inference"
        )
    size = (config.get("text_config") or {}).get("hidden_size") or config.get("hidden_size")
    if not size:
        raise CheckpointError(f"{folder}/config.json: hidden_size is missing; expected an integer")
    plain = Recipe(folder=folder, size=size)
    if of_gguf := GGUF_POOLINGS.get(config.get("pooling_type", 0)):
        return replace(plain, pooling=of_gguf, is_embedder=True)
    file = folder / "modules.json"
    if not file.is_file():
        return plain
    named = {str(module["type"]).rpartition(".")[2]: module for module in _list_of(file)}
    if "Pooling" not in named:
        return plain
    if others := set(named) - {"Transformer", "Pooling", "Normalize"}:
        raise CheckpointError(
            f"{file} has the modules {', '.join(sorted(others))}, which are not supported; "
            "embeddings need a checkpoint with Transformer, Pooling and Normalize alone"
        )
    saved = _optional(folder / "config_sentence_transformers.json")
    return replace(
        plain,
        pooling=_pooling_of(folder / str(named["Pooling"]["path"]) / "config.json"),
        normalises="Normalize" in named,
        is_embedder=True,
        prompts=saved.get("prompts") or {},
        default=saved.get("default_prompt_name"),
        longest=_optional(folder / "sentence_bert_config.json").get("max_seq_length"),
    )


def capabilities(folder: Path) -> list[str]:
    """Return what the checkpoint is made for beside completions, in the words of Ollama's lists."""
    try:
        return ["embedding"] if read_recipe(folder).is_embedder else []
    except CheckpointError:
        return []


def _pooling_of(file: Path) -> PoolingKind:
    config = read_json(file)
    modes = config.get("pooling_mode") or [
        mode for flag, mode in _FLAGS.items() if config.get(flag)
    ]
    modes = [modes] if isinstance(modes, str) else list(modes or ["mean"])
    if len(modes) != 1 or modes[0] not in _MODES:
        raise CheckpointError(
            f"{file}: the pooling {' and '.join(map(str, modes))} is not supported; expected one "
            f"of {', '.join(_MODES)}"
        )
    if config.get("include_prompt") is False:
        raise CheckpointError(
            f"{file}: include_prompt is false, and only whole prompts are pooled here"
        )
    return _MODES[modes[0]]


def _begun(text: Prompt, before: str, max_tokens: int | None) -> Prompt:
    """Return the text behind its prompt. Token ids stay as they are."""
    if not isinstance(text, TextPrompt):
        return text
    whole = before + text.text
    if max_tokens is not None:
        whole = whole[: _CHARACTERS * max_tokens]
    return msgspec.structs.replace(text, text=whole)


def _rows_of(rows: Sequence[bytes], size: int) -> FloatArray:
    return np.frombuffer(b"".join(rows), "<f4").reshape(len(rows), size)


def _normalised(x_ND: FloatArray) -> FloatArray:
    lengths_N1 = np.maximum(np.linalg.norm(x_ND, axis=1, keepdims=True), 1e-12)  # 0: no division
    normalised: FloatArray = (x_ND / lengths_N1).astype(np.float32)
    return normalised


def _list_of(file: Path) -> list[dict[str, Any]]:
    try:
        return msgspec.json.decode(file.read_bytes(), type=list[dict[str, Any]])
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"{file} does not hold a list of modules: {error}") from error


def _optional(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}
