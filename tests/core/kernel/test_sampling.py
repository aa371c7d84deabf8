"""Sampling: noise against published vectors, filters against transformers, C++ against torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from minisgl.core import BatchSamplingArgs, SamplingParams
from minisgl.core.batch_sampling import SAMPLING_COLUMNS, sampling_row
from minisgl.kernel.cpu import CpuOps
from minisgl.kernel.jit import load_library
from minisgl.kernel.ops import Ops
from minisgl.kernel.sampling import gumbel_noise, philox

TWINS = pytest.mark.parametrize("ops", [Ops(), CpuOps(load_library())], ids=lambda ops: ops.name)


def args(num_rows: int, *, first_seed: int = 0, **settings: Any) -> BatchSamplingArgs:
    """Settings may be one value for all rows or a list; rows differ in their seeds."""
    dtypes = {"top_ks": torch.int32, "output_idxs": torch.int64, "seeds": torch.int64}
    settings = {"temperatures": 1.0, "output_idxs": 0} | settings
    settings.setdefault("seeds", list(range(first_seed, first_seed + num_rows)))
    tensors = {
        name: torch.tensor(value if isinstance(value, list) else [value] * num_rows).to(
            dtypes.get(name, torch.float32)
        )
        for name, value in settings.items()
    }
    return BatchSamplingArgs(all_greedy=False, **tensors)


# --- noise -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counter", "key", "want"),
    [
        # tests/kat_vectors of Random123, philox4x32, 10 rounds
        ("00000000 00000000 00000000 00000000", "00000000 00000000",
         "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
         "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
         "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)  # fmt: skip
def test_philox_vectors(counter: str, key: str, want: str) -> None:
    words = philox(*(tuple(torch.tensor([int(x, 16)]) for x in s.split()) for s in (counter, key)))
    assert [int(word) for word in words] == [int(x, 16) for x in want.split()]


def test_noise_is_gumbel() -> None:
    noise = gumbel_noise(torch.arange(40), torch.arange(40), 5001).double().flatten()
    assert noise.isfinite().all()
    # The cumulative distribution is exp(-exp(-x)): Kolmogorov-Smirnov, 1e-4 level at n = 200,040.
    uniform = (-(-noise).exp()).exp().sort().values
    empirical = (torch.arange(len(uniform)) + 0.5) / len(uniform)
    assert (uniform - empirical).abs().max() < 2.23 / len(uniform) ** 0.5


def test_noise_depends_on_each_of_its_coordinates() -> None:
    seeds = torch.tensor([0, 1, 1 << 32, -1, 0, 0])
    indices = torch.tensor([0, 0, 0, 0, 1, 1 << 32])
    noise = gumbel_noise(seeds, indices, 1000)
    assert len(noise.unique()) > 0.99 * noise.numel()


@TWINS
def test_noise_of_the_twins_is_the_reference(ops: Ops) -> None:
    """With flat logits the winner is the largest noise, whatever the seed's bits are."""
    num_rows, num_vocab = 64, 3001
    generator = torch.Generator().manual_seed(5)
    high = torch.iinfo(torch.int64).max
    seeds = torch.randint(-high, high, (num_rows,), generator=generator)
    indices = torch.randint(0, 1 << 40, (num_rows,), generator=generator)
    ids = ops.sample(
        torch.zeros(num_rows, num_vocab),
        args(num_rows, seeds=seeds.tolist(), output_idxs=indices.tolist()),
    )
    assert torch.equal(ids.long(), gumbel_noise(seeds, indices, num_vocab).argmax(-1))


@TWINS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("filters", [None, {}, {"top_ks": 5, "top_ps": 0.9, "min_ps": 0.1}])
def test_a_row_that_is_not_finite_has_no_id(
    ops: Ops, dtype: torch.dtype, filters: dict[str, float] | None
) -> None:
    logits = torch.randn(6, 77).to(dtype)
    alone = BatchSamplingArgs(all_greedy=True)
    sampling = alone if filters is None else args(6, **filters)
    want = ops.sample(logits, sampling)
    assert (want >= 0).all()
    logits[1], logits[3], logits[4, 9] = torch.nan, -torch.inf, torch.inf
    want[1] = want[3] = want[4] = -1
    assert torch.equal(ops.sample(logits, sampling), want)


# --- greedy ------------------------------------------------------------------------------------


@TWINS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_vocab", [1, 3, 16, 77, 2048])
def test_greedy_takes_the_first_of_the_largest(
    ops: Ops, num_vocab: int, dtype: torch.dtype
) -> None:
    logits = torch.randint(-4, 5, (50, num_vocab)).to(dtype)
    want = torch.tensor([row.index(max(row)) for row in logits.tolist()], dtype=torch.int32)
    for sampling in (BatchSamplingArgs(all_greedy=True), args(50, temperatures=0.0, top_ks=3)):
        ids = ops.sample(logits, sampling)
        assert ids.dtype == torch.int32
        assert torch.equal(ids, want)


@TWINS
@pytest.mark.parametrize("num_vocab", [1, 15, 77])
def test_greedy_finds_the_largest_at_each_place(ops: Ops, num_vocab: int) -> None:
    """Also among the last, which fill no vector."""
    logits = torch.eye(num_vocab) - 3
    ids = ops.sample(logits, BatchSamplingArgs(all_greedy=True))
    assert ids.tolist() == list(range(num_vocab))


# --- filters -----------------------------------------------------------------------------------

FILTERS: tuple[dict[str, float], ...] = (
    {},
    {"temperatures": 0.3},
    {"top_ks": 1},
    {"top_ks": 7},
    {"top_ks": 1_000_000},
    {"top_ps": 0.4},
    {"top_ps": 0.9, "temperatures": 2.0},
    {"top_ps": 1e-6},
    {"min_ps": 0.05},
    {"min_ps": 1.0},
    {"top_ks": 20, "top_ps": 0.8, "min_ps": 0.1, "temperatures": 1.3},
)


def by_transformers(logits: Tensor, filters: dict[str, float]) -> Tensor:
    """Log-probabilities, -inf for what the warpers drop, in the order of `generate`."""
    warpers = {
        "temperatures": TemperatureLogitsWarper,
        "top_ks": TopKLogitsWarper,
        "top_ps": TopPLogitsWarper,
        "min_ps": MinPLogitsWarper,
    }
    for name, warper in warpers.items():
        if name in filters:
            logits = warper(filters[name])(None, logits)
    return logits.log_softmax(-1)


@TWINS
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_draws_follow_transformers_distribution(ops: Ops, filters: dict[str, float]) -> None:
    """Chi-square of 10,000 draws, and nothing outside the support."""
    num_draws, num_vocab = 10_000, 48
    torch.manual_seed(1)
    logits = torch.randn(1, num_vocab) * 1.5
    want = by_transformers(logits, filters)[0].double().exp()
    ids = ops.sample(logits.expand(num_draws, -1).contiguous(), args(num_draws, **filters))
    counts = torch.bincount(ids.long(), minlength=num_vocab).double()
    assert counts[want == 0].sum() == 0
    assert counts[want > 2e-3].all()
    expected = want * num_draws
    bins = expected > 8
    freedom = int(bins.sum()) - 1
    chi_square = ((counts - expected)[bins] ** 2 / expected[bins]).sum().item()
    # Seeds are fixed, so this never flickers; 5 standard deviations is far from chance.
    assert chi_square <= freedom + 5 * (2 * max(freedom, 1)) ** 0.5


@TWINS
def test_equal_logits_stay_or_go_together(ops: Ops) -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0, 0.0, -1.0]]).expand(500, -1).contiguous()
    for filters in ({"top_ks": 2}, {"top_ps": 0.35}, {"min_ps": 0.9}):
        ids = ops.sample(logits, args(500, **filters))
        assert sorted(set(ids.tolist())) == [1, 2, 3]


@TWINS
def test_a_small_temperature_is_greedy(ops: Ops) -> None:
    logits = torch.randn(64, 500) * 30
    ids = ops.sample(logits, args(64, temperatures=1e-40))
    assert torch.equal(ids.long(), logits.argmax(-1))


@TWINS
def test_masked_logits_are_never_drawn(ops: Ops) -> None:
    logits = torch.full((300, 1000), -torch.inf)
    logits[:, 7::100] = torch.randn(300, 10)
    for filters in ({}, {"top_ks": 3}, {"top_ps": 0.9}):
        ids = ops.sample(logits, args(300, **filters))
        assert ((ids - 7) % 100 == 0).all()


# --- the batch ---------------------------------------------------------------------------------


@TWINS
def test_a_row_does_not_see_its_batch(ops: Ops) -> None:
    num_rows = 24
    logits = torch.randn(num_rows, 700) * 3
    every = {
        "temperatures": [0.0, 0.5, 1.0, 1.7] * 6,
        "top_ks": [0, 5, 50] * 8,
        "top_ps": [1.0, 0.5] * 12,
        "min_ps": [0.0, 0.0, 0.02, 0.3] * 6,
        "output_idxs": list(range(100, 100 + num_rows)),
    }
    together = ops.sample(logits, args(num_rows, **every))
    order = torch.randperm(num_rows).tolist()
    shuffled = ops.sample(
        logits[order],
        args(num_rows, **{name: [x[i] for i in order] for name, x in every.items()}, seeds=order),
    )
    assert torch.equal(shuffled, together[order])
    for row in range(num_rows):
        alone = args(1, first_seed=row, **{name: [x[row]] for name, x in every.items()})
        assert ops.sample(logits[row : row + 1], alone).item() == together[row]


@TWINS
def test_a_larger_vocabulary_does_not_move_the_noise(ops: Ops) -> None:
    logits = torch.randn(50, 333)
    padded = torch.cat((logits, torch.full((50, 90), -torch.inf)), dim=-1)
    assert torch.equal(ops.sample(logits, args(50)), ops.sample(padded, args(50)))


# --- C++ against torch -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_vocab", [5, 64, 1000, 20_003])
def test_the_twin_gives_the_reference_ids(num_vocab: int, dtype: torch.dtype) -> None:
    """Random settings in every row. A rounding tie may differ: at most 1 row in 200."""
    num_rows = 200 if num_vocab < 20_000 else 60
    generator = torch.Generator().manual_seed(num_vocab)

    def pick(choices: list[float]) -> list[float]:
        index = torch.randint(len(choices), (num_rows,), generator=generator)
        return [choices[i] for i in index]

    logits = (torch.randn(num_rows, num_vocab, generator=generator) * 4).to(dtype)
    sampling = args(
        num_rows,
        temperatures=pick([0.0, 0.2, 0.7, 1.0, 2.0]),
        top_ks=pick([0, 1, 2, 40, 1000, 10**6]),
        top_ps=pick([1.0, 0.999, 0.9, 0.5, 0.01]),
        min_ps=pick([0.0, 0.0, 0.01, 0.5, 1.0]),
        output_idxs=pick([0, 1, 77]),
    )
    assert all(getattr(sampling, name) is not None for name in SAMPLING_COLUMNS)
    ours = CpuOps(load_library()).sample(logits, sampling)
    differ = ours != Ops().sample(logits, sampling)
    assert differ.sum() <= num_rows // 200, differ.nonzero()


def test_top_k_of_fewer_numbers_than_k() -> None:
    """As of a model that overflows in float16: what is no number is not chosen, the others are."""
    ops = CpuOps(load_library())
    ops.sample(torch.linspace(0, -0.1, 1000)[None], args(1, top_ks=400))  # leaves 400 candidates
    logits = torch.full((60, 1000), torch.nan)
    assert (ops.sample(logits, args(60, top_ks=400)) < 1000).all()
    logits[:, 3], logits[:, 7] = 0.0, -0.5
    assert set(ops.sample(logits, args(60, top_ks=400)).tolist()) == {3, 7}


def test_a_top_k_of_1_is_greedy() -> None:
    likeliest = SamplingParams(temperature=0.9, top_k=1, top_p=0.5, seed=3)
    assert sampling_row(likeliest) == sampling_row(SamplingParams(temperature=0.0))
    assert sampling_row(SamplingParams(temperature=0.9, top_k=2, seed=3))[0] > 0
