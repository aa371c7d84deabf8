"""The Triton ops that choose tokens, each against its plain-torch reference."""

from __future__ import annotations

import dataclasses

import pytest
import torch

pytest.importorskip("triton", reason="a CPU build of torch brings none")

from minisgl.core import BatchSamplingArgs
from minisgl.core.batch_sampling import SAMPLING_COLUMNS
from minisgl.kernel.ops import Ops
from minisgl_kernels.ops import TunedOps
from minisgl_kernels.triton.threshold import CHUNK, limits

REFERENCE, FAST = Ops(), TunedOps()
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def coarse(dtype: torch.dtype) -> torch.dtype:
    """The dtype whose values the filters tell apart."""
    return torch.bfloat16 if dtype == torch.float32 else dtype


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_vocab", [5, 4096, 10_001])
def test_greedy(num_vocab: int, dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(num_vocab)
    logits = torch.randn(6, num_vocab, device=device).to(dtype)
    logits[2, num_vocab // 2 :] = 9.0  # a tie: the first wins
    got = FAST.sample(logits, BatchSamplingArgs(all_greedy=True))
    want = torch.stack([(row == row.max()).nonzero()[0, 0] for row in logits.float()])
    assert got.dtype == torch.int32
    assert got.tolist() == want.tolist()


@pytest.mark.parametrize("num_vocab", [5, 4097, 10_001])
@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize("temperature", [None, 0.0, 1.0])
def test_of_nan_logits_no_id_is_chosen(
    temperature: float | None, filtered: bool, num_vocab: int, device: torch.device
) -> None:
    rows = 4
    logits = torch.full((rows, num_vocab), torch.nan, device=device)
    logits[1, 0] = logits[2, -1] = 1.0
    if temperature is None:
        args = BatchSamplingArgs(all_greedy=True)
    else:
        args = BatchSamplingArgs(
            all_greedy=False,
            temperatures=torch.full((rows,), temperature, device=device),
            top_ks=torch.full((rows,), 3, dtype=torch.int32, device=device) if filtered else None,
            top_ps=torch.full((rows,), 0.9, device=device) if filtered else None,
            seeds=torch.arange(rows, device=device),
            output_idxs=torch.arange(rows, device=device),
        )
    logits[3] = torch.inf
    got = FAST.sample(logits, args)
    assert got[0] == got[3] == -1
    assert all(-1 <= token_id < num_vocab for token_id in got.tolist())


@pytest.mark.parametrize("num_vocab", [5, 4097, 9000])
def test_random_choice_is_the_reference(num_vocab: int, device: torch.device) -> None:
    torch.manual_seed(num_vocab)
    rows = 16
    logits = (torch.randn(rows, num_vocab, device=device) * 2).bfloat16()
    args = BatchSamplingArgs(
        all_greedy=False,
        temperatures=torch.linspace(0, 1.5, rows, device=device),
        seeds=torch.randint(-(2**62), 2**62, (rows,), device=device),
        output_idxs=torch.arange(rows, device=device) * 2**30,
    )
    got, want = FAST.sample(logits, args), REFERENCE.sample(logits.float(), args)
    assert got.tolist() == want.tolist()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_vocab", [5, 4097, 9000])
@pytest.mark.parametrize("filters", ["k", "p", "m", "kp", "kpm"])
def test_filtered_choice_is_the_reference(
    filters: str, num_vocab: int, dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(num_vocab)
    rows = 24
    logits = (torch.randn(rows, num_vocab, device=device) * 2).to(coarse(dtype)).to(dtype)
    logits[3] = 1.0  # all equal
    logits[4, 1:] = -torch.inf
    logits[5, : num_vocab // 2] = logits[5].max()  # a tie at the top

    def some(values: torch.Tensor, name: str) -> torch.Tensor | None:
        return values.to(device) if name in filters else None

    args = BatchSamplingArgs(
        all_greedy=False,
        temperatures=torch.linspace(0, 1.5, rows, device=device),
        top_ks=some(torch.arange(rows, dtype=torch.int32) * (num_vocab // 16 + 1), "k"),
        top_ps=some(torch.linspace(1.0, 0.01, rows), "p"),
        min_ps=some(torch.linspace(0.0, 0.9, rows), "m"),
        seeds=torch.randint(-(2**62), 2**62, (rows,), device=device),
        output_idxs=torch.arange(rows, device=device),
    )
    columns = [getattr(args, name) for name in SAMPLING_COLUMNS]
    assert filters != "kpm" or all(column is not None for column in columns)
    for repeat in range(1 if device.type == "cpu" else 4):  # the interpreter is slow
        args = dataclasses.replace(args, output_idxs=args.output_idxs + repeat)
        got, want = FAST.sample(logits, args), REFERENCE.sample(logits.float(), args)
        assert got.tolist() == want.tolist()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("filters", ["k", "p"])
def test_what_filters_leave(filters: str, dtype: torch.dtype, device: torch.device) -> None:
    """The thresholds themselves, against a sort in float64."""
    torch.manual_seed(0)
    rows, num_vocab = 12, 3000
    logits = (torch.randn(rows, num_vocab, device=device) * 3).to(coarse(dtype)).to(dtype)
    temperatures = torch.linspace(0.3, 2, rows, device=device)
    ks = torch.tensor([1, 2, 5, 50, 999, 2999, 3000, 5000, 0, 7, 8, 9], dtype=torch.int32)
    ps = torch.linspace(0.05, 1, rows)
    got = limits(
        logits,
        temperatures,
        ks.to(device) if filters == "k" else None,
        ps.to(device) if filters == "p" else None,
        None,
    ).thresholds_S
    for row in range(rows):
        x = logits[row].double().sort(descending=True).values
        if filters == "k":
            least = x[min(int(ks[row]) or num_vocab, num_vocab) - 1]
        else:
            mass = (x / float(temperatures[row])).softmax(0).cumsum(0)
            before = torch.cat((mass.new_zeros(1), mass[:-1]))
            least = x[int((before < float(ps[row])).sum()) - 1]
        assert torch.equal(logits[row].double() >= got[row].double(), logits[row] >= least)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_top_k_of_fewer_than_the_chunks(dtype: torch.dtype, device: torch.device) -> None:
    """The k-th largest of the chunks' largest bounds it: also where these tie, or are nothing."""
    torch.manual_seed(2)
    ks = [1, 2, 3, 4, 5, 6, 3, 4, 2]
    logits = (torch.randn(len(ks), 6 * CHUNK, device=device) * 3).to(coarse(dtype)).to(dtype)
    logits[6, ::CHUNK] = 30.0  # the largest of each chunk
    logits[7, 2 * CHUNK :] = -torch.inf
    logits[8, :CHUNK] += 40.0  # all that count are in one chunk
    temperatures = torch.ones(len(ks), device=device)
    top_ks = torch.tensor(ks, dtype=torch.int32, device=device)
    got = limits(logits, temperatures, top_ks, None, None).thresholds_S
    for row, top_k in enumerate(ks):
        least = logits[row].double().sort(descending=True).values[top_k - 1]
        kept = logits[row].double() >= got[row].double()
        assert torch.equal(kept, logits[row] >= least), row


@pytest.mark.parametrize("filters", ["k", "p"])
def test_limits_of_float32_are_rounded_down_to_bfloat16(filters: str, device: torch.device) -> None:
    torch.manual_seed(3)
    rows, num_vocab = 4, 2 * CHUNK + 7
    logits = torch.randn(rows, num_vocab, device=device) * 3
    logits[1] = -logits[1].abs()
    ks = torch.tensor([1, 7, 500, num_vocab - 1], dtype=torch.int32, device=device)
    ps = torch.tensor([0.01, 0.5, 0.9, 0.999], device=device)
    limit = (ks, None) if filters == "k" else (None, ps)
    got = limits(logits, torch.ones(rows, device=device), *limit, None).thresholds_S
    for row in range(rows):
        x = logits[row].double().sort(descending=True).values
        before = x.softmax(0).cumsum(0).roll(1)
        before[0] = 0
        num_kept = int(ks[row]) if filters == "k" else int((before < ps[row].double()).sum())
        bits = int(x[num_kept - 1].float().view(torch.int32))
        # The least value with the same upper half, whose lower half is 0, or all ones if negative.
        least = bits & ~0xFFFF if bits >= 0 else bits | 0xFFFF
        assert int(got[row].view(torch.int32)) == least


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_filters_leave_is_the_rows_own(dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(1)
    rows, num_vocab = 8, 3 * CHUNK + 5
    logits = (torch.randn(rows, num_vocab, device=device) * 2).to(coarse(dtype)).to(dtype)
    logits[1] -= 100  # no key has its highest bit
    logits[2, : 2 * CHUNK] = -torch.inf  # chunks of nothing
    logits[3, CHUNK + 1] = 60.0  # has all the mass
    logits[4] = -torch.inf
    logits[5] = 2.0
    logits[7], logits[7, ::2] = 0.0, -0.0  # which are equal
    temperatures = torch.tensor([0.7, 0.6, 1.0, 1.0, 1.0, 1.0, 0.0, 1.0], device=device)
    ks = torch.tensor([40, 0, 20, 20, 20, 20, 20, 20], dtype=torch.int32, device=device)
    ps = torch.tensor([0.95, 0.9, 1.0, 0.9, 0.9, 0.9, 0.9, 0.9], device=device)
    filters = (temperatures, ks, ps, None)
    got = limits(logits, *filters).thresholds_S.tolist()
    for row in range(rows):
        alone = [None if x is None else x[row : row + 1].clone() for x in filters]
        assert limits(logits[row : row + 1], *alone).thresholds_S.tolist() == [got[row]]
    x = logits.double()
    for row, top_k in ((0, 40), (1, num_vocab), (2, 20)):
        kept = x[row].sort(descending=True).values[:top_k]
        before = (kept / float(temperatures[row])).softmax(0).cumsum(0).roll(1)
        before[0] = 0
        kept = kept[before < float(ps[row])]
        assert torch.equal(x[row] >= got[row], x[row] >= kept[-1])
    assert (x[3] >= got[3]).nonzero().tolist() == [[CHUNK + 1]]
    assert got[4] == got[6] == -torch.inf
    for row in (5, 7):
        assert (x[row] >= got[row]).all()
