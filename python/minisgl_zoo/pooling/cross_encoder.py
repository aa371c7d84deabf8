"""Scores pairs of texts with an encoder's head, as sentence-transformers' `CrossEncoder` does.

The tokenizer joins a query and a document, and the head makes a number of the pair's first token.
What turns the number into a score is released under one of three names; without any it is a
sigmoid. Source: the config.json of BGE's and MS MARCO's rerankers; sentence-transformers 6.2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from minisgl.core.sampling import SamplingParams
from minisgl.errors import CheckpointError
from minisgl.message import TextPrompt
from minisgl.message.pooling import Pooling
from minisgl.tokenizer.tokenizer import read_json_object
from minisgl_zoo.pooling.rerank import sigmoid

Activation = Callable[[Any], Any]
"""Of an array. Scores pass through as float64, in which fewer large ones are equal."""
IDENTITY: Final[Activation] = np.positive
_ACTIVATIONS: Final[Mapping[str, Activation]] = {
    "torch.nn.modules.linear.Identity": IDENTITY,
    "torch.nn.modules.activation.Sigmoid": sigmoid,
    "torch.nn.modules.activation.Tanh": np.tanh,
}


def activation_of(folder: Path, config: Mapping[str, Any]) -> Activation:
    """Return what makes a score of the head's number. Raises CheckpointError for an unknown one."""
    saved = read_json_object(folder / "config_sentence_transformers.json")
    own = (config.get("sentence_transformers") or {}).get("activation_fn")
    older = config.get("sbert_ce_default_activation_function")
    name = saved.get("activation_fn") or own or older
    return named_activation(folder, name) if name else sigmoid


def named_activation(folder: Path, name: str | None) -> Activation:
    """Return the activation of this class of torch. Raises CheckpointError."""
    if name is None or name not in _ACTIVATIONS:
        raise CheckpointError(
            f"{folder}: its numbers pass through {name}, which is not supported; expected one of "
            f"{', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name]


def joined_pairs(
    pairs: Sequence[tuple[str, str]], activation: Activation, max_tokens: int | None
) -> Pooling[list[float]]:
    """Return the prompts of pairs of a query and a document."""
    return Pooling(
        prompts=[TextPrompt(text=query, pair=document) for query, document in pairs],
        sampling=SamplingParams(pooling="cls", logit_ids=(0,), truncate_prompt_tokens=max_tokens),
        finish=lambda rows: activation(np.frombuffer(b"".join(rows), "<f4").astype(float)).tolist(),
    )
