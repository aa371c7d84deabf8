"""How products of few rows are cut; the kernel itself runs on GPUs (tests/gpu/test_thin.py)."""

from __future__ import annotations

import pytest
import torch

from minisgl.kernel.thin import (
    INPUTS,
    LARGE,
    MAX_ROWS,
    SHARED_BYTES,
    SMALL,
    Form,
    choose_form,
    kernel_source,
)

H200 = (132, 132, 117, 120, 110, 102, 105, 120)  # blocks at once, in clusters of 1, 2, ...
SHAPES = [
    (4096, 1024, False), (1024, 2048, False), (3072, 1024, True), (1024, 3072, False),  # 0.6B
    (17_408, 5120, True), (5120, 17_408, False),  # 14B
    (2560, 5120, False), (5120, 2048, False), (6400, 5120, True),  # a quarter of 32B
    (8, 64, False), (40, 128, True), (72, 320, False), (2048, 192, True), (128, 2048, False),
]  # fmt: skip


@pytest.mark.parametrize(("outputs", "inputs", "gated"), SHAPES)
def test_a_form_fits_the_device(outputs: int, inputs: int, gated: bool) -> None:
    form = choose_form(outputs, inputs, gated, H200)
    assert form is not None
    assert form.gated == gated
    assert form.num_blocks(outputs) <= H200[form.split - 1]
    assert form.split * INPUTS <= inputs
    for rows in range(1, MAX_ROWS + 1):
        stages = form.stages(rows, inputs)
        last = (stages - 1) * form.stage_bytes(rows)
        # The matrix instructions of the last stage read whole tiles of 64 rows.
        assert last + MAX_ROWS * INPUTS * 2 <= form.shared_bytes(rows, inputs)
        assert stages * (form.stage_bytes(rows) + 16) < form.shared_bytes(rows, inputs)
        assert form.shared_bytes(rows, inputs) <= SHARED_BYTES
        # Else both warpgroups would wait on one barrier, and take one turn for another.
        assert form.halves or stages % 2 == 0


def test_all_outputs_are_made_once() -> None:
    for outputs, inputs, gated in SHAPES:
        form = choose_form(outputs, inputs, gated, H200)
        assert form is not None
        tiles = form.num_blocks(outputs) // form.split
        made = form.width // 2 if gated else form.width
        assert (tiles - 1) * made < outputs <= tiles * made


@pytest.mark.parametrize(
    ("outputs", "inputs", "gated"),
    [
        (7168, 5120, False),  # 37 million, between SMALL and LARGE
        (151_936, 1024, False),  # more blocks than run at once
        (64, 100, False),  # not whole turns
        (12, 64, False),  # not whole chunks
    ],
)
def test_what_is_left_to_cublas(outputs: int, inputs: int, gated: bool) -> None:
    assert choose_form(outputs, inputs, gated, H200) is None


def test_sizes_count_gate_and_up() -> None:
    inputs = 4096
    outputs = SMALL // inputs
    assert choose_form(outputs, inputs, False, H200) is not None
    assert choose_form(outputs, inputs, True, H200) is None
    assert choose_form(LARGE // inputs // 2, inputs, True, H200) is not None


def test_the_instruction_has_an_operand_for_each_sum() -> None:
    source = kernel_source(Form(48, 1, gated=False, halves=False), torch.float16)
    assert "m64n48k16.f32.f16.f16" in source
    assert source.count('"+f"') == 24
    assert "%24, %25, add" in source
