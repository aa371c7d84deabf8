"""A model whose answers outlast a test, for tests that stop something during an answer.

1,000 tokens of the built-in model take a second here, and a tenth of that on a fast machine: an
answer of that length can end before the test's next line. This model's context has 131,072 tokens.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from minisgl.builtin import model_path

if TYPE_CHECKING:
    import openai
    from openai.types import Completion

NUM_PAGES = 8192
NUM_TOKENS = 130_000
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2**17,
}


def save_endless(folder: Path) -> Path:
    """Write the model, without weights, into a new folder; return the folder."""
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_path() / name, folder)
    config = json.loads((model_path() / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | SIZES))
    return folder


def endless_flags(folder: Path) -> tuple[str, ...]:
    """Return a server's flags: the model with random weights, and pages for one answer."""
    model = ("--model", str(folder), "--dummy-weight")
    return (*model, "--num-pages", str(NUM_PAGES), "--max-prefill-length", "256")


def endless_answer(client: openai.OpenAI) -> Iterator[Completion]:
    """Yield a stream whose first chunk has come."""
    stream = client.completions.create(
        model="endless",
        prompt="a",
        stream=True,
        max_tokens=NUM_TOKENS,
        extra_body={"ignore_eos": True},
    )
    next(iter(stream))
    return stream
