"""Calls of the C++ kernels: what Python passes, and what it gets back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from minisgl.kernel.jit import load_library

IDS = np.array([1, 2, 3], np.int32)
ROW = torch.ones(1, 4)


@pytest.fixture(scope="module")
def library() -> Any:
    return load_library()


def test_results_are_numbers_and_booleans(library: Any) -> None:
    assert library.common_prefix_length(IDS, IDS[:2]) == 2
    assert library.copy_finite(ROW, None, 1) is True
    assert library.copy_finite(ROW / 0, None, 1) is False
    assert library.rms_norm(ROW, ROW[0], torch.empty_like(ROW), 0, 1) is None


def test_a_tensor_without_elements_is_packed(library: Any) -> None:
    empty = np.array([], np.int32)
    assert library.common_prefix_length(empty, IDS) == 0
    assert library.common_prefix_length(IDS[:0], empty) == 0


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((IDS,), TypeError, "common_prefix_length: 1 argument"),
        ((IDS, 1), TypeError, "common_prefix_length: argument 1 has a wrong type"),
        ((None, IDS), TypeError, "common_prefix_length: argument 0 has a wrong type"),
        ((IDS, "a"), TypeError, "common_prefix_length: argument 1 has a wrong type"),
        ((IDS, IDS[::2]), ValueError, "contiguous int32"),
        ((IDS, np.zeros((2, 2), np.int32)), ValueError, "contiguous int32"),
        ((IDS, np.zeros(3, np.int64)), ValueError, "contiguous int32"),
    ],
)
def test_what_is_wrong_is_raised(
    arguments: tuple[object, ...], error: type[Exception], message: str, library: Any
) -> None:
    with pytest.raises(error, match=message):
        library.common_prefix_length(*arguments)


def test_a_fraction_is_no_whole_number(library: Any) -> None:
    with pytest.raises(TypeError, match="rms_norm: argument 4"):
        library.rms_norm(ROW, ROW[0], torch.empty_like(ROW), 1e-5, 1.5)


def test_a_message_has_its_numbers(library: Any) -> None:
    with pytest.raises(ValueError, match="rms_norm: 3 weights for rows of 4"):
        library.rms_norm(ROW, ROW[0, :3], torch.empty_like(ROW), 1e-5, 1)
