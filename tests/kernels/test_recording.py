"""Recorded calls: made again they give what the work gives; work that cannot be is not recorded.

Planted once, and noticed: blocks that stay lent, outputs that share a block, ops of torch and reads
on the host that count as views, results of ops that stay where the first run had them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from minisgl.kernel.cpu import CpuOps
from minisgl.kernel.jit import load_library
from minisgl_kernels.recording import create_ops

BF16 = torch.bfloat16


@pytest.fixture
def ops() -> Iterator[CpuOps]:
    with torch.inference_mode():  # as steps run
        yield create_ops(load_library())


def norms(ops: CpuOps, x: Tensor, weight: Tensor, count: int = 3) -> Callable[[], Tensor]:
    """Norms one after another, with views between: x changes, the rest stays."""

    def compute() -> Tensor:
        y, residual = ops.rms_norm(x.view(-1, 2, x.shape[1] // 2).flatten(1), weight, 1e-6), x
        for _ in range(count):
            y, residual = ops.add_rms_norm(y[:, :], residual, weight, 1e-6)
        return y

    return compute


def test_a_replay_reads_what_is_there_now(ops: CpuOps) -> None:
    x, weight = torch.randn(5, 64, dtype=BF16), torch.randn(64, dtype=BF16)
    output, recording = ops.calls.record(norms(ops, x, weight))
    assert recording
    torch.testing.assert_close(output, norms(ops, x, weight)(), rtol=0, atol=0)
    for _ in range(2):
        x.normal_()
        torch.testing.assert_close(recording.replay(), norms(ops, x, weight)(), rtol=0, atol=0)


def test_views_of_one_address_and_shape_differ_by_strides(ops: CpuOps) -> None:
    """They may differ in their strides alone, as rows of a wider tensor and every other row."""
    x, weight = torch.randn(8, 64, dtype=BF16), torch.randn(64, dtype=BF16)

    def compute() -> Tensor:
        return ops.add_rms_norm(
            ops.rms_norm(x[:4], weight, 1e-6), ops.rms_norm(x[::2], weight, 1e-6), weight, 1e-6
        )[0]

    _, recording = ops.calls.record(compute)
    assert recording
    torch.testing.assert_close(recording.replay(), compute(), rtol=0, atol=0)


def test_a_tensor_times_a_number_is_replayed(ops: CpuOps) -> None:
    """As decoders scale their embeddings."""
    x, weight = torch.randn(5, 64, dtype=BF16), torch.randn(64, dtype=BF16)

    def compute() -> Tensor:
        scaled = ops.rms_norm(x, weight, 1e-6) * 25.25
        return ops.add_rms_norm(scaled, x * 0.5, weight, 1e-6)[1]

    output, recording = ops.calls.record(compute)
    assert recording
    torch.testing.assert_close(output, compute(), rtol=0, atol=0)
    x.normal_()
    torch.testing.assert_close(recording.replay(), compute(), rtol=0, atol=0)
    lent = {block.data_ptr() for block in ops.calls._blocks._by_address.values()}
    assert len(lent) == 4, "the products, too, are in blocks of all recordings"


def test_recordings_share_memory_but_not_outputs(ops: CpuOps) -> None:
    weight = torch.randn(64, dtype=BF16)
    inputs = [torch.randn(5, 64, dtype=BF16) for _ in range(3)]
    works = [norms(ops, x, weight, count=20) for x in inputs]
    recordings = [recording for _, recording in map(ops.calls.record, works) if recording]
    outputs = [recording.replay() for recording in recordings]
    for work, output in zip(works, outputs, strict=True):
        torch.testing.assert_close(output, work(), rtol=0, atol=0)
    # Four that live at once and three outputs, instead of 42 for each recording.
    assert len(ops.calls._blocks._by_address) <= 8
    assert len({output.data_ptr() for output in outputs}) == 3


@pytest.mark.parametrize(
    "op",
    [
        lambda x: x * 2 + 1,
        lambda x: x.t().mul(0.5).t(),
        lambda x: x.add_(1),
        lambda x: torch.add(x, x, out=torch.empty_like(x)),
        lambda x: torch.cat((x[1:], x[:1])),
        lambda x: x[torch.tensor([4, 0, 0, 2, 1])],
        lambda x: x.index_put_((torch.tensor([3]),), torch.full((64,), 7.0, dtype=BF16)),
        lambda x: x.t().reshape(5, 64),
        lambda x: x.sort(stable=True).values,
        lambda x: torch.where(x > 0, x, torch.zeros(())).to(BF16),
        lambda x: x.topk(64, dim=1)[0].softmax(-1, torch.float32).to(BF16),
    ],
)
def test_ops_of_torch_are_replayed(ops: CpuOps, op: Callable[[Tensor], Tensor]) -> None:
    x, weight = torch.randn(5, 64, dtype=BF16), torch.randn(64, dtype=BF16)
    given = x.clone()

    def compute() -> Tensor:
        return ops.rms_norm(op(ops.rms_norm(x, weight, 1e-6)) + op(x[:, :]), weight, 1e-6)

    for number in range(3):
        x.copy_(given + number)
        want = compute()
        x.copy_(given + number)
        if not number:
            got, recording = ops.calls.record(compute)
        assert recording
        torch.testing.assert_close(recording.replay() if number else got, want, rtol=0, atol=0)


@pytest.mark.parametrize(
    "op",
    [
        lambda x: x.sum().item(),
        lambda x: bool(x[0, 0] > 0),
        lambda x: x.view(torch.int16).numpy(),
        lambda x: x.tolist(),
        lambda x: x.nonzero(),
        lambda x: torch.where(x > 0),
        lambda x: x[x > 0],
        lambda x: torch.equal(x, x),
        lambda x: x.view(torch.int16).unique(),
    ],
)
def test_work_that_numbers_decide_is_not_recorded(
    ops: CpuOps, op: Callable[[Tensor], object]
) -> None:
    x, weight = torch.randn(5, 64, dtype=BF16), torch.randn(64, dtype=BF16)
    other = x.clone()

    def compute() -> Tensor:
        op(other)
        return ops.rms_norm(x, weight, 1e-6)

    def clean() -> Tensor:
        return ops.rms_norm(x, weight, 1e-6)

    output, recording = ops.calls.record(compute)
    assert recording is None
    torch.testing.assert_close(output, clean(), rtol=0, atol=0)
    assert ops.calls.record(clean)[1], "the next work is recorded"


def test_take_ids(ops: CpuOps) -> None:
    ids = torch.tensor([-1, 7, -1, 9], dtype=torch.int32)
    rows, last = torch.tensor([2, 0, 1], dtype=torch.int32), torch.tensor([4, 5, 6]).int()
    assert ops.take_ids(ids, rows, last).tolist() == [6, 7, 5, 9]
