"""Drafts from the checkpoint's own layer of multi-token prediction, float32 on a CPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace as changed
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from helpers import scheduling
from helpers.engine_runs import drive, greedy, make_engine
from helpers.guessing import (
    OPTIONS,
    PROMPTS,
    SAMPLING,
    Watched,
    check_guesses,
    check_ranks,
    check_requests,
    engine_of,
    every_third_token,
    reference_output,
    scheduler_of,
)
from helpers.model_harness import VOCAB, random_ids
from helpers.predicting import CASES, Predicting, save_predicting
from helpers.step_plans import inputs_of, make_plan
from minisgl import plugins
from minisgl.core import PROMISED
from minisgl.core.args import EngineConfig
from minisgl.engine import Engine
from minisgl.engine.device import StepSize
from minisgl.errors import ConfigError
from minisgl_zoo.drafts import rule as rule_module
from minisgl_zoo.drafts.guesser import LayerGuesser
from minisgl_zoo.drafts.predicted import Predicted


@pytest.fixture(autouse=True)
def drafts_whatever_is_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rule_module, "LEAST_GAIN", 0.0)


@pytest.fixture(scope="module", params=CASES)
def random(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Predicting:
    return save_predicting(tmp_path_factory.mktemp("random"), request.param)


@pytest.fixture(scope="module", params=CASES)
def certain(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Predicting:
    folder = tmp_path_factory.mktemp("certain")
    return save_predicting(folder, request.param, is_certain=True)


@pytest.fixture(scope="module")
def pair(certain: Predicting) -> Iterator[tuple[Engine, Engine]]:
    """Engines without and with the layer."""
    off, on = engine_of(certain, drafts="off"), engine_of(certain)
    yield off, on
    off.close()
    on.close()


@pytest.mark.parametrize("overlap", [True, False])
def test_guesses_are_the_references(random: Predicting, overlap: bool) -> None:
    check_requests(random, overlap=overlap)


@torch.no_grad()
def test_the_reference_is_transformers_layer(random: Predicting) -> None:
    """It takes the hidden state behind the model's final norm. From the state before the norm,
    transformers would guess something else."""
    model = AutoModelForCausalLM.from_pretrained(random.folder, dtype=torch.float32)
    # transformers finds the layer's tensors by the layer's number in released checkpoints.
    model._keys_to_ignore_on_load_unexpected = [r"model\.layers\.3\..*"]
    layer = MtpModel.from_pretrained(model)
    states: list[torch.Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda _, inputs: states.append(inputs[0]))
    ids = random_ids(40, seed=1)
    outputs = model(torch.tensor([ids]), output_hidden_states=True, use_cache=False)
    expected = random.guess_logits(ids)
    errors = []
    for x in (outputs.hidden_states[-1], states[0]):
        guessed = layer.forward_layer(
            0,
            x[:, :-1],
            torch.arange(1, len(ids))[None],
            MtpCache(config=model.config.get_mtp_config()),
            input_ids=torch.tensor([ids[1:]]),
        )
        logits = model.lm_head(guessed)[0]
        errors.append(float((logits - expected).abs().max() / expected.abs().max()))
    assert errors[0] < 1e-4
    assert errors[1] > 1e-2


@pytest.mark.parametrize("name", SAMPLING)
def test_answers_are_the_same_and_certain_guesses_are_accepted(
    pair: tuple[Engine, Engine], name: str
) -> None:
    """The guesses have the noise of the tokens, so they are right at any temperature."""
    off, on = pair
    requests = [(prompt, SAMPLING[name]) for prompt in PROMPTS]
    expected = drive(off, requests, turns=[0, 1, 2, 6], scheduler=scheduler_of(off))
    scheduler = scheduler_of(on)
    assert drive(on, requests, turns=[0, 1, 2, 6], scheduler=scheduler) == expected
    stats = scheduler.stats
    assert stats.num_drafted > 30
    # Nucleus, penalties and ties of the layer's own rounding may part them.
    assert stats.num_accepted >= (0.4 if name == "penalties" else 0.9) * stats.num_drafted


def test_answers_are_the_same_with_random_guesses(random: Predicting) -> None:
    off, on = engine_of(random, drafts="off"), engine_of(random)
    requests = [
        (prompt, replace(params, seed=seed))
        for seed, prompt in enumerate(PROMPTS)
        for params in SAMPLING.values()
    ]
    expected = drive(off, requests, scheduler=scheduler_of(off))
    scheduler = scheduler_of(on)
    assert drive(on, requests, scheduler=scheduler) == expected
    off.close()
    on.close()


def test_masked_rows_have_guesses_too(pair: tuple[Engine, Engine]) -> None:
    """They are sampled late, when the inputs of the forward pass were overwritten."""
    off, on = pair
    requests = [(prompt, greedy(24)) for prompt in PROMPTS]
    outputs = []
    for engine in (off, on):
        scheduler = scheduler_of(engine)
        scheduler._create_masker = every_third_token
        outputs.append(drive(engine, requests, turns=[0, 1, 2, 6], scheduler=scheduler))
    assert outputs[0] == outputs[1]
    assert scheduler.stats.num_accepted > 10, "of the requests without a mask"


def test_a_masked_row_has_the_references_guess(random: Predicting) -> None:
    engine = engine_of(random)
    scheduler = scheduler_of(engine)
    scheduler._create_masker = every_third_token
    watched: Any = Watched(engine)
    prompt = PROMPTS[2]
    (output,) = drive(
        watched,
        [(prompt, greedy(24))],
        scheduler=scheduler,
        first_uid=1,  # it has a mask
    )
    assert output != reference_output(random, prompt, output)
    assert check_guesses(random, watched, 1, len(prompt), prompt + output) == 24
    engine.close()


@pytest.mark.parametrize("options", [{"kv_cache_dtype": "int8"}, {"quantization": "int8"}])
def test_rounded_weights_and_caches_have_the_same_answers(
    certain: Predicting, options: dict[str, Any]
) -> None:
    requests = [(prompt, greedy(24)) for prompt in PROMPTS]
    outputs = []
    for drafts in ("off", "mtp"):
        engine = engine_of(certain, drafts=drafts, **options)
        scheduler = scheduler_of(engine)
        outputs.append(drive(engine, requests, scheduler=scheduler))
        engine.close()
    assert outputs[0] == outputs[1]
    assert scheduler.stats.num_accepted > 10


def test_ranks_have_the_same_guesses(certain: Predicting, tmp_path: Path) -> None:
    sampling = [greedy(16), SAMPLING["hot"], greedy(16), greedy(16)]
    requests = list(zip(PROMPTS, sampling, strict=True))
    check_ranks(certain, requests, tmp_path / "store")


def test_the_layers_memory_counts(certain: Predicting) -> None:
    off, on = engine_of(certain, drafts="off", num_pages=8), engine_of(certain, num_pages=8)
    assert on.memory.weight_bytes > off.memory.weight_bytes
    assert on.memory.activation_bytes > off.memory.activation_bytes
    (before,), (after,) = off.memory.group_page_bytes, on.memory.group_page_bytes
    assert after * 3 == before * 4, "three layers of the model, and one more"
    off.close()
    on.close()


def test_only_the_layer_that_is_asked_for_is_read(certain: Predicting) -> None:
    """Its embedding and LM head are the model's."""
    engine = engine_of(certain)
    sizes = [each.shape for each in engine.model.parameters()]
    vocabulary = [shape for shape in sizes if VOCAB in shape]
    assert len(vocabulary) == 2
    engine.close()


def test_auto_leaves_it_out() -> None:
    """It costs memory and time whether its guesses are computed or not."""
    assert "mtp" not in [row.name for row in plugins.rows("drafters")]
    assert plugins.need("drafters", "mtp", "--drafts", made="by the model").name == "mtp"


@pytest.mark.parametrize("count", [None, 0])
def test_a_model_without_the_layer_is_refused(
    certain: Predicting, tmp_path: Path, count: int | None
) -> None:
    for file in certain.folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(values | {"num_nextn_predict_layers": count}))
    with pytest.raises(ConfigError, match="--drafts mtp needs a layer of multi-token prediction"):
        make_engine((tmp_path, certain.layers), **OPTIONS | {"drafts": "ngram,mtp"})


def test_files_without_the_layer_are_refused(certain: Predicting, tmp_path: Path) -> None:
    (tmp_path / "config.json").symlink_to(certain.folder / "config.json")
    tensors = load_file(certain.folder / "model.safetensors")
    kept = {name: tensors[name] for name in tensors if ".layers.3." not in name}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"needs the tensors model\.layers\.3\.\*, and the files"):
        make_engine((tmp_path, certain.layers), **OPTIONS | {"drafts": "mtp"})


def test_adapters_exclude_it() -> None:
    with pytest.raises(ConfigError, match="--drafts mtp guesses for the model without adapters"):
        EngineConfig(model="model", drafts="mtp", lora={"name": "folder"})


def test_an_answer_that_goes_on_here_has_guesses_of_its_last_tokens() -> None:
    """Another engine has sampled the first two."""
    scheduler = scheduling.make()
    scheduling.add(scheduler, 0, [1, 2])
    req = scheduler.requests.by_uid[0]
    req.output, req.guesses = [5, 6, 7], [[8]]
    drafter = Predicted(req, scheduler.requests)
    for token in req.output:
        assert not drafter.next(3)
        drafter.add(token)
    assert drafter.next(3) == [8]
    req.output.append(9)
    req.guesses.append([-1])
    drafter.add(9)
    assert not drafter.next(3), "its logits were not finite"


def test_guesses_go_on_without_new_ones_while_they_are_right() -> None:
    scheduler = scheduling.make()
    scheduling.add(scheduler, 0, [1, 2])
    req = scheduler.requests.by_uid[0]
    drafter = Predicted(req, scheduler.requests)
    seen = []
    for token, guesses in ((5, [6, 7, 8, 9]), (6, [-1]), (3, [-1])):
        req.output.append(token)
        req.guesses.append(guesses)
        drafter.add(token)
        seen.append(list(drafter.next(9)))
    assert seen == [[6, 7, 8, 9], [7, 8, 9], []]


def test_a_layer_guesses_at_the_places_of_a_padded_step() -> None:
    """Three decodes and a padding row, five and four tokens of prompts, three padding tokens."""
    plan = changed(make_plan(3, [(0, 5), (2, 6)], last_samples=True), next_ids=[PROMISED, PROMISED])
    inputs = inputs_of(plan, StepSize(4, 3, 12))
    none: Any = None
    arrays = LayerGuesser(layer=none, model=none, comm=none, ops=none, batch=none).arrays(inputs)
    assert arrays["guess_positions"].tolist() == [0, 1, 2, 8, 12]
    assert arrays["next_ids"][4:13].tolist() == [104, 105, 106, 107, 0, 109, 110, 111, 0]
