"""Scores pairs of texts with an encoder's head, as sentence-transformers' `CrossEncoder` does.

The tokenizer joins a query and a document, and the head makes a number of the pair's first token.
What turns the number into a score is released under one of three names; without any it is a
sigmoid. Source: the config.json of BGE's and MS MARCO's rerankers; sentence-transformers 6.2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, Final

import numpy as np

from minisgl.core.sampling import SamplingParams
from minisgl.errors import CheckpointError
from minisgl.message import TextPrompt
from minisgl.message.pooling import Pooling
from minisgl.tokenizer.tokenizer import read_json_object
from minisgl_zoo.pooling.rerank import sigmoid

Activation = Callable[[float], float]
_ACTIVATIONS: Final[Mapping[str, Activation]] = {
    "torch.nn.modules.linear.Identity": float,
    "torch.nn.modules.activation.Sigmoid": sigmoid,
    "torch.nn.modules.activation.Tanh": math.tanh,
}


def activation_of(folder: Path, config: Mapping[str, Any]) -> Activation:
    """Return what makes a score of the head's number. Raises CheckpointError for an unknown one."""
    saved = read_json_object(folder / "config_sentence_transformers.json")
    own = (config.get("sentence_transformers") or {}).get("activation_fn")
    older = config.get("sbert_ce_default_activation_function")
    name = saved.get("activation_fn") or own or older
    if name and name not in _ACTIVATIONS:
        raise CheckpointError(
            f"{folder}: its scores pass through {name}, which is not supported; expected one of "
            f"{', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name] if name else sigmoid


def joined_pairs(
    queries: Sequence[str],
    documents: Sequence[str],
    activation: Activation,
    max_tokens: int | None,
) -> Pooling[list[float]]:
    """Return the prompts of each document with the only query, or with its own."""
    return Pooling(
        prompts=[
            TextPrompt(text=query, pair=document)
            for query, document in zip(cycle(queries), documents, strict=False)
        ],
        sampling=SamplingParams(pooling="cls", logit_ids=(0,), truncate_prompt_tokens=max_tokens),
        finish=lambda rows: [activation(np.frombuffer(row, "<f4").item()) for row in rows],
    )
