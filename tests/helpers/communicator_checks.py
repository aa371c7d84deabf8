"""Checks of the communicators between GPUs. Each rank runs this file and reports each check.

Exact where numbers are small integers, else beside a sum in float64; the same bits on every rank.
"""

from __future__ import annotations

import json
import random
import sys
import traceback
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from minisgl.distributed import DistributedCommunicator, DistributedInfo
from minisgl.distributed.ranks import create_communicator
from minisgl.kernel.ops import Ops

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ROW_BYTES = 5120 * 2
COUNTS = (1, 3, 8, 9, 24, 1000, 5120, 5124, 16 * 5120, 100_008, 256 * 5120, 4 << 20, 8 << 20)
Reduce = Callable[[Tensor], Tensor]


class Rank:
    """The argument of a check: this rank, its communicators, and the ways to all-reduce."""

    def __init__(self, rank: int, size: int, store: str) -> None:
        from minisgl.distributed.gloo import GlooCommunicator, meet
        from minisgl.distributed.nccl import PyNcclCommunicator
        from minisgl.kernel import jit
        from minisgl_kernels.peer import connect_peers

        info = DistributedInfo(rank, size)
        self.rank, self.size, self.device = rank, size, torch.device("cuda", rank)
        torch.cuda.set_device(self.device)
        self.host, nccl_host, peer_host = (
            GlooCommunicator(info, meet(info, store + name)) for name in ("a", "b", "c")
        )
        library = jit.load_library(jit.CUDA)
        torch.cuda.synchronize()
        self.peer = connect_peers(peer_host, self.device, library)
        assert self.peer is not None
        self.comms: dict[str, DistributedCommunicator] = {
            "default": create_communicator(info, store=f"{store}d", device=self.device),
            "torch": create_communicator(info, store=f"{store}e", device=self.device, pynccl=False),
            "nccl": PyNcclCommunicator(nccl_host, library, peer=None),
            "mixed": PyNcclCommunicator(peer_host, library, self.peer),
        }
        self.sums: dict[str, Reduce] = {
            **{name: comm.all_reduce for name, comm in self.comms.items()},
            "one_shot": self._forced("one_shot", 1),
            "two_shot": self._forced("two_shot", size),
        }

    def _forced(self, algorithm: str, shares: int) -> Reduce:
        peer = self.peer
        assert peer is not None

        def reduce(x: Tensor) -> Tensor:
            if peer.algorithm(x) and x.nbytes <= peer._capacity * 16 * shares:
                return peer.all_reduce(x, algorithm)
            return self.comms["nccl"].all_reduce(x)

        return reduce

    def all(self, make: Callable[[torch.Generator], Tensor], seed: int) -> list[Tensor]:
        """Every rank's tensor of one seed."""
        return [
            make(torch.Generator(self.device).manual_seed(seed * self.size + rank))
            for rank in range(self.size)
        ]

    def integers(self, count: int, dtype: torch.dtype, seed: int) -> tuple[Tensor, Tensor]:
        """This rank's, and the exact sum of all."""

        def make(generator: torch.Generator) -> Tensor:
            return torch.randint(-8, 9, (count,), generator=generator, device=self.device)

        numbers = self.all(make, seed)
        return numbers[self.rank].to(dtype), torch.stack(numbers).sum(0).to(dtype)

    def close(self) -> None:
        for comm in (*self.comms.values(), self.host):
            comm.close()


def exact(rank: Rank, reduce: Reduce) -> None:
    for dtype in DTYPES:
        for count in COUNTS:
            x, expected = rank.integers(count, dtype, count)
            assert torch.equal(reduce(x), expected), (dtype, count)


def close(rank: Rank, reduce: Reduce) -> None:
    for dtype in DTYPES:
        for count in (8, 5120, 1 << 20):
            numbers = rank.all(
                lambda g, n=count, t=dtype: torch.randn(n, generator=g, device="cuda").to(t), count
            )
            total = reduce(numbers[rank.rank].clone())
            wide = torch.stack(numbers).double()
            error = (total.double() - wide.sum(0)).abs() / wide.abs().sum(0)
            assert error.max() <= rank.size * torch.finfo(dtype).eps / 2, (dtype, count)
            bits = total.view(torch.uint8).cpu()[None]
            assert len(rank.host.all_gather(bits, 0).unique(dim=0)) == 1, "other bits"


def views(rank: Rank, reduce: Reduce) -> None:
    x, expected = rank.integers(4096, torch.bfloat16, 1)
    shifted = torch.cat([x[:1], x])[1:]
    assert torch.equal(reduce(shifted), expected)
    assert torch.equal(reduce(x.view(64, 64).t()), expected.view(64, 64).t())
    assert torch.equal(reduce(x.view(2, 32, 64)), expected.view(2, 32, 64))
    assert reduce(x[:0]).shape == (0,)


def not_a_number(rank: Rank, reduce: Reduce) -> None:
    """All bits set is what the shared memory holds where nothing has arrived."""
    for dtype in DTYPES:
        x = torch.full((4096,), -1, dtype=torch.int32, device="cuda").view(dtype)
        assert reduce(x).isnan().all()
    x, expected = rank.integers(4096, torch.float32, 2)
    x[100] = float("inf") if rank.rank == 0 else -float("inf")
    assert reduce(x)[100].isnan()
    assert torch.equal(reduce(rank.integers(4096, torch.float32, 2)[0]), expected)


def in_graphs(rank: Rank, reduce: Reduce) -> None:
    """A graph with five all-reduces of three sizes among other kernels, replayed with other
    numbers."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        inputs = [torch.zeros(n, dtype=torch.bfloat16, device="cuda") for n in (5120, 72, 1 << 19)]

        def compute() -> list[Tensor]:
            first, second, third = (reduce(x * 1) for x in inputs)
            return [first + 1, reduce(inputs[0] + inputs[0].flip(0)), second, reduce(third * 0.5)]

        compute()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            outputs = compute()
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        for turn in range(50):
            sums = []
            for x in inputs:
                mine, total = rank.integers(len(x), torch.bfloat16, turn)
                x.copy_(mine)
                sums.append(total)
            if (turn + rank.rank) % 3 == 0:
                torch.cuda._sleep(200_000)
            graph.replay()
            flipped = sums[0] + sums[0].flip(0)
            expected = [sums[0] + 1, flipped, sums[1], sums[2] * 0.5 * rank.size]
            for got, want in zip(outputs, expected, strict=True):
                wrong += (got != want).sum()
            if turn % 4 == 0:  # a call outside, as a prefill makes between decodes
                mine, total = rank.integers(4096, torch.bfloat16, turn)
                wrong += (reduce(mine) != total).sum()
    stream.synchronize()
    assert wrong.item() == 0
    del graph, outputs


def in_any_order(rank: Rank, reduce: Reduce) -> None:
    """Many calls, none waited for, of ranks that are late by turns."""
    sizes, delays = random.Random(0), random.Random(rank.rank)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    pools = {
        count: [rank.integers(count, torch.float16, seed) for seed in range(7)]
        for count in (8, 128, 1024, 1032, 5120, 16 * 5120, 1 << 19)
    }
    for _ in range(1000):
        x, total = sizes.choice(pools[sizes.choice(list(pools))])
        if delays.random() < 0.05:
            torch.cuda._sleep(delays.randrange(300_000))
        wrong += (reduce(x.clone()) != total).sum()
    assert wrong.item() == 0


def _rows(rank: Rank, count: int, dtype: torch.dtype, seed: int) -> tuple[Tensor, Tensor]:
    """This rank's part of `count` rows and the sum of all; a row is as long in every dtype."""
    size = ROW_BYTES // dtype.itemsize
    x, total = rank.integers(count * size, dtype, seed)
    return x.view(count, size), total.view(count, size)


def add_norms(rank: Rank, comm: DistributedCommunicator) -> None:
    """Two calls as a decoder makes them, beside the plain sum; then rows of the residual."""
    ops, peer = Ops(), rank.peer
    for dtype in DTYPES:
        for count in (1, 3, 16, 17, 64, 65, 200, 801, 1000, 2048, 2049):
            (x, x_sum), (y, y_sum) = (_rows(rank, count, dtype, seed) for seed in (count, 7))
            weight = torch.linspace(-2, 2, x.shape[1], device="cuda").to(dtype)
            wanted, _ = ops.add_rms_norm(y_sum, x_sum, weight, 1e-6)
            normed, residual = comm.add_norm(ops, x, None, weight, 1e-6)
            _near(normed, ops.rms_norm(x_sum, weight, 1e-6), count)
            normed, residual = comm.add_norm(ops, y, residual, weight, 1e-6)
            _near(normed, wanted, count)
            rows = torch.arange(count - 1, -1, -3, device="cuda")
            assert torch.equal(comm.take_rows(residual, rows, count), (x_sum + y_sum)[rows])
            bits = normed.view(torch.uint8).cpu()[None]
            assert len(rank.host.all_gather(bits, 0).unique(dim=0)) == 1, "other bits"
    assert peer is not None
    for algorithm in ("one_shot", "two_shot"):  # also where another would be taken
        for count in (1, 2, 5, 64, 130):
            x, x_sum = _rows(rank, count, torch.bfloat16, count)
            weight = torch.ones(x.shape[1], dtype=x.dtype, device="cuda")
            normed, _ = peer.add_norm(x, None, weight, 1e-6, algorithm)
            _near(normed, ops.rms_norm(x_sum, weight, 1e-6), count)


def _near(got: Tensor, wanted: Tensor, count: int) -> None:
    """To two roundings of 16 bits. In float32 the mean of 2,560 squares is added up in another
    order, and the reciprocal root is good to 2 of the last bits."""
    error = (got.double() - wanted.double()).abs() / wanted.double().abs().clamp(1e-3)
    last_bits = float(error.max()) / torch.finfo(got.dtype).eps
    assert last_bits <= (8 if got.dtype == torch.float32 else 2), (got.dtype, count, last_bits)


def add_norms_in_graphs(rank: Rank, comm: DistributedCommunicator) -> None:
    """Layers of three row counts, replayed with other numbers by ranks that are late by turns."""
    ops = Ops()
    stream = torch.cuda.Stream()
    size = ROW_BYTES // 2
    weight = torch.ones(size, dtype=torch.bfloat16, device="cuda")
    with torch.cuda.stream(stream):
        inputs = [torch.zeros(n, size, dtype=torch.bfloat16, device="cuda") for n in (1, 40, 120)]

        def compute() -> list[Tensor]:
            outputs = []
            for x in inputs:
                normed, residual = comm.add_norm(ops, x * 1, None, weight, 1e-6)
                for _ in range(3):
                    normed, residual = comm.add_norm(ops, x + normed * 0, residual, weight, 1e-6)
                outputs.append(normed)
            return outputs

        compute()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            outputs = compute()
        errors = []
        for turn in range(50):
            sums = []
            for x in inputs:
                mine, total = _rows(rank, len(x), torch.bfloat16, turn)
                x.copy_(mine)
                sums.append(total)
            if (turn + rank.rank) % 3 == 0:
                torch.cuda._sleep(200_000)
            graph.replay()
            for got, total in zip(outputs, sums, strict=True):
                wanted = ops.rms_norm(total * 4, weight, 1e-6)
                errors.append((got.float() - wanted.float()).abs().max())
    stream.synchronize()
    assert max(float(error) for error in errors) < 0.05  # values reach 5: 2 ** -6 is their last bit
    del graph, outputs


def gather_and_broadcast(rank: Rank, comm: DistributedCommunicator) -> None:
    for dtype in (*DTYPES, torch.int32, torch.int64):
        numbers = rank.all(
            lambda g, t=dtype: torch.randint(0, 100, (3, 5, 7), generator=g, device="cuda").to(t), 3
        )
        for dim in (0, 1, -1):
            assert torch.equal(comm.all_gather(numbers[rank.rank], dim), torch.cat(numbers, dim))
        count = 16 * rank.size
        columns = rank.all(
            lambda g, t=dtype, n=count: (
                torch.randint(0, 100, (n, 37), generator=g, device="cuda").to(t)
            ), 4
        )  # fmt: skip
        rows = DistributedInfo(rank.rank, rank.size).share(count)
        expected = torch.cat(columns, 1)[rows.start : rows.stop]
        assert torch.equal(comm.exchange(columns[rank.rank]), expected)
        for source in range(rank.size):
            got = comm.broadcast(numbers[rank.rank].clone(), source)
            assert torch.equal(got, numbers[source])
    x = torch.zeros(16 * rank.size, dtype=torch.int32, device="cuda")
    comm.broadcast(comm.all_gather(x, 0))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        gathered = comm.all_gather(x, 0)
        received = comm.broadcast(x + 1, 1)
        exchanged = comm.exchange(x[:, None])
    for turn in range(50):
        x.fill_(turn * rank.size + rank.rank)
        graph.replay()
        turns = torch.arange(rank.size, device="cuda") + turn * rank.size
        assert torch.equal(gathered.view(rank.size, -1), turns[:, None].expand(-1, len(x)).int())
        assert received.eq(turn * rank.size + 2).all()
        assert torch.equal(exchanged, turns[None, :].expand(16, -1).int())


def hosts_agree(rank: Rank, comm: DistributedCommunicator) -> None:
    assert comm.all_min((1 << 40) + rank.rank) == 1 << 40
    assert not torch.distributed.is_initialized()


SUM_CHECKS = (exact, close, views, not_a_number, in_graphs, in_any_order)
COMM_CHECKS = (add_norms, add_norms_in_graphs, gather_and_broadcast, hosts_agree)
COMMS = ("default", "torch", "nccl", "mixed")
CASES = [
    *(f"{x.__name__}-{name}" for x in SUM_CHECKS for name in (*COMMS, "one_shot", "two_shot")),
    *(f"{x.__name__}-{name}" for x in COMM_CHECKS for name in COMMS),
    "closed",
]


def run_rank(rank: int, size: int, store: str) -> Iterator[tuple[str, str]]:
    """Each case and what went wrong, empty when nothing did."""
    with torch.inference_mode():
        state = Rank(rank, size, store)
        functions = {check.__name__: check for check in (*SUM_CHECKS, *COMM_CHECKS)}
        for case in CASES[:-1]:
            check, _, name = case.partition("-")
            given = state.sums if functions[check] in SUM_CHECKS else state.comms
            try:
                functions[check](state, given[name])
                torch.cuda.synchronize()
            except Exception:
                yield case, traceback.format_exc()
            else:
                yield case, ""
        state.close()
        yield "closed", ""


if __name__ == "__main__":
    for outcome in run_rank(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]):
        print(json.dumps(outcome), flush=True)
