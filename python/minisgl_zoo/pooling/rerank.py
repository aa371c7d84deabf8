"""Scores documents for a query by the logits of "yes" and "no", as Qwen3-Reranker does.

The prompt is that of its model card: an instruction, the query and one document. The score is the
share of "yes" in the probabilities of both at the prompt's end. The chat template writes the turns,
so any chat model can be asked; a template with the roles "query" and "document", as
sentence-transformers saves them, gets these. Source: the card of Qwen3-Reranker-0.6B.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np

from minisgl.core.sampling import SamplingParams
from minisgl.errors import InvalidRequest
from minisgl.message import ChatPrompt
from minisgl.message.pooling import Pooling
from minisgl.tokenizer.tokenizer import load_tokenizer, load_tokenizer_config
from minisgl.utils.hf import read_json

SYSTEM: Final = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".'
)
INSTRUCTION: Final = "Given a web search query, retrieve relevant passages that answer the query"
_SPELLINGS: Final = ("{}", "\N{LOWER ONE EIGHTH BLOCK}{}")
"""How a vocabulary has a word: as it is, or behind sentencepiece's mark of a space."""


def asked_pairs(
    folder: Path, pairs: Sequence[tuple[str, str]], instruction: str | None
) -> Pooling[list[float]]:
    """Return the prompts of pairs of a query and a document.

    Raises InvalidRequest for a vocabulary without "yes" and "no".
    """
    task, has_roles = instruction or INSTRUCTION, _has_roles(folder)

    def prompt(query: str, document: str) -> ChatPrompt:
        text = f"<Instruct>: {task}\n<Query>: {query}\n<Document>: {document}"
        turns = [("system", SYSTEM), ("user", text)]
        if has_roles:
            turns = [("system", task), ("query", query), ("document", document)]
        return ChatPrompt(
            messages=[{"role": role, "content": content} for role, content in turns],
            template_args={"enable_thinking": False},
        )

    return Pooling(
        prompts=[prompt(query, document) for query, document in pairs],
        sampling=SamplingParams(pooling="last", logit_ids=_labels(folder)),
        finish=_shares,
    )


def _shares(rows: Sequence[bytes]) -> list[float]:
    """Return the share of "yes" in the probabilities of each row's two logits."""
    yes_N, no_N = np.frombuffer(b"".join(rows), "<f4").astype(float).reshape(-1, 2).T
    shares: list[float] = sigmoid(yes_N - no_N).tolist()
    return shares


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(np.minimum(-x, 700.0)))


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
    id_of = load_tokenizer(folder).backend.token_to_id
    for spelling in _SPELLINGS:
        yes, no = (id_of(spelling.format(word)) for word in ("yes", "no"))
        if yes is not None and no is not None:
            return yes, no
    raise InvalidRequest(
        'this model cannot rank documents: its vocabulary has no tokens "yes" and "no", and it is '
        "no embedder; serve a reranker or an embedder, such as Qwen3-Reranker-0.6B"
    )
