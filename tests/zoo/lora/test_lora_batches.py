"""Many adapters in one step, beside quantised weights, on two ranks, resumed, drafted and lost."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, PreTrainedModel

from helpers.adapters import GREEDY, RandomAdapter, as_batch, greedy_ids, with_tokenizer
from helpers.family_cases import SIZES
from helpers.model_harness import make_reference
from minisgl.core import SamplingParams
from minisgl.engine.device import EagerRunner
from minisgl.errors import AdapterLost, ConfigError, InvalidRequest, ModelNotFound
from minisgl.llm import LLM
from minisgl_zoo.lora.weight import StepRows

NUM = 8
PROMPTS = [[uid + 3, 99, 3, 150, 42, 8, 61 + uid] for uid in range(NUM)]
OPTIONS: dict[str, Any] = {"dtype": "float32", "num_pages": 128, "page_size": 4, "progress": False}


@dataclass
class Setup:
    reference: PreTrainedModel
    model: Path
    adapters: list[RandomAdapter]

    @property
    def lora(self) -> dict[str, Path]:
        return {adapter.folder.name: adapter.folder for adapter in self.adapters}

    def expected(self, prompts: list[list[int]], count: int = 10) -> list[list[int]]:
        """Of each prompt with the adapter of the same number."""
        found = []
        for adapter, prompt in zip(self.adapters, prompts, strict=True):
            with adapter.merged(self.reference):
                found.append(greedy_ids(self.reference, prompt, count))
        return found


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    folder = tmp_path_factory.mktemp("adapted")
    reference = make_reference(LlamaConfig(**SIZES))
    reference.save_pretrained(folder / "model")
    adapters = [
        RandomAdapter.of(folder / f"a{i}", reference, seed=i, rank=1 + 2 * i) for i in range(NUM)
    ]
    return Setup(reference, with_tokenizer(folder / "model"), adapters)


@pytest.fixture(scope="module")
def llm(setup: Setup) -> Iterator[LLM]:
    with LLM(setup.model, lora=setup.lora, **OPTIONS) as llm:
        yield llm


def test_a_batch_of_8_adapters_equals_8_single_runs(setup: Setup, llm: LLM) -> None:
    names: list[str | None] = list(setup.lora)
    together = as_batch(llm, [*names, None], [*PROMPTS, PROMPTS[0]])
    ids = [output.token_ids for output in together]
    assert ids[:NUM] == setup.expected(PROMPTS)
    assert ids[NUM] == greedy_ids(setup.reference, PROMPTS[0])
    for name, prompt, expected in zip(names, PROMPTS, ids, strict=False):
        assert llm.generate([prompt], GREEDY, lora=name)[0].token_ids == expected


def test_the_products_of_a_gpu_give_the_same_ids(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All slots at once, with a mask."""
    always = property(lambda self: True, lambda self, given: None)
    monkeypatch.setattr(StepRows, "is_gpu", always, raising=False)
    for slots in (3, 8):
        with LLM(setup.model, lora=setup.lora, max_loras=slots, **OPTIONS) as llm:
            outputs = as_batch(llm, [*setup.lora, None], [*PROMPTS, PROMPTS[0]])
        ids = [output.token_ids for output in outputs]
        assert ids == [*setup.expected(PROMPTS), greedy_ids(setup.reference, PROMPTS[0])]


@pytest.mark.needs("minisgl_kernels")
def test_steps_without_adapters_are_replayed_after_steps_with_them(tmp_path: Path) -> None:
    shapes = {f"model.layers.{layer}.mlp.down_proj": (256, 768) for layer in range(6)}
    lora = {"a": RandomAdapter(tmp_path, shapes, seed=1, size=3.0).folder}
    options = {"num_pages": 128, "progress": False}
    with LLM(**options) as plain, LLM(lora=lora, **options) as llm:
        if isinstance(runner_of(plain), EagerRunner):
            pytest.skip(reason="no recorded steps here")
        expected = plain.generate([PROMPTS[0]], GREEDY)[0].token_ids
        for name in ("a", None, "a", None):
            ids = llm.generate([PROMPTS[0]], GREEDY, lora=name)[0].token_ids
            assert (ids == expected) == (name is None)
        recorded, ours = (runner_of(each)._recordings for each in (plain, llm))
        assert recorded.keys() == ours.keys()
        for key, recording in recorded.items():
            assert recording is not None, "the built-in model's steps are recorded"
            assert len(ours[key].calls) == len(recording.calls), "and no call is more"


def runner_of(llm: LLM) -> Any:
    return llm._engine.engine.runner  # type: ignore[attr-defined] # the engine of one rank


def test_prefixes_are_shared_within_an_adapter_only(setup: Setup, llm: LLM) -> None:
    prompt = list(range(20, 60))
    outputs = [llm.generate([prompt], GREEDY, lora=name)[0] for name in ("a1", "a2", None, "a1")]
    assert [output.num_cached_tokens for output in outputs] == [0, 0, 0, 36]
    assert outputs[0].token_ids == outputs[3].token_ids


def test_fewer_slots_than_adapters_give_the_same_ids(setup: Setup) -> None:
    with LLM(setup.model, lora=setup.lora, max_loras=3, **OPTIONS) as llm:
        for _ in range(2):
            outputs = as_batch(llm, list(setup.lora), PROMPTS)
            assert [output.token_ids for output in outputs] == setup.expected(PROMPTS)


def test_retracted_requests_resume_with_their_adapters(setup: Setup) -> None:
    with LLM(setup.model, lora=setup.lora, **{**OPTIONS, "num_pages": 40}) as llm:
        outputs = as_batch(llm, list(setup.lora), PROMPTS, GREEDY.but(max_tokens=60))
        assert llm._engine.scheduler.stats.num_retractions  # type: ignore[attr-defined] # the engine of one rank
    assert [output.token_ids for output in outputs] == setup.expected(PROMPTS, 60)


def test_drafts_change_no_answer(setup: Setup) -> None:
    prompts = [prompt * 3 for prompt in PROMPTS]
    with LLM(setup.model, lora=setup.lora, drafts="auto", **OPTIONS) as llm:
        for name, prompt, expected in zip(
            setup.lora, prompts, setup.expected(prompts), strict=True
        ):
            for _ in range(2):  # the second answer is what the tree has
                assert llm.generate([prompt], GREEDY, lora=name)[0].token_ids == expected


def test_chunked_prompts_give_the_same_ids(setup: Setup) -> None:
    prompts = [prompt * 4 for prompt in PROMPTS]
    with LLM(setup.model, lora=setup.lora, max_prefill_length=9, **OPTIONS) as llm:
        outputs = as_batch(llm, list(setup.lora), prompts)
    assert [output.token_ids for output in outputs] == setup.expected(prompts)


def test_logprobs_of_the_prompt_are_those_of_the_adapter(setup: Setup, llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    output = llm.generate([PROMPTS[5]], params, lora="a5")[0]
    with setup.adapters[5].merged(setup.reference) as model, torch.no_grad():
        logits = model(torch.tensor([PROMPTS[5]])).logits[0].log_softmax(-1)
    expected = [float(logits[i, token]) for i, token in enumerate(PROMPTS[5][1:])]
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[1:] == pytest.approx(expected, abs=1e-3)


def test_embeddings_are_those_of_the_merged_model(setup: Setup, llm: LLM, tmp_path: Path) -> None:
    with setup.adapters[3].merged(setup.reference) as model:
        model.save_pretrained(tmp_path)
    prompts = [PROMPTS[0], PROMPTS[1] * 3]
    with LLM(with_tokenizer(tmp_path), **OPTIONS) as merged:
        expected = merged.embed(prompts)
    rows = llm.embed(prompts, lora="a3")
    torch.testing.assert_close(torch.tensor(rows), torch.tensor(expected), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(torch.tensor(llm.embed(prompts)), torch.tensor(rows), atol=1e-2)


def test_two_ranks_give_the_ids_of_one(setup: Setup) -> None:
    with LLM(setup.model, lora=setup.lora, tp=2, max_loras=3, **OPTIONS) as llm:
        outputs = as_batch(llm, [*setup.lora, None], [*PROMPTS, PROMPTS[0]])
    ids = [output.token_ids for output in outputs]
    assert ids[:NUM] == setup.expected(PROMPTS)
    assert ids[NUM] == greedy_ids(setup.reference, PROMPTS[0])


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_an_adapter_beside_quantised_weights(setup: Setup, quantization: Any) -> None:
    """The quantised model has other ids, so the ids of the quantised and merged model would differ:
    the logits of the step are compared with those of its dense weights plus the adapter."""
    options = {**OPTIONS, "quantization": quantization}
    with LLM(setup.model, **options) as plain, LLM(setup.model, lora=setup.lora, **options) as llm:
        base = [output.token_ids for output in plain.generate(PROMPTS, GREEDY)]
        assert [output.token_ids for output in llm.generate(PROMPTS, GREEDY)] == base
        reference = dense_twin(setup, plain)
        twin = Setup(reference, setup.model, setup.adapters)
        outputs = as_batch(llm, list(setup.lora), PROMPTS)
        equal = [
            output.token_ids[:4] == ids[:4]
            for output, ids in zip(outputs, twin.expected(PROMPTS), strict=True)
        ]
    assert sum(equal) >= NUM - 1, "the rounding of activations may flip a close choice"


def dense_twin(setup: Setup, llm: LLM) -> PreTrainedModel:
    """Return transformers' model with the numbers of the quantised weights of an engine."""
    twin = make_reference(LlamaConfig(**SIZES))
    twin.load_state_dict(setup.reference.state_dict())
    engine = llm._engine.engine  # type: ignore[attr-defined] # the engine of one rank
    for index, block in enumerate(engine.model.blocks):
        layer = twin.model.layers[index]
        attention, mlp = layer.self_attn, layer.mlp
        parts = [
            (block.attention.qkv, (attention.q_proj, attention.k_proj, attention.v_proj)),
            (block.attention.out, (attention.o_proj,)),
            (block.mlp.gate_up, (mlp.gate_proj, mlp.up_proj)),
            (block.mlp.down, (mlp.down_proj,)),
        ]
        for ours, theirs in parts:
            sizes = [module.out_features for module in theirs]
            for module, rows in zip(theirs, ours.weight.dense().split(sizes), strict=True):
                module.weight.data = rows.clone()
    head = engine.model.lm_head.table.weight
    twin.lm_head.weight.data = head.dense()[: twin.config.vocab_size].clone()
    return twin


def test_an_adapter_whose_files_change_is_lost_and_nothing_else(
    setup: Setup, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(setup.adapters[0].folder, copy)  # the same digest, in another folder
    lora = {"copy": copy, **setup.lora}
    with LLM(setup.model, lora=lora, max_loras=1, **OPTIONS) as llm:
        shutil.copy(setup.adapters[1].folder / "adapter_model.safetensors", copy)
        with pytest.raises(AdapterLost, match="have changed"):
            as_batch(llm, ["copy", None], PROMPTS[:2])
        with pytest.raises(ModelNotFound, match="load it again"):
            llm.generate([PROMPTS[0]], GREEDY, lora="copy")
        outputs = as_batch(llm, list(setup.lora), PROMPTS)
    assert [output.token_ids for output in outputs] == setup.expected(PROMPTS)


@pytest.mark.parametrize("alpha", [8.0, 1e300])
def test_an_adapter_with_nan_fails_its_requests_alone(
    alpha: float, setup: Setup, tmp_path: Path
) -> None:
    """Or one whose scale makes its B's infinite: 0 times that is NaN for other requests' tokens."""
    bad = RandomAdapter.of(tmp_path / "bad", setup.reference, seed=1)
    if alpha == 8.0:
        file = bad.folder / "adapter_model.safetensors"
        tensors = load_file(file)
        next(iter(tensors.values()))[0, 0] = torch.nan
        save_file(tensors, file)
    else:
        config = bad.folder / "adapter_config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"lora_alpha": alpha}))
    with LLM(setup.model, lora={"bad": bad.folder, **setup.lora}, **OPTIONS) as llm:
        with pytest.raises(AdapterLost, match="has NaN or infinity"):
            as_batch(llm, ["bad", None], PROMPTS[:2])
        outputs = as_batch(llm, list(setup.lora), PROMPTS)
    assert [output.token_ids for output in outputs] == setup.expected(PROMPTS)


def test_wrong_names_and_ranks_are_refused(setup: Setup, llm: LLM, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="no adapter is called 'b'; loaded: 'a0', "):
        llm.generate([PROMPTS[0]], GREEDY, lora="b")
    with pytest.raises(InvalidRequest, match="cache_salt"):
        llm.generate([PROMPTS[0]], GREEDY, lora="a0", cache_salt=7)  # type: ignore[arg-type] # it is wrong on purpose
    wide = RandomAdapter.of(tmp_path / "wide", setup.reference, seed=0, rank=17)
    with pytest.raises(
        ConfigError, match=r"rank 17, and this server's slots have 16.*max_lora_rank=17"
    ):
        LLM(setup.model, lora={"wide": wide.folder}, max_lora_rank=3, **OPTIONS)
    with pytest.raises(ConfigError, match="lora must be NAME=PATH_OR_ID"):
        LLM(setup.model, lora={"a=b": setup.adapters[0].folder}, **OPTIONS)
