"""Logits stay float32: of two tokens that bfloat16 cannot tell apart, the likelier one is chosen.

The rows of the LM head differ in their last digits only. So all logits of a row are one or two
numbers in bfloat16, and the first of them was chosen.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Gemma2Config, LlamaConfig

from helpers.engine_ranks import engines, together
from helpers.engine_runs import drive
from helpers.local_ranks import ranks
from helpers.model_harness import load, make_reference
from minisgl.core import BatchSamplingArgs, SamplingParams, Token
from minisgl.core.event import PromptLogprobs
from minisgl.distributed import DistributedCommunicator, SingleRank
from minisgl.kernel.cpu import CpuOps
from minisgl.kernel.jit import load_library
from minisgl.kernel.ops import Ops
from minisgl_bench.fakes import ListOutbox

SIZES: dict[str, Any] = {
    "vocab_size": 163, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 128,
}  # fmt: skip
"""163 rows: panels of 16, and rows behind them."""
ROWS = (1, 2, 24, 130)
GREEDY = BatchSamplingArgs(all_greedy=True)


@pytest.fixture(scope="module")
def fast() -> CpuOps:
    return CpuOps(load_library())


def first_row() -> Tensor:
    row = torch.randint(-120, 121, (SIZES["hidden_size"],), generator=generator(0))
    row[0] = 127
    return row


def close_rows(num_rows: int, dtype: torch.dtype) -> Tensor:
    """Rows in which about three numbers of 64 differ from the first row's, in the last digit.
    Numbers of 8 bits keep them apart: each is a multiple of 1/128 of the largest."""
    shape = (num_rows, SIZES["hidden_size"])
    changes = torch.randint(-1, 2, shape, generator=generator(1))
    changes *= torch.rand(shape, generator=generator(2)) < 0.07
    changes[:, 0] = 0
    return ((first_row() + changes) / 128).to(dtype)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def save(folder: Path, *, is_tied: bool, softcap: bool = False, vocab_size: int = 163) -> None:
    sizes = {**SIZES, "vocab_size": vocab_size, "tie_word_embeddings": is_tied}
    config = Gemma2Config(**sizes) if softcap else LlamaConfig(**sizes)
    make_reference(config).bfloat16().save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = "model.embed_tokens.weight" if is_tied else "lm_head.weight"
    tensors[name] = close_rows(vocab_size, torch.bfloat16)
    save_file(tensors, file, metadata={"format": "pt"})


def check(logits: Tensor, exact: Tensor) -> None:
    """The ids that are chosen have the largest of the exact logits, up to float32's rounding."""
    assert logits.dtype == torch.float32
    rounded = exact.bfloat16()
    assert ((rounded == rounded.amax(-1, keepdim=True)).sum(-1) > 1).any(), "no tie to be found"
    for ops in (Ops(), CpuOps(load_library())):
        chosen = exact.gather(1, ops.sample(logits, GREEDY).long()[:, None])[:, 0]
        assert (exact.amax(-1) - chosen <= 2**-18 * exact.abs().amax(-1)).all()
    error = (logits.double() - exact).abs().max() / exact.abs().max()
    assert error < 2**-18, error


def hidden(num_rows: int) -> Tensor:
    """Like the first row, so that logits are large. All within a factor of 2, so that the kernels
    of 8-bit weights do not round them either."""
    sizes = 1 + torch.rand((num_rows, SIZES["hidden_size"]), generator=generator(3))
    return (sizes * (first_row().sign() + 0.5).sign()).bfloat16()


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_reference(num_rows: int, dtype: torch.dtype) -> None:
    """In blocks of the table's rows; the last block is not full."""
    table = close_rows(2500, dtype)
    x = hidden(num_rows).to(dtype)
    check(Ops().logits(x, table), x.double() @ table.double().T)


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize(
    "quantization",
    [None, *(pytest.param(x, marks=pytest.mark.needs("minisgl_zoo")) for x in ("int8", "int4"))],
)
@pytest.mark.parametrize("num_rows", ROWS)
def test_a_cpus_kernels(
    num_rows: int, quantization: Any, is_tied: bool, fast: CpuOps, tmp_path: Path
) -> None:
    save(tmp_path, is_tied=is_tied, vocab_size=160 if quantization else 163)
    x = hidden(num_rows)
    with torch.inference_mode():
        model = load(tmp_path, dtype=torch.bfloat16, ops=fast, quantization=quantization)
        panelled = any(
            c.__name__ == "QuantisedWeight" for c in type(model.lm_head.table.weight).mro()
        )
        assert panelled == (quantization is not None)
        logits = model.logits(x)
    check(logits, x.double() @ close_rows(logits.shape[1], x.dtype).double().T)


@pytest.mark.needs("minisgl_zoo")
def test_a_softcap(fast: CpuOps, tmp_path: Path) -> None:
    save(tmp_path, is_tied=True, softcap=True)
    with torch.inference_mode():
        model = load(tmp_path, dtype=torch.bfloat16, ops=fast)
        x = hidden(24)
        exact = x.double() @ model.lm_head.table.weight.dense().double().T
        check(model.logits(x), 30 * (exact / 30).tanh())


@pytest.mark.parametrize("own_rows", [False, True])
def test_two_ranks(own_rows: bool, fast: CpuOps, tmp_path: Path) -> None:
    save(tmp_path, is_tied=False)
    x = hidden(16)

    def run(comm: DistributedCommunicator) -> Tensor:
        with torch.inference_mode():
            model = load(tmp_path, dtype=torch.bfloat16, ops=fast, comm=comm)
            return model.logits(x, own_rows)

    with ThreadPoolExecutor(2) as pool:
        logits = list(pool.map(run, ranks(2)))
    whole = torch.cat(logits) if own_rows else logits[0]
    exact = x.double() @ close_rows(163, x.dtype).double().T
    check(whole, exact)
    if not own_rows:
        assert torch.equal(*logits)
    alone = load(tmp_path, dtype=torch.bfloat16, ops=fast, comm=SingleRank())
    assert torch.equal(whole, alone.logits(x))


@pytest.mark.parametrize("size", [1, 2])
def test_log_probabilities_of_outputs_and_prompts(size: int, tmp_path: Path) -> None:
    """Over gloo. In bfloat16 the 20 likeliest tokens had one or two values between them."""
    save(tmp_path, is_tied=False)
    sampling = SamplingParams(
        temperature=0.0, max_tokens=3, logprobs=True, top_logprobs=20, prompt_logprobs=20
    )
    requests = [(list(range(1, length)), sampling) for length in (5, 18, 40)]
    outboxes = [ListOutbox() for _ in range(size)]
    with engines(tmp_path, tmp_path / "store", size, dtype="bfloat16") as started:
        run = together(lambda *each: drive(each[0], requests, outbox=each[1]), started, outboxes)
    assert run[0] == run[-1]
    tops = []
    for event in outboxes[0].events:
        if isinstance(event, PromptLogprobs):
            tops += event.tops
        elif isinstance(event, Token):
            assert event.top[0][0] == event.id
            tops.append(event.top)
    assert len(tops) == 4 + 17 + 39 - 3 + 3 * 3
    assert min(len({value for _, value in top}) for top in tops) > 15
