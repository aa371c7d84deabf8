"""`benchmarks gemms` as far as a CPU goes: sizes, floors and refusals."""

from __future__ import annotations

import pytest
import torch

from minisgl.kernel.ops import Ops
from minisgl_bench.floor import gemm_floor_s
from minisgl_bench.run import main
from minisgl_bench.studies import gemms
from minisgl_bench.studies.gemms import SHAPES, Layer

TINY = Layer(hidden=64, attended=32, qkv=64, inner=96)


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [
        ("qwen3-0.6b", (1024, 2048, 4096, 3072)),
        ("qwen3-14b", (5120, 5120, 7168, 17_408)),
        ("qwen3-32b-tp4", (5120, 2048, 2560, 6400)),
    ],
)
def test_sizes_of_a_layer(shape: str, sizes: tuple[int, int, int, int]) -> None:
    hidden, attended, qkv, inner = sizes
    layer = Layer.of(SHAPES[shape])
    assert layer == Layer(hidden=hidden, attended=attended, qkv=qkv, inner=inner)
    bytes_alone = layer.num_copies() * 2 * hidden * attended  # the output's weights are fewest
    assert 5 * 50e6 < bytes_alone < 5 * 50e6 + 100e6


def test_the_floor_is_weights_or_arithmetic() -> None:
    # Down of 14B, 5,120 x 17,408: 178.26 MB at 4.3 TB/s; 45.63 GFLOP at 790 TFLOP/s.
    assert gemm_floor_s(64, 5120 * 17_408) == pytest.approx(41.46e-6, rel=1e-3)
    assert gemm_floor_s(256, 5120 * 17_408) == pytest.approx(57.76e-6, rel=1e-3)
    floors = Layer.of(SHAPES["qwen3-14b"]).floors_s(64)
    assert list(floors) == ["qkv", "o", "gate_up", "down"]
    assert sum(floors.values()) == pytest.approx(153.6e-6, rel=1e-3)  # 330.3 million weights


def test_a_layer_left_out_is_beyond_the_tolerance() -> None:
    torch.manual_seed(0)
    layers = [gemms.random_weights(TINY, torch.device("cpu")) for _ in range(60)]
    x, attended = torch.randn(8, 64).bfloat16(), torch.randn(8, 32).bfloat16()
    outputs = []
    for scale in (1, 0):
        layers[30]["down"] *= scale
        outputs.append(gemms.run_layers(Ops(), layers, x, attended).float())
    whole, partial = outputs
    assert (whole - partial).norm() / whole.norm() > gemms.TOLERANCE


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--shapes qwen3-14b,none", "there is no shape 'none'; there are: qwen3-0.6b, qwen3-14b"),
        ("--rows 4,0", "must be a whole number of at least 1, got '0'"),
    ],
)
def test_wrong_flags_are_reported(
    flags: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["gemms", *flags.split()], "minisgl_bench.studies")
    assert exit_info.value.code == 2
    assert says in " ".join(capsys.readouterr().err.split())


def test_without_a_gpu_it_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["gemms"], "minisgl_bench.studies") == 2
    assert capsys.readouterr().err == (
        "python -m minisgl_bench.studies gemms: this times a GPU, and torch finds no CUDA device "
        "here; `python -m minisgl_bench.studies` has kernels and cpu_formats, which time a CPU\n"
    )
