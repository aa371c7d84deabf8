"""The built-in model's perplexity on the answers of held-out conversations when it is quantised."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from helpers.model_harness import MAX_TOKENS, Runner, Sequence, load
from minisgl.builtin import model_path
from minisgl.core.args import Quantization as Kind
from minisgl.tokenizer.template import ChatTemplate, find_sources
from minisgl.tokenizer.tokenizer import load_tokenizer
from training.corpus import suite

KINDS: tuple[Kind, ...] = ("fp8", "int8", "int4")
MOST = 1.0005
"""Of the plain weights' perplexity. Measured are 1.000004, 1.000001 and 1.000003."""


def perplexity(**options: Any) -> float:
    tokenizer = load_tokenizer(model_path())
    template = ChatTemplate(find_sources(model_path()), tokenizer.special_tokens)
    loss, count = 0.0, 0
    with torch.inference_mode():
        model = load(model_path(), **options)
        for (conversation, *_), _ in zip(suite(1).values(), range(20), strict=False):
            if conversation.raw:
                continue
            messages = [{"role": m.role, "content": m.content} for m in conversation.prompt]
            prompt = tokenizer.encode(template.render(messages), add_special_tokens=False)
            answer = tokenizer.encode(conversation.expected, add_special_tokens=False)
            if len(prompt + answer) >= MAX_TOKENS:
                continue
            sequence = Sequence(prompt + answer, 1)
            Runner(model, page_size=4).generate([sequence], chunk=256)
            logits = torch.cat(sequence.logits)[len(prompt) - 1 : -1]
            target = torch.tensor(answer)
            loss += float(torch.nn.functional.cross_entropy(logits, target, reduction="sum"))
            count += len(answer)
    return float(torch.tensor(loss / count).exp())


@pytest.fixture(scope="module")
def plain() -> float:
    return perplexity()


@pytest.mark.parametrize("kind", KINDS)
def test_perplexity(kind: Kind, plain: float) -> None:
    quantised = perplexity(quantization=kind)
    assert plain <= 1.01, "the model does not know its own skills"
    assert plain * 0.9995 <= quantised <= plain * MOST
