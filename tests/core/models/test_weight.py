"""The loader: strict, complete in what it says, and exact in what it loads."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, PreTrainedModel, Qwen2Config

from helpers.family_cases import SIZES
from helpers.model_harness import (
    VOCAB,
    Runner,
    Sequence,
    load,
    make_reference,
    random_ids,
    relative_error,
)
from minisgl.distributed import SingleRank
from minisgl.errors import CheckpointError
from minisgl.kernel.ops import Ops
from minisgl.kernel.registry import create_ops
from minisgl.models import BaseLLMModel, build_model
from minisgl.models.loading.reading import read_config
from minisgl.models.loading.weight import Checkpoint, load_weight

TIED = {**SIZES, "tie_word_embeddings": True}


def saved(folder: Path, config: LlamaConfig | Qwen2Config | None = None) -> PreTrainedModel:
    reference = make_reference(config or LlamaConfig(**SIZES))
    reference.save_pretrained(folder)
    return reference


def edit(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replace tensors of model.safetensors (dots written as __), or drop them where None."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in changes.items():
        tensors.pop(name.replace("__", "."), None)
        if tensor is not None:
            tensors[name.replace("__", ".")] = tensor
    save_file(tensors, file)


def first_logits(folder: Path) -> torch.Tensor:
    with torch.inference_mode():
        sequence = Sequence(random_ids(8), 1)
        Runner(load(folder)).generate([sequence], chunk=8)
        return sequence.logits[0]


def reference_logits(reference: PreTrainedModel) -> torch.Tensor:
    with torch.inference_mode():
        return reference(torch.tensor([random_ids(8)])).logits[0]


def test_one_error_names_all_that_does_not_fit(tmp_path: Path) -> None:
    saved(tmp_path)
    edit(
        tmp_path,
        model__layers__0__self_attn__q_proj__weight=None,
        model__norm__weight=torch.ones(47),
        model__layers__1__mlp__up_proj__weight=torch.ones(72, 48, dtype=torch.int8),
        model__layers__7__surprise=torch.ones(3, 4),
        model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(6),
    )
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path)
    head, *lines = str(caught.value).splitlines()
    assert str(tmp_path) in head
    assert "4 tensors" in head
    assert sorted(line.strip() for line in lines) == [
        "extra: model.layers.7.surprise [3, 4]",
        "misshapen: model.norm.weight is [47], expected [48]",
        "missing: model.layers.0.self_attn.q_proj.weight [48, 48]",
        "quantised: model.layers.1.mlp.up_proj.weight is I8, expected one of "
        "['F64', 'F32', 'F16', 'BF16']",
    ]


def test_the_first_of_many_tensors_are_named(tmp_path: Path) -> None:
    saved(tmp_path)
    edit(tmp_path, **{f"surprise{index}": torch.ones(1) for index in range(100)})
    with pytest.raises(CheckpointError, match="100 tensors differ:") as caught:
        load(tmp_path)
    lines = str(caught.value).splitlines()[1:]
    assert len(lines) == 31
    assert lines[-1] == "  and 70 more"


def test_one_tensor_differs(tmp_path: Path) -> None:
    saved(tmp_path)
    edit(tmp_path, model__norm__weight=torch.ones(47))
    with pytest.raises(CheckpointError, match=r"; 1 tensor differs:\n  misshapen: model\.norm"):
        load(tmp_path)


def test_sharded_files_load_as_one(tmp_path: Path) -> None:
    reference = saved(tmp_path / "whole")
    reference.save_pretrained(tmp_path / "parts", max_shard_size="30KB")
    files = sorted((tmp_path / "parts").glob("*.safetensors"))
    assert len(files) > 2
    assert torch.equal(first_logits(tmp_path / "parts"), first_logits(tmp_path / "whole"))
    files[1].unlink()
    with pytest.raises(CheckpointError, match=f"lacks {files[1].name}"):
        load(tmp_path / "parts")
    # An index of files that are gone, beside the whole: transformers takes the whole.
    (tmp_path / "whole" / "model.safetensors").rename(tmp_path / "parts" / "model.safetensors")
    load(tmp_path / "parts")


@pytest.mark.parametrize(
    "index",
    [
        *("[]", "{", '{"weight_map": {}}', '{"weight_map": {"a": "../b"}}'),
        *('{"weight_map": {"a": []}}', '{"weight_map": {"a": ""}}'),
    ],
)
def test_broken_index_is_named(index: str, tmp_path: Path) -> None:
    saved(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "a.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
        load(tmp_path)


@pytest.mark.parametrize("keep", [0, 5, 1000, -1])
def test_truncated_file_is_named(keep: int, tmp_path: Path) -> None:
    saved(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged or incomplete"):
        load(tmp_path)


def test_what_a_clone_without_lfs_holds(tmp_path: Path) -> None:
    saved(tmp_path)
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 10\n"
    (tmp_path / "model.safetensors").write_text(pointer)
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors is .*; git .*: run `git lfs pull"
    ):
        load(tmp_path)


def test_other_formats_are_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="only safetensors"):
        load(tmp_path)


@pytest.mark.parametrize("keep", ["embedding", "head", "both"])
def test_tied_embeddings_under_either_name(keep: str, tmp_path: Path) -> None:
    reference = saved(tmp_path, Qwen2Config(**TIED))
    table = reference.state_dict()["model.embed_tokens.weight"].clone()
    if keep != "embedding":
        edit(tmp_path, lm_head__weight=table)
    if keep == "head":
        edit(tmp_path, model__embed_tokens__weight=None)
    assert relative_error(first_logits(tmp_path), reference_logits(reference)) <= 1e-4


def test_tied_in_the_config_but_not_in_the_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path, Qwen2Config(**TIED))
    edit(tmp_path, lm_head__weight=torch.randn(VOCAB, 48))
    theirs = type(make_reference(Qwen2Config(**TIED))).from_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING, logger="minisgl"):
        logits = first_logits(tmp_path)
    assert "lm_head.weight differs from model.embed_tokens.weight" in caplog.text
    assert relative_error(logits, reference_logits(theirs)) <= 1e-4


def test_dtype_is_converted_and_progress_reported(tmp_path: Path) -> None:
    reference = saved(tmp_path)
    steps: list[tuple[int, int]] = []
    model = load(tmp_path, torch.bfloat16, progress=lambda done, total: steps.append((done, total)))
    norm = reference.state_dict()["model.norm.weight"]
    assert torch.equal(model.norm.weight, norm.to(torch.bfloat16))
    num_bytes = sum(tensor.numel() for tensor in reference.state_dict().values()) * 2
    assert steps[-1] == (num_bytes, num_bytes)
    assert [done for done, _ in steps] == sorted(done for done, _ in steps)


def test_size_is_known_without_loading(tmp_path: Path) -> None:
    saved(tmp_path, Qwen2Config(**TIED))
    config = read_config(tmp_path)
    model = build_model(config, dtype=torch.float32, ops=Ops(), comm=SingleRank())
    assert all(getattr(p.owner, p.attr).is_meta for p in model.parameters())
    loaded = load(tmp_path)
    tensors = [getattr(p.owner, p.attr) for p in loaded.parameters()]
    held = sum(tensor.nbytes for tensor in tensors) + SIZES["max_position_embeddings"] * 12 * 4
    assert model.num_weight_bytes == loaded.num_weight_bytes == held


LARGE = {**SIZES, "vocab_size": 200_000, "tie_word_embeddings": True}
asks_linux = pytest.mark.skipif(not Path("/proc/self/smaps").is_file(), reason="asks Linux")


def save_large(folder: Path, **more: torch.Tensor) -> BaseLLMModel:
    """A checkpoint of zeros, with `more` tensors in it; the model that would load it, empty."""
    LlamaConfig(**LARGE, architectures=["LlamaForCausalLM"]).save_pretrained(folder)
    config = read_config(folder)
    whole = build_model(config, dtype=torch.float32, ops=Ops(), comm=SingleRank())
    parts = [part for parameter in whole.parameters() for part in parameter.parts]
    tensors = {part.name: torch.zeros(part.shape) for part in parts}
    save_file(tensors | more, folder / "model.safetensors")
    return whole


def third_of_four() -> SingleRank:
    comm = SingleRank()
    comm.rank, comm.size = 2, 4
    return comm


@asks_linux
def test_a_rank_reads_its_slices_alone(tmp_path: Path) -> None:
    whole = save_large(tmp_path)
    share = build_model(whole.config, dtype=torch.float32, ops=Ops(), comm=third_of_four())
    checkpoint = Checkpoint(tmp_path)  # whose mapping is looked at
    load_weight(share, checkpoint, device=torch.device("cpu"), ops=Ops())
    assert whole.num_weight_bytes > 38_000_000
    # The system may map a file 2 MiB at a time, at both ends of what is read.
    assert 9_600_000 < bytes_in_memory(tmp_path) < share.num_weight_bytes + (4 << 20)


@asks_linux
def test_a_rank_compares_its_rows_of_tied_tables_alone(tmp_path: Path) -> None:
    head = torch.zeros(LARGE["vocab_size"], LARGE["hidden_size"])
    save_large(tmp_path, **{"lm_head.weight": head})
    seen: list[int] = []
    comm = third_of_four()
    share = load(tmp_path, comm=comm, progress=lambda *_: seen.append(bytes_in_memory(tmp_path)))
    assert share.config.tie_word_embeddings
    # Its rows of both, of which the system may map 2 MiB more at both ends.
    read = share.num_weight_bytes + head.nbytes // 4
    assert 2 * 9_600_000 < max(seen) < read + (8 << 20) < head.nbytes


def bytes_in_memory(folder: Path) -> int:
    """Of the files that this process has mapped."""
    num_bytes, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            inside = str(folder) in line
        elif inside and line.startswith("Rss:"):
            num_bytes += int(line.split()[1]) * 1024
    return num_bytes


def test_dummy_weights_follow_the_seed_and_need_no_files(tmp_path: Path) -> None:
    saved(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    tables = [load(tmp_path, dummy=True, seed=seed).embedding.weight.dense() for seed in (0, 0, 1)]
    assert torch.equal(tables[0], tables[1])
    assert not torch.equal(tables[0], tables[2])


def test_dtype_comes_from_the_weights_where_the_config_is_silent(tmp_path: Path) -> None:
    saved(tmp_path).to(torch.float16).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    values = json.loads(file.read_text())
    assert values.pop("dtype") == "float16"
    file.write_text(json.dumps(values))
    assert read_config(tmp_path).dtype == torch.float16


BAD = [(torch.nan, "nan"), (torch.inf, "inf"), (-torch.inf, "-inf")]


@pytest.mark.parametrize("jit", [True, False], ids=["C++", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_weight_that_is_not_finite_is_named(
    jit: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    ops = create_ops(torch.device("cpu")) if jit else Ops()
    saved(tmp_path)
    file = tmp_path / "model.safetensors"
    whole = {name: tensor.to(dtype) for name, tensor in load_file(file).items()}
    name = "model.layers.1.mlp.down_proj.weight"
    for value, word in BAD:
        changed = whole[name].clone()
        changed[-1, -1] = value
        save_file(whole | {name: changed}, file)
        for served in (torch.float32, torch.bfloat16):
            with pytest.raises(CheckpointError, match=rf"{name} holds {word}; the file is damaged"):
                load(tmp_path, served, ops=ops)


def test_a_weight_too_large_for_the_dtype_is_named(tmp_path: Path) -> None:
    saved(tmp_path)
    edit(tmp_path, model__norm__weight=torch.full((48,), 1e5))
    load(tmp_path, torch.bfloat16)
    with pytest.raises(
        CheckpointError,
        match=r"model\.norm\.weight holds 100000, which is infinite in float16; choose --dtype",
    ):
        load(tmp_path, torch.float16)


def test_rows_that_pad_a_vocabulary_are_zeros(tmp_path: Path) -> None:
    class Dirty(Ops):
        def empty(self, shape: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
            return torch.full(tuple(shape), torch.nan, dtype=dtype, device=device)

    saved(tmp_path, LlamaConfig(**{**SIZES, "vocab_size": 33}))
    comm = SingleRank()
    comm.rank, comm.size = 1, 2
    config = read_config(tmp_path)
    share = build_model(config, dtype=torch.float32, ops=Ops(), comm=comm)
    load_weight(share, Checkpoint(tmp_path), device=torch.device("cpu"), ops=Dirty())
    (table,) = (
        getattr(parameter.owner, parameter.attr)
        for parameter in share.parameters()
        if parameter.parts[0].name == "lm_head.weight"
    )
    num_rows = 33 - len(table)  # the first rank has as many rows, and they are all used
    assert table[:num_rows].isfinite().all()
    assert not table[num_rows:].any()
