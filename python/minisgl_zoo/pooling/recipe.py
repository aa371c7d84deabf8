"""How a checkpoint embeds, as its files say it.

sentence-transformers writes `modules.json`, which names a folder with the pooling's config.json,
and `config_sentence_transformers.json` with the texts that are put before a query or a document. A
GGUF file has the pooling in its metadata. A model without either embeds by its last token,
normalised. Sources: the files of Qwen3-Embedding, E5-Mistral and GTE-Qwen2; the configs that
sentence-transformers 6.2 writes; llama.cpp's enumeration of poolings.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import cycle, repeat
from numbers import Integral
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from minisgl.core.req import FloatArray
from minisgl.core.sampling import PoolingKind, SamplingParams
from minisgl.errors import CheckpointError, InvalidRequest, InvalidSampling
from minisgl.message import Prompt, TextPrompt
from minisgl.message.pooling import Pooling, only_task
from minisgl.tokenizer.tokenizer import read_json_object
from minisgl.utils.hf import read_json
from minisgl.utils.text import brief, counted
from minisgl_zoo.pooling.cross_encoder import Activation, activation_of, joined_pairs
from minisgl_zoo.pooling.dense import Dense, gguf_dense, read_dense
from minisgl_zoo.pooling.rerank import asked_pairs

POOLINGS: Final = ("last", "mean", "cls")
_MODES: Final[Mapping[str, PoolingKind]] = {"lasttoken": "last", "mean": "mean", "cls": "cls"}
"""sentence-transformers' names -> ours. Older files have flags: pooling_mode_mean_tokens."""
_FLAG: Final = "pooling_mode_"
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
    if given.get("logit_ids") and given["pooling"] == "mean":
        raise InvalidSampling("logit_ids are of one token: pooling last or cls", param="pooling")
    for name in ("prompt_logprobs", "echo", "structured_outputs", "logprobs"):
        if given.get(name) not in (None, False):
            raise InvalidSampling(f"{name} needs an output, which pooling has not", param=name)
    return {"max_tokens": 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a checkpoint embeds (`minisgl.message.pooling.Recipe`).

    size: of a pooled row. dense: the layers behind it. normalises: vectors get the length 1.
    prompts: texts to put before a text, by name. default: the name of the one for texts without
    another. longest: the most tokens that the checkpoint was trained for; None if it does not say.
    is_encoder: its context is for a text alone. lowers: texts get lower case before they are
    tokenized. activation: of a cross-encoder, which scores pairs and does not embed.
    """

    folder: Path
    size: int
    pooling: PoolingKind = "last"
    dense: tuple[Dense, ...] = ()
    normalises: bool = True
    is_embedder: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    default: str | None = None
    longest: int | None = None
    is_encoder: bool = False
    lowers: bool = False
    activation: Activation | None = None

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
        if self.activation:
            raise InvalidRequest(
                "this model is a cross-encoder: it scores pairs of texts (/rerank, LLM.score) and "
                "has no embeddings; serve an embedder for these",
                param="model",
            )
        if prompt_name not in (None, *self.prompts):
            known = f"; it has {', '.join(self.prompts)}" if self.prompts else ""
            raise InvalidRequest(
                f"this checkpoint has no prompt {brief(prompt_name)}{known}", param="prompt_name"
            )
        most = len(self.dense[-1].weight_OI) if self.dense else self.size
        if dimensions is not None and not (_is_whole(dimensions) and 1 <= dimensions <= most):
            raise InvalidRequest(
                f"dimensions must be 1 to {most}, got {brief(dimensions)}", param="dimensions"
            )
        max_tokens = self._most(max_tokens, context)
        before = self.prompts.get(prompt_name or self.default or "", "")

        def vectors(rows: Sequence[bytes]) -> FloatArray:
            x_ND = self._rows(rows)[:, :dimensions]
            return _normalised(x_ND) if self.normalises else x_ND

        return Pooling(
            prompts=[self._begun(text, before, max_tokens) for text in texts],
            sampling=SamplingParams(
                pooling=pooling or self.pooling, truncate_prompt_tokens=max_tokens
            ),
            finish=vectors,
        )

    def rank(
        self,
        queries: Sequence[str],
        documents: Sequence[str],
        *,
        instruction: str | None = None,
        max_tokens: int | None = None,
        context: int | None = None,
    ) -> Pooling[list[float]]:
        _check_texts(queries, "query")
        _check_texts(documents, "documents")
        if not isinstance(instruction, str | None):
            raise InvalidRequest(
                f"instruction must be a text, got {brief(instruction)}", param="instruction"
            )
        if len(queries) not in (1, len(documents)):
            raise InvalidRequest(
                f"there must be one query, or one for each of {counted(len(documents), 'document')}"
                f", got {len(queries)}",
                param="query",
            )
        asked_by = ["query"] if len(queries) == 1 else [f"query[{i}]" for i in range(len(queries))]
        ranked = [f"documents[{i}]" for i in range(len(documents))]
        texts = dict(zip((*asked_by, *ranked), (*queries, *documents), strict=True))
        texts["instruction"] = instruction or ""
        names = list(zip(cycle(asked_by), ranked, repeat("instruction"), strict=False))
        pairs = [(texts[query], texts[document]) for query, document, _ in names]
        about = [max(each, key=lambda name: len(texts[name])) for each in names]
        if not self.is_embedder and not self.activation:
            if max_tokens is not None:
                raise InvalidRequest(
                    "truncate_prompt_tokens is for embedders and cross-encoders, and this model is "
                    "asked about the document behind it; shorten the documents",
                    param="truncate_prompt_tokens",
                )
            return replace(asked_pairs(self.folder, pairs, instruction), about=about)
        if instruction is not None:
            raise InvalidRequest(
                "instruction is for rerankers that read one, and this model reads a query and a "
                "document alone; write it into the query",
                param="instruction",
            )
        max_tokens = self._most(max_tokens, context)
        if self.activation:
            return replace(joined_pairs(pairs, self.activation, max_tokens), about=about)
        asked = self.prompts.get("query", "")
        kinds = ("document", "passage", "corpus")
        before = next((self.prompts[kind] for kind in kinds if kind in self.prompts), "")
        begun = [(asked, query) for query in queries] + [(before, text) for text in documents]

        def cosines(rows: Sequence[bytes]) -> list[float]:
            x_ND, first = _normalised(self._rows(rows)), len(queries)
            scores: list[float] = (x_ND[first:] * x_ND[:first]).sum(1).tolist()
            return scores

        return Pooling(
            prompts=[
                self._begun(TextPrompt(text=text), before, max_tokens) for before, text in begun
            ],
            sampling=SamplingParams(pooling=self.pooling, truncate_prompt_tokens=max_tokens),
            finish=cosines,
            about=[*asked_by, *ranked],
        )

    def _most(self, max_tokens: int | None, context: int | None) -> int | None:
        """Return the most tokens of a text; None is no limit, -1 what a model of this context
        takes. Raises InvalidSampling."""
        if max_tokens is not None and not _is_whole(max_tokens):
            raise InvalidSampling(
                f"truncate_prompt_tokens must be a whole number, got {brief(max_tokens)}",
                param="truncate_prompt_tokens",
            )
        if max_tokens == -1:  # a decoder has one left for the output that an answer would have
            max_tokens = context - (not self.is_encoder) if context else None
        if max_tokens is not None and self.longest is not None:
            max_tokens = min(max_tokens, self.longest)
        return max_tokens

    def _begun(self, text: Prompt, before: str, max_tokens: int | None = None) -> Prompt:
        """Return the text behind its prompt. Token ids stay as they are."""
        if not isinstance(text, TextPrompt):
            return text
        whole = before + text.text
        if max_tokens is not None:
            whole = whole[: _CHARACTERS * max_tokens]
        return msgspec.structs.replace(text, text=whole.lower() if self.lowers else whole)

    def _rows(self, rows: Sequence[bytes]) -> FloatArray:
        x_ND: FloatArray = np.frombuffer(b"".join(rows), "<f4").reshape(len(rows), self.size)
        for layer in self.dense:
            x_ND = layer(x_ND)
        return x_ND


def _is_whole(number: Any) -> bool:
    return isinstance(number, Integral) and not isinstance(number, bool)


def _check_texts(texts: Any, param: str) -> None:
    """Raise InvalidRequest unless `texts` is a list of texts, or an array of them."""
    is_list = isinstance(texts, Collection) and not isinstance(texts, str | Mapping | Set)
    if not is_list or not all(isinstance(text, str) for text in texts):
        raise InvalidRequest(f"{param} must be a list of texts, got {brief(texts)}", param=param)


def read_recipe(folder: Path) -> Recipe:
    """Return the recipe of a checkpoint. Raises CheckpointError for one that cannot be followed."""
    config = read_json(folder / "config.json")
    task = only_task(config)
    is_two_way = config.get("is_causal") is False or config.get("use_bidirectional_attention")
    if is_two_way and not task:
        raise CheckpointError(
            f"{folder} embeds with attention in both directions, and a decoder here attends to "
            "earlier tokens only; serve it with sentence-transformers or text-embeddings-inference"
        )
    owner = config.get("text_config") or config
    size = owner.get("hidden_size") or config.get("hidden_size") or config.get("n_embd")
    if not size:
        raise CheckpointError(f"{folder}/config.json: hidden_size is missing; expected an integer")
    plain = Recipe(folder=folder, size=size)
    if task:
        plain = replace(plain, is_encoder=True)
        if task == "rerank":
            return replace(plain, activation=activation_of(folder, config))
        # Without files that say more, sentence-transformers takes the mean.
        plain = replace(plain, pooling="mean", normalises=False, is_embedder=True)
    if of_gguf := GGUF_POOLINGS.get(config.get("pooling_type", 0)):
        plain = replace(plain, pooling=of_gguf, normalises=True, is_embedder=True)
        return replace(plain, dense=gguf_dense(folder))
    file = folder / "modules.json"
    if not file.is_file():
        return plain
    try:
        modules = msgspec.json.decode(file.read_bytes(), type=list[dict[str, Any]])
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"{file} does not hold a list of modules: {error}") from error
    named = [
        (str(module["type"]).rpartition(".")[2], folder / str(module["path"])) for module in modules
    ]
    kinds = [kind for kind, _ in named]
    if "Pooling" not in kinds:
        return plain
    if others := set(kinds) - {"Transformer", "Pooling", "Dense", "Normalize"}:
        raise CheckpointError(
            f"{file} has the modules {', '.join(sorted(others))}, which are not supported; "
            "embeddings need a checkpoint with Transformer, Pooling, Dense and Normalize alone"
        )
    saved = read_json_object(folder / "config_sentence_transformers.json")
    sizes = read_json_object(folder / "sentence_bert_config.json")
    return replace(
        plain,
        pooling=_pooling_of(dict(named)["Pooling"] / "config.json"),
        dense=tuple(read_dense(at) for kind, at in named if kind == "Dense"),
        normalises="Normalize" in kinds,
        is_embedder=True,
        prompts=saved.get("prompts") or {},
        default=saved.get("default_prompt_name"),
        longest=sizes.get("max_seq_length"),
        lowers=bool(sizes.get("do_lower_case")),
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
        flag.removeprefix(_FLAG).removesuffix("s").removesuffix("_token")
        for flag, is_set in config.items()
        if flag.startswith(_FLAG) and is_set
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


def _normalised(x_ND: FloatArray) -> FloatArray:
    lengths_N1 = np.maximum(np.linalg.norm(x_ND, axis=1, keepdims=True), 1e-12)  # 0: no division
    normalised: FloatArray = (x_ND / lengths_N1).astype(np.float32)
    return normalised
