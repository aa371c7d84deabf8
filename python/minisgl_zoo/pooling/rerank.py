"""Scores documents for a query by the logits of "yes" and "no", as Qwen3-Reranker does.

The prompt is that of its model card: an instruction, the query and one document. The score is the
share of "yes" in the probabilities of both at the prompt's end. The chat template writes the turns,
so any chat model can be asked; a template with the roles "query" and "document", as
sentence-transformers saves them, gets these. Source: the card of Qwen3-Reranker-0.6B.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any, Final

import numpy as np

from minisgl.core.sampling import SamplingParams
from minisgl.errors import InvalidRequest
from minisgl.message import ChatPrompt
from minisgl.tokenizer.tokenizer import load_tokenizer_config
from minisgl.utils.hf import read_json

SYSTEM: Final = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".'
)
INSTRUCTION: Final = "Given a web search query, retrieve relevant passages that answer the query"
_SPELLINGS: Final = ("{}", "\N{LOWER ONE EIGHTH BLOCK}{}")
"""How a vocabulary has a word: as it is, or behind sentencepiece's mark of a space."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """The prompts of pairs (`minisgl.message.pooling.Pooling`)."""

    prompts: Sequence[ChatPrompt]
    sampling: SamplingParams

    def vectors(self, rows: Sequence[bytes]) -> Sequence[bytes]:
        raise AssertionError("pairs have no vectors")

    def scores(self, rows: Sequence[bytes]) -> list[float]:
        logits = [np.frombuffer(row, "<f4").astype(float).tolist() for row in rows]
        return [1 / (1 + math.exp(min(no - yes, 700.0))) for yes, no in logits]


def pairs_of(
    folder: Path, queries: Sequence[str], documents: Sequence[str], instruction: str | None
) -> Pairs:
    """Return the prompts of each document with the only query, or with its own.

    Raises InvalidRequest for a vocabulary without "yes" and "no".
    """
    has_roles = _has_roles(folder)
    return Pairs(
        prompts=[
            ChatPrompt(
                messages=_turns(query, document, instruction or INSTRUCTION, has_roles=has_roles),
                template_args={"enable_thinking": False},
            )
            for query, document in zip(cycle(queries), documents, strict=False)
        ],
        sampling=SamplingParams(pooling="last", logit_ids=_labels(folder)),
    )


def _turns(query: str, document: str, instruction: str, *, has_roles: bool) -> list[dict[str, Any]]:
    text = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    turns = [("system", SYSTEM), ("user", text)]
    if has_roles:
        turns = [("system", instruction), ("query", query), ("document", document)]
    return [{"role": role, "content": content} for role, content in turns]


@cache
def _has_roles(folder: Path) -> bool:
    file = folder / "chat_template.jinja"
    if file.is_file():
        template = file.read_text(encoding="utf-8")
    else:
        template = str(load_tokenizer_config(folder).get("chat_template"))
    return all(f'"{role}"' in template.replace("'", '"') for role in ("query", "document"))


@cache
def _labels(folder: Path) -> tuple[int, int]:
    """Return the ids of "yes" and "no". The checkpoint may name them (LogitScore)."""
    for file in folder.glob("*LogitScore/config.json"):
        config = read_json(file)
        return int(config["true_token_id"]), int(config["false_token_id"])
    file = folder / "tokenizer.json"
    vocab = read_json(file)["model"]["vocab"] if file.is_file() else {}
    if isinstance(vocab, list):
        vocab = {token: index for index, (token, *_) in enumerate(vocab)}
    for spelling in _SPELLINGS:
        yes, no = (vocab.get(spelling.format(word)) for word in ("yes", "no"))
        if yes is not None and no is not None:
            return int(yes), int(no)
    raise InvalidRequest(
        'this model cannot rank documents: its vocabulary has no tokens "yes" and "no", and it is '
        "no embedder; serve a reranker or an embedder, such as Qwen3-Reranker-0.6B"
    )
