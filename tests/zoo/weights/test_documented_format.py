"""The weight format of docs/extending.md loads a checkpoint and computes what it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from helpers.family_cases import SIZES
from helpers.model_harness import Runner, Sequence, load, make_reference, random_ids
from minisgl import plugins

PAGE = Path(__file__).parents[3] / "docs/extending.md"


def test_the_documented_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = PAGE.read_text(encoding="utf-8").partition("# acme_minisgl/weights.py\n")[2]
    (tmp_path / "acme_weights.py").write_text(code.partition("```")[0])
    monkeypatch.syspath_prepend(tmp_path)
    row = plugins.Row("weight_formats", "acme8", "acme_weights:read_acme8")
    monkeypatch.setattr(plugins, "_installed", (*plugins.installed(), row))

    reference = make_reference(LlamaConfig(**SIZES))
    folder = tmp_path / "model"
    reference.save_pretrained(folder)
    values = json.loads((folder / "config.json").read_text())
    values["quantization_config"] = {"quant_method": "acme8"}
    (folder / "config.json").write_text(json.dumps(values))
    stored = load_file(folder / "model.safetensors")
    for name in [name for name in stored if name.endswith("_proj.weight")]:
        factor = stored[name].abs().amax(1).clamp(min=1e-6) / 127
        stored[name] = (stored[name] / factor[:, None]).round().to(torch.int8)
        stored[name.replace(".weight", ".factor")] = factor
        reference.get_parameter(name).data = stored[name] * factor[:, None]
    save_file(stored, folder / "model.safetensors")

    ids = random_ids(8)
    with torch.inference_mode():
        sequence = Sequence(ids, 1)
        Runner(load(folder)).generate([sequence], chunk=8)
        expected = reference(torch.tensor([ids])).logits[0]
    assert torch.allclose(sequence.logits[0], expected, atol=1e-4)
