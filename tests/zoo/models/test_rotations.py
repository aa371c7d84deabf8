"""The zoo's rope types against transformers' `ROPE_INIT_FUNCTIONS`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from minisgl import plugins
from minisgl.errors import ConfigError
from minisgl.models.config import Fields
from minisgl.models.loading.reading import read_config
from minisgl.models.loading.rotation import rotary_config


@pytest.mark.parametrize("length", [64, 65])
def test_longrope_takes_the_factors_of_the_length_served(length: int, tmp_path: Any) -> None:
    rope = {
        "rope_type": "longrope",
        "short_factor": [1.0 + 0.05 * i for i in range(24)],
        "long_factor": [2.0 + 0.5 * i for i in range(24)],
        "original_max_position_embeddings": 64,
    }
    theirs = LlamaConfig(
        hidden_size=96,
        num_attention_heads=2,
        max_position_embeddings=2048,
        rope_parameters={"rope_theta": 50_000.0, **rope},
        architectures=["LlamaForCausalLM"],
    )
    theirs.save_pretrained(tmp_path)
    ours = read_config(tmp_path).rope
    assert ours.max_context == 2048
    inv_freq, scale = ours.frequencies(length)
    expected, expected_scale = ROPE_INIT_FUNCTIONS["longrope"](theirs, seq_len=length)
    torch.testing.assert_close(inv_freq, expected, rtol=1e-6, atol=0)
    assert scale == pytest.approx(expected_scale)
    assert scale > 1


def test_without_the_zoo_its_rope_types_are_refused_by_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    core = tuple(row for row in plugins.installed() if not row.target.startswith("minisgl_zoo"))
    monkeypatch.setattr(plugins, "_installed", core)
    monkeypatch.setattr(plugins, "lacks", lambda table: True)
    config = Fields({"rope_scaling": {"type": "su"}}, "config.json")
    with pytest.raises(ConfigError, match=r"'su' is not supported.* any other needs minisgl_zoo"):
        rotary_config(config, 64)
