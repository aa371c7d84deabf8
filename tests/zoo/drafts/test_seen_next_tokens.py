"""Guesses behind images: a place of an image is the next token of the one before it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from helpers.guessing import FREE_ROWS, Watched
from helpers.pictures import PICTURES, Sample, chat, qwen3_5
from helpers.predicting import QWEN_NAMES, Predicting
from helpers.seen import Eyes, start
from minisgl.core import Plan
from minisgl.core.batch import ImageRows
from minisgl.core.plan import Flight
from minisgl_zoo.blocks.next_tokens import _next_rows
from minisgl_zoo.drafts import rule as rule_module


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    return qwen3_5(tmp_path_factory.mktemp("seen") / "model")


@pytest.fixture(scope="module")
def model(sample: Sample) -> Predicting:
    """Writes the layer into the files, which have it beside the text model and the tower."""
    whole: Any = sample.model
    text = whole.model.language_model
    torch.manual_seed(1)
    layer = type(text.layers[-1])(text.config, len(text.layers) - 1).double().eval()
    size = text.config.hidden_size
    extra = {f"{name}.weight": torch.empty(size) for name in ("enorm", "hnorm", "shared_head.norm")}
    extra["eh_proj.weight"] = torch.empty(size, 2 * size)
    with torch.no_grad():
        for weight in (*layer.parameters(), *extra.values()):
            weight.normal_(0, 1.5 * weight.shape[-1] ** -0.5 if weight.dim() > 1 else 0.3)
    named = {f"model.layers.3.{name}": tensor for name, tensor in extra.items()}
    named |= {f"model.layers.3.{name}": each.float() for name, each in layer.named_parameters()}
    for ours, theirs in QWEN_NAMES.items():
        named = {name.replace(ours, theirs): tensor for name, tensor in named.items()}
    file = sample.folder / "model.safetensors"
    tensors = {name: each.contiguous() for name, each in named.items()} | load_file(file)
    save_file(tensors, file, metadata={"format": "pt"})
    parts = SimpleNamespace(layers=[layer], rotary_emb=text.rotary_emb)
    layers: Any = SimpleNamespace(model=parts, lm_head=whole.lm_head, config=text.config)
    wide = {name: tensor.double() for name, tensor in extra.items()}
    return Predicting(folder=sample.folder, layers=layers, extra=wide, one=1.0)


@torch.no_grad()
def guess_logits(sample: Sample, model: Predicting, ids: list[int], firsts: set[int]) -> Tensor:
    """firsts: the places that begin a chunk, before which the placeholder was next."""
    seen: dict[str, Tensor] = {}

    def look(module: Any, args: Any, named: dict[str, Tensor], output: Any) -> None:
        seen.update(named, states=output.last_hidden_state)

    whole: Any = sample.model
    given: dict[str, Any] = sample.pixels(sample.processor, PICTURES[:2])
    tokens = torch.tensor([ids])
    given[sample.types] = (tokens == whole.config.image_token_id).int()
    hook = whole.model.language_model.register_forward_hook(look, with_kwargs=True)
    whole(input_ids=tokens, **given)
    hook.remove()
    embedded = seen["inputs_embeds"].clone()
    for place in firsts:
        embedded[0, place] = whole.get_input_embeddings()(tokens[0, place])
    positions = seen["position_ids"][-3:, :, :-1]
    return model.guess_from(embedded[:, 1:], seen["states"][:, :-1], positions)


@pytest.mark.parametrize("chunk", [512, 7])
def test_guesses_behind_images_are_the_references(
    sample: Sample, model: Predicting, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three positions for a token, in chunks that begin within images, too."""
    monkeypatch.setattr(rule_module, "LEAST_GAIN", 0.0)
    off = start(sample, max_prefill_length=chunk, drafts="off")
    [expected] = Eyes(sample, off).ask([chat(*PICTURES[:2])], max_tokens=24)
    off.close()
    engine = start(sample, max_prefill_length=chunk, drafts="mtp")
    inner: Any = SimpleNamespace(launch=engine.launch)
    watched, begins = Watched(inner), set[int]()

    def launch(plan: Plan) -> Flight:
        begins.update(plan.starts[row] for row, _ in plan.images)
        return watched.launch(plan)

    monkeypatch.setattr(engine, "launch", launch)
    eyes = Eyes(sample, engine, drafters=("mtp",), step_times=FREE_ROWS)
    [answer] = eyes.ask([chat(*PICTURES[:2])], max_tokens=24)
    assert answer.output == expected.output
    assert eyes.scheduler.stats.num_drafted > 10
    engine.close()
    ids, count = answer.prompt + answer.output, len(answer.prompt)
    logits = guess_logits(sample, model, ids, {at for at in begins if at})
    for position in range(count - 1, len(ids) - 1):
        first, second = logits[position].topk(2).values
        assert first - second > 1e-4, "the reference nearly ties; take another seed"
        assert watched.guesses[1, position] == int(logits[position].argmax()), position


def test_other_ranks_have_zeros_there() -> None:
    """Two rows of four tokens; each place but the second row's first is a next token."""
    images = ImageRows(tokens=torch.tensor([2, 3, 4, 6]), rows=None)
    step: Any = SimpleNamespace(rows=torch.tensor([[0, 1], [0, 4], [4, 4], [4, 4]]))
    assert _next_rows(images, step).put(torch.ones(8, 1)).T.tolist() == [[1, 0, 0, 1, 1, 0, 1, 1]]
