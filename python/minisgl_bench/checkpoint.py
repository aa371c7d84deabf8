"""Writes a checkpoint of a real shape with random weights and a generated tokenizer.

The tokenizer is byte-level BPE of the shape's vocabulary size, so that loading and decoding cost
what they do with a real one. Its tokens are the bytes, then pairs and triples of letters and
digits.
"""

from __future__ import annotations

import json
import string
from itertools import islice, product
from pathlib import Path
from typing import Any

from minisgl.models.loading.reading import read_config

END = "<|end|>"


def write_checkpoint(folder: Path, config: dict[str, Any], *, weights: bool) -> None:
    """Write config.json, the tokenizer and, with `weights`, model.safetensors in its dtype."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", config)
    _write_json(folder / "tokenizer.json", _tokenizer(config["vocab_size"]))
    _write_json(folder / "tokenizer_config.json", {"eos_token": END})
    if weights:
        _write_weights(folder)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def _tokenizer(vocab_size: int) -> dict[str, Any]:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = string.ascii_letters + string.digits
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [(a, b) for a, b in product(letters, repeat=2)]
    triples = ((a + b, c) for a, b, c in product(letters, repeat=3))
    merges = [*pairs, *islice(triples, max(vocab_size - 1 - len(alphabet) - len(pairs), 0))]
    tokens = [*alphabet, *(left + right for left, right in merges)][: vocab_size - 1]
    merges = merges[: len(tokens) - len(alphabet)]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    values: dict[str, Any] = json.loads(tokenizer.to_str())
    return values


def _write_weights(folder: Path) -> None:
    import torch
    from safetensors.torch import save_file

    from minisgl.distributed import SingleRank
    from minisgl.kernel.ops import Ops
    from minisgl.models import build_model

    config = read_config(folder)
    model = build_model(config, dtype=config.dtype, ops=Ops(), comm=SingleRank())
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator(device).manual_seed(0)
    tensors = {}
    for part in (part for parameter in model.parameters() for part in parameter.parts):
        tensor = torch.ones(part.shape, dtype=config.dtype, device=device)
        if tensor.dim() > 1:
            tensor.normal_(0, 0.02, generator=generator)
        tensors[part.name] = tensor.cpu()
    save_file(tensors, folder / "model.safetensors")
