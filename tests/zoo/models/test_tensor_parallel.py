"""Ranks as threads: every family computes on several ranks what it computes on one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    LlamaConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3MoeConfig,
)

from helpers.family_cases import CASES, MOE, SIZES, TOLERANCE
from helpers.local_ranks import UNEVEN, ThreadRank, ranks
from helpers.model_harness import (
    VOCAB,
    Runner,
    Sequence,
    load,
    make_reference,
    random_ids,
    relative_error,
)
from helpers.rounding_error import EACH_FAMILY
from minisgl.distributed import (
    DistributedCommunicator,
    SingleRank,
)
from minisgl.errors import ConfigError
from minisgl.kernel.ops import Ops
from minisgl.models import build_model
from minisgl.models.loading.reading import read_config

# One of each family, and the layers, biases, layouts and head counts that no such case has.
SHARED = (
    *EACH_FAMILY,
    *("llama-biases", "llama-dynamic", "phi3-longrope", "olmo2-one-kv-head-old", "cohere-qk-norm"),
    *("cohere2-moe-rms-norm-stacked", "mixtral-stacked", "solar-open-moe-groups-old"),
    *(
        "gemma4-shared",
        "gemma4-experts",
        "lfm3-bias-untied-stacked",
        "lfm3-neither-gates-nor-norms",
    ),
    *("falcon-h1-norm-first-tied", "nemotron-h-biases", "nemotron-3", "nemotron-3-latent-stacked"),
    *("deepseek-v3-moe-groups-old", "gpt-oss-old", "qwen3-next-moe-6-heads-stacked"),
)
# Each kind of experts, of routing and of layout in the files.
MIXTURES = (
    *("afmoe", "deepseek-v3-moe-groups-old", "ernie4.5-moe", "gemma4-experts", "gpt-oss"),
    *("granite-moe", "hunyuan-moe", "lfm2-moe", "minimax-m2-moe", "mixtral", "mixtral-stacked"),
    *("nemotron-3", "nemotron-3-latent-stacked", "qwen2-moe-stacked"),
)


class SharesRank(ThreadRank):
    """A rank that keeps only its share of the residual, as a kernel does that all-reduces rows by
    shares."""

    def add_norm(
        self,
        ops: Ops,
        x_TD: torch.Tensor,
        residual_TD: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if residual_TD is not None:
            whole = residual_TD.new_zeros(x_TD.shape)
            share = self.info.share(len(x_TD))
            whole[share.start : share.stop] = self.own(residual_TD, len(x_TD))
            residual_TD = self.all_reduce(whole)
        normed, residual = super().add_norm(ops, x_TD, residual_TD, weight, eps)
        return normed, self.own(residual, len(x_TD))

    def own(self, x: torch.Tensor, num_rows: int) -> torch.Tensor:
        """Return this rank's rows of x, which has all rows or only those."""
        share = self.info.share(num_rows)
        return x[share.start : share.stop] if len(x) == num_rows else x


@pytest.mark.parametrize("name", SHARED)
def test_two_ranks_compute_what_one_does(name: str, tmp_path: Path) -> None:
    config_class, changes, page_size, _ = CASES[name]
    check(config_class, changes, 2, page_size, tmp_path)


@pytest.mark.parametrize("name", ["qwen3", "qwen3-moe"])
def test_ranks_may_keep_shares_of_the_residual(name: str, tmp_path: Path) -> None:
    config_class, changes, page_size, _ = CASES[name]
    check(config_class, changes, 2, page_size, tmp_path, kind=SharesRank)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        *((name, 2) for name in MIXTURES),
        *((name, 3) for name in ("qwen3-moe", "mixtral", "glm4-moe-stacked")),
    ],
)
def test_ranks_may_share_the_experts(name: str, size: int, tmp_path: Path) -> None:
    config_class, changes, page_size, _ = CASES[name]
    stacked = name.endswith("stacked")
    check(config_class, changes, size, page_size, tmp_path, stacked=stacked, expert_parallel=True)


@pytest.mark.parametrize("name", UNEVEN)
def test_shares_may_be_uneven(name: str, tmp_path: Path) -> None:
    config_class, changes, size = UNEVEN[name]
    check(config_class, changes, size, 4, tmp_path)


def check(
    config_class: type[PreTrainedConfig],
    changes: dict[str, Any],
    size: int,
    page_size: int,
    folder: Path,
    *,
    stacked: bool = False,
    expert_parallel: bool = False,
    kind: type[ThreadRank] = ThreadRank,
) -> list[ThreadRank]:
    """The ranks, once they computed what one does."""
    config = config_class(**{**SIZES, **changes})
    make_reference(config).save_pretrained(folder, save_original_format=not stacked)
    prompts = [[token % config.vocab_size for token in random_ids(n, n)] for n in (19, 11)]

    def run(comm: DistributedCommunicator) -> list[Sequence]:
        with torch.inference_mode():
            sequences = [Sequence(prompt, 3) for prompt in prompts]
            model = load(folder, comm=comm, expert_parallel=expert_parallel)
            Runner(model, page_size=page_size).generate(sequences, chunk=7)
            return sequences

    alone = run(SingleRank())
    comms = ranks(size, kind)
    with ThreadPoolExecutor(size) as pool:
        together = list(pool.map(run, comms))
    for sequences in together:
        for one, many, first in zip(alone, sequences, together[0], strict=True):
            logits = torch.cat(many.logits)
            assert logits.shape == (len(one.ids) - 1, config.vocab_size)
            assert torch.equal(logits, torch.cat(first.logits))
            assert relative_error(logits, torch.cat(one.logits)) <= TOLERANCE
            assert many.outputs == one.outputs
    return comms


@pytest.mark.parametrize("vocab_size", [33, 128])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_logits_of_a_share_of_the_rows(size: int, vocab_size: int, tmp_path: Path) -> None:
    """33: the last rank's part of the vocabulary is smaller, or empty."""
    config = LlamaConfig(**{**SIZES, "num_attention_heads": 12, "vocab_size": vocab_size})
    make_reference(config).save_pretrained(tmp_path)
    x_SD = torch.randn(8 * size, config.hidden_size)

    def run(comm: DistributedCommunicator) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.inference_mode():
            model = load(tmp_path, comm=comm)
            assert comm.shares_rows(len(x_SD))
            return model.logits(x_SD), model.logits(x_SD, own_rows=True)

    with ThreadPoolExecutor(size) as pool:
        wholes, shares = zip(*pool.map(run, ranks(size)), strict=True)
    assert {share.shape for share in shares} == {(8, vocab_size)}
    assert torch.equal(torch.cat(shares), wholes[0])
    assert not SingleRank().shares_rows(len(x_SD))
    assert not ranks(size)[0].shares_rows(0)  # a step of prompts that do not end in it


@pytest.mark.parametrize("size", [2, 3, 4])
def test_shares_are_the_whole(size: int, tmp_path: Path) -> None:
    reference = make_reference(Qwen2Config(**{**SIZES, "num_attention_heads": 6}))
    reference.save_pretrained(tmp_path)
    weights = reference.state_dict()
    covered = {name: torch.zeros(len(weight), dtype=torch.int) for name, weight in weights.items()}
    for comm in ranks(size):
        for parameter in load(tmp_path, comm=comm).parameters():
            tensor, row = getattr(parameter.owner, parameter.attr), 0
            for part in parameter.parts:
                share = part.share
                expected = weights[part.name].narrow(part.axis, share.start, len(share))
                assert torch.equal(tensor[row : row + len(expected)], expected), part.name
                row += len(expected)
                if part.axis == 1 and len(covered[part.name]) != part.shape[1]:
                    covered[part.name] = torch.zeros(part.shape[1], dtype=torch.int)
                covered[part.name][share.start : share.stop] += 1
            assert not tensor[row:].any()
    for name, times in covered.items():
        whole = "norm" in name
        replicated = size > 2 and ("k_proj" in name or "v_proj" in name)
        assert times.min() >= 1, name
        assert times.max() == (size if whole else -(-size // 2) if replicated else 1), name


@pytest.mark.parametrize("row", [None, 0, 79, 80, VOCAB - 1])
def test_one_rank_holds_the_row_in_which_tied_tables_differ(
    row: int | None, tmp_path: Path
) -> None:
    """Rows 0 to 79 are the first rank's, 160 and on the last's; None: no row differs."""
    config = LlamaConfig(**{**SIZES, "num_attention_heads": 6, "tie_word_embeddings": True})
    make_reference(config).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    head = tensors["model.embed_tokens.weight"].clone()
    if row is not None:
        head[row, 1] += 1
    save_file({**tensors, "lm_head.weight": head}, file)
    x_SD = torch.randn(2, config.hidden_size)

    def run(comm: DistributedCommunicator) -> tuple[bool, torch.Tensor]:
        with torch.inference_mode():
            model = load(tmp_path, comm=comm)
            return model.config.tie_word_embeddings, model.logits(x_SD)

    with ThreadPoolExecutor(3) as pool:
        together = list(pool.map(run, ranks(3)))
    assert [is_tied for is_tied, _ in together] == [row is None] * 3
    for _, logits in together:
        assert relative_error(logits, x_SD @ head.T) <= TOLERANCE


def test_weight_bytes_are_the_ranks_own(tmp_path: Path) -> None:
    make_reference(LlamaConfig(**{**SIZES, "num_attention_heads": 6})).save_pretrained(tmp_path)
    models = [load(tmp_path, comm=comm) for comm in ranks(3)]
    held = [
        sum(getattr(p.owner, p.attr).nbytes for p in model.parameters()) + 128 * 8 * 4
        for model in models
    ]
    assert [model.num_weight_bytes for model in models] == held
    assert len(set(held)) > 1
    assert [model.pools[0].num_kv_heads for model in models] == [1, 1, 1]


def test_experts_are_shared_where_there_are_some(tmp_path: Path) -> None:
    make_reference(LlamaConfig(**SIZES)).save_pretrained(tmp_path / "dense")
    for name, changes in (
        ("moe", {}),
        ("none-sparse", {"mlp_only_layers": [0, 1]}),
        ("few-layers", {"decoder_sparse_step": 3}),
    ):
        mixture = Qwen3MoeConfig(**SIZES, **MOE, **changes)
        make_reference(mixture).save_pretrained(tmp_path / name)
    for name, size, message in (
        ("dense", 2, "has none"),
        ("moe", 10, "9 experts cannot be"),
        ("none-sparse", 2, r"no layer of .*config\.json has any \(mlp_only_layers, decoder_"),
        ("few-layers", 2, "no layer of .* leave it out"),
    ):
        config = read_config(tmp_path / name)
        config = replace(config, num_heads=size, num_kv_heads=size)
        with pytest.raises(ConfigError, match=message):
            build_model(
                config, dtype=torch.float32, ops=Ops(), comm=ranks(size)[0], expert_parallel=True
            )


def test_more_ranks_than_query_heads_are_refused(tmp_path: Path) -> None:
    make_reference(LlamaConfig(**SIZES)).save_pretrained(tmp_path)
    config = read_config(tmp_path)
    with pytest.raises(ConfigError, match="4 query heads cannot be shared by 5 ranks"):
        build_model(config, dtype=torch.float32, ops=Ops(), comm=ranks(5)[0])
