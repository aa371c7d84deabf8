"""A weight with adapters: both ways to add them, beside the products written out."""

from __future__ import annotations

import torch
from torch import Tensor

from minisgl.kernel.ops import Ops
from minisgl.quantization import Part
from minisgl.quantization.weight import PlainWeight, WeightBuild
from minisgl_zoo.lora.products import AllSlots
from minisgl_zoo.lora.weight import AdaptedWeight, StepRows

INPUTS, RANK, SLOTS = 24, 8, 3
PARTS = (
    Part(name="q.weight", shape=(16, INPUTS), axis=0, share=range(4, 12)),
    Part(name="k.weight", shape=(8, INPUTS), axis=0, share=range(8)),
    Part(name="k.weight", shape=(8, INPUTS), axis=0, share=range(2, 6)),
)
OUTPUTS = 8 + 8 + 4


class Case:
    """A weight of three parts, two of them of one name, with adapters in slots 1 and 3; that of
    slot 3 has no part for q, and a lower rank."""

    def __init__(self, *, is_gpu: bool, dtype: torch.dtype = torch.float64) -> None:
        random = torch.Generator().manual_seed(3)

        def numbers(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=random, dtype=torch.float64).to(dtype)

        self.step = StepRows(SLOTS, RANK, is_gpu=is_gpu)
        base = PlainWeight(WeightBuild(ops=Ops(), dtype=dtype, parts=PARTS))
        base.tensor = self.dense = numbers(OUTPUTS, INPUTS)
        self.weight = AdaptedWeight(base, PARTS, self.step)
        self.weight.init_buffers(torch.device("cpu"))
        self.deltas = {0: torch.zeros(OUTPUTS, INPUTS, dtype=dtype)}
        sizes = (8, 8, 4)
        whole = RANK, (0, 1, 2)
        adapters = ((2, *whole), (3, *whole), (1, *whole), (3, 5, (1, 2)))
        for slot, rank, parts in adapters:  # slots 2 and 3 have others before
            a = {min(part, 1): numbers(rank, INPUTS) for part in parts}
            b = {part: numbers(sizes[part], rank) for part in parts}
            self.weight.products.fill(slot, a, b)
            rows = [
                b[part] @ a[min(part, 1)] if part in b else torch.zeros(size, INPUTS, dtype=dtype)
                for part, size in enumerate(sizes)
            ]
            self.deltas[slot] = torch.cat(rows)
        self.weight.products.fill(2, {}, {})
        self.deltas[2] = self.deltas[0]
        self.x, self.bias = numbers(7, INPUTS), numbers(OUTPUTS)
        self.residual, self.norm = numbers(7, INPUTS), numbers(INPUTS)

    def begin(self, *slots: int) -> None:
        self.step.begin(torch.tensor(slots, dtype=torch.int32), torch.tensor([0, 6, 2]))

    def expected(self, x: Tensor, *slots: int) -> Tensor:
        rows = [(self.dense + self.deltas[slot]) @ row for slot, row in zip(slots, x, strict=True)]
        return torch.stack(rows) + self.bias


def assert_close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def check(is_gpu: bool) -> None:
    case = Case(is_gpu=is_gpu, dtype=torch.float64 if is_gpu else torch.float32)
    weight, x, bias = case.weight, case.x, case.bias
    for slots in ((0, 1, 1, 3, 0, 2, 3), (1,) * 7, (3,) * 7, (2,) * 7):
        case.begin(*slots)
        assert_close(weight.linear(x, bias), case.expected(x, *slots))
        some = [slots[i] for i in (0, 6, 2)]  # of the last layers
        assert_close(weight.linear(x[:3], bias), case.expected(x[:3], *some))
        gated = case.expected(x, *slots)
        expected = Ops().gated(gated, "silu")
        assert_close(weight.linear(x, bias, "silu"), expected)
        wide = torch.cat((x, x), 1)
        adapted = case.expected(Ops().gated(wide, "silu"), *slots)
        assert_close(weight.gated_linear(wide, "silu", bias), adapted)
        y, residual = weight.norm_linear(x, case.residual, case.norm, 1e-6, bias)
        normed, summed = Ops().normed(x, case.residual, case.norm, 1e-6)
        assert_close(y, case.expected(normed, *slots))
        assert_close(residual, summed)


def test_the_masked_products_of_a_gpu_are_those_of_each_tokens_adapter() -> None:
    check(is_gpu=True)


def test_the_products_of_a_cpu_are_those_of_each_tokens_adapter() -> None:
    check(is_gpu=False)


def test_a_step_without_adapters_is_that_of_the_weight_alone() -> None:
    case = Case(is_gpu=False)
    base = case.weight.base
    for slots in (None, torch.zeros(7, dtype=torch.int32)):
        case.step.begin(slots, torch.tensor([6]))
        assert torch.equal(case.weight.linear(case.x, case.bias), base.linear(case.x, case.bias))


def test_an_overflow_of_another_adapter_reaches_no_other_token() -> None:
    case = Case(is_gpu=True)
    assert isinstance(case.weight.products, AllSlots)
    case.weight.products.a[2] *= 1e308
    slots = (0, 1, 1, 1, 0, 2, 0)
    case.begin(*slots)
    assert_close(case.weight.linear(case.x, case.bias), case.expected(case.x, *slots))


def test_the_memory_of_slots_is_counted() -> None:
    for is_gpu, size in ((True, 2), (False, 4)):
        weight = Case(is_gpu=is_gpu, dtype=torch.bfloat16).weight
        per_rank = 2 * INPUTS + OUTPUTS if is_gpu else 2 * (INPUTS + OUTPUTS)
        assert weight.num_buffer_bytes == SLOTS * RANK * per_rank * size
        assert weight.products.num_bytes == weight.num_buffer_bytes
