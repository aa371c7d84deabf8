"""Skinny GEMMs by weights of 4 or 8 bits on Hopper: the host side of `packed_skinny.cu`.

Kernels are compiled by NVRTC at their first use, one for each format, activation and number of
stages, and cached on disk.

Axes: M rows, D inputs, F outputs, T tokens, K experts of a token.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from minisgl.kernel.ops import Activation
from minisgl.kernel.triton.moe import Gate
from minisgl_kernels import CSRC
from minisgl_kernels.cubin import load_cubin
from minisgl_kernels.hopper import SHARED_BYTES, Kernels
from minisgl_kernels.packed_formats import CHUNK_BYTES, decodes, format_macros
from minisgl_zoo.weights.quantised import Packed

MAX_ROWS, MAX_FP8_ROWS = 8, 4
"""The most rows of x. A layer of 14B in fp8 with 4 rows takes 115.0 us here and 120.3 by Triton,
with 8 rows 139.4 and 122.2 (one H200). int4 and int8 win with 8 rows, too."""
MAX_PAIRS, MAX_8_BIT_TOKENS = 64, 1
"""The most pairs of experts, and the most tokens with 8 bits. In fp8 Qwen3-30B-A3B's take 26.5 us
for one token and 41.3 by Triton, for 8 tokens 178.9 and 78.2; not measured between."""
WARPS, MANY_WARPS = 8, 12
"""The warps of a block: WARPS with experts or more than four rows, else MANY_WARPS. With one row a
layer of 14B takes 63.3 us in int4 with 8 warps, 58.3 with 12, 58.5 with 16; in fp8 93.3, 92.6 and
93.5 (one H200)."""
MAX_SIDES = 4
"""Rows of x up to which two chunks of a row of weights lie side by side in an instruction."""
BESIDE_BYTES = {False: 1024, True: 3072}
"""The bytes of `Shared` in packed_staging.cuh. False: of a single matrix, for sums of squares.
True: of experts, also for the experts that the pairs chose."""
ALONE_BYTES = 116 << 10
"""The least shared memory of a block that multiplies by a single matrix, so that a multiprocessor
holds one. If it held two, a small kernel between two GEMMs decided which multiprocessors got two
blocks of the next GEMM and which got none: a layer of int4 took 99.6 us with a norm in between, and
71.6 so (README.md)."""
PAIR_BYTES = 113 << 10
"""The shared memory of a block of experts: a multiprocessor holds two, so one reads while the other
waits."""
MOST_STAGES, MANY_STAGES, EXPERT_STAGES, LEAST_STAGES = 6, 5, 3, 3
COLUMN_BYTES = 80
"""A warp's sums of a tile for one row of x."""

Experts = Literal[0, 1, 2]
"""A single matrix, gate and up of experts, or down."""


@dataclass(frozen=True, slots=True)
class Config:
    """The macros of a kernel, its shared memory, its warps, and the most tiles of a block."""

    numbers: tuple[tuple[str, int], ...]
    shared_bytes: int
    warps: int
    most_tiles: int


class _Task(ctypes.Structure):
    """struct Task."""

    _fields_ = (
        *(
            (name, ctypes.c_int64)
            for name in (
                *("x", "residual", "norm", "numbers", "scale", "zero", "outer", "bias", "out"),
                *("total", "ids", "shares"),
            )
        ),
        *((name, ctypes.c_float) for name in ("eps", "alpha", "limit")),
        *(
            (name, ctypes.c_int32)
            for name in (
                "rows",
                "outputs",
                "inputs",
                "pairs",
                "top_k",
                "first",
                "count",
                "float_norm",
                "most_tiles",
            )
        ),
    )


def takes(weight: Packed) -> bool:
    """Return whether a kernel reads this format with so many inputs."""
    if not decodes(weight) or weight.shape[-1] % 32:
        return False
    if weight.scale is None or weight.kind == "fp4":
        return True
    if weight.rows != 1:
        row_bytes = weight.scale.shape[-1] * weight.scale.itemsize
        if weight.rows % 8 or row_bytes % 4:
            return False
    return weight.group >= (32 if weight.is_4_bit else CHUNK_BYTES)


def choose_config(
    weight: Packed,
    rows: int,
    gate: Gate | None,
    num_cores: int,
    *,
    is_plain: bool,
    experts: Experts = 0,
    tokens: int = 0,
    pairs: int = 0,
) -> Config | None:
    """Return the config, or None if the rows do not fit. rows: of x in shared memory.
    is_plain: without norm and residual. tokens, pairs: of experts."""
    group, block, has_zero = weight.group, weight.rows, weight.zero is not None
    columns = tokens or rows
    has_sides = gate is None and columns <= MAX_SIDES
    chunk = CHUNK_BYTES * (2 if weight.is_4_bit else 1)
    turn = 2 * chunk if has_sides else chunk
    inputs = -(-weight.shape[-1] // turn) * turn
    scale_rows = 8 if block == 1 else 1
    groups = -(-weight.shape[-1] // group) if group else 1
    blocks = 1 if has_sides else 2
    item = 0 if weight.scale is None else weight.scale.itemsize
    scale_bytes = -(-blocks * scale_rows * groups * item // 16) * 16
    zero_bytes = -(-blocks * 8 * groups // 16) * 16 if has_zero else 0
    warps, stages, num_blocks = WARPS, MOST_STAGES, num_cores
    least, room = ALONE_BYTES, SHARED_BYTES
    num_tiles = weight.shape[-2] // (8 if has_sides else 16)
    if experts:
        least = room = PAIR_BYTES
        stages, num_blocks = EXPERT_STAGES, 2 * num_cores
        num_tiles *= min(len(weight.numbers), pairs)
    elif columns <= MAX_SIDES:
        warps, stages = MANY_WARPS, MANY_STAGES
    most_tiles = -(-num_tiles // num_blocks)
    fixed = BESIDE_BYTES[experts > 0] + 128
    fixed += rows * (inputs * 2 + 64 + inputs // chunk * 16)
    fixed += most_tiles * (scale_bytes + zero_bytes + warps * columns * COLUMN_BYTES)
    stage = warps * 1024
    stages = min((room - fixed) // stage, stages)
    if stages < LEAST_STAGES:
        return None
    macros = format_macros(weight, gate) | {
        "SIDES": int(has_sides),
        "EXPERTS": experts,
        "WARPS": warps,
        "STAGES": stages,
        "BESIDE": BESIDE_BYTES[experts > 0],
        "EVEN": int(inputs == weight.shape[-1]),
        "PLAIN": int(is_plain),
    }
    shared_bytes = max(fixed + stages * stage, least)
    return Config(tuple(macros.items()), shared_bytes, warps, most_tiles)


def kernel_cubin(numbers: tuple[tuple[str, int], ...]) -> bytes:
    """Return the compiled kernel. Raises JitUnavailable. numbers: of a `Config`."""
    defines = [f"{name}={value}" for name, value in numbers]
    headers = ("hopper.cuh", "decode.cuh", "gate.cuh", "packed_numbers.cuh", "packed_staging.cuh")
    return load_cubin(CSRC, "packed_skinny", "sm_90a", defines, headers)


class PackedSkinny:
    """The kernels on the current device.

    Weights are fetched while the kernel before still runs: they must have been written before it.
    """

    def __init__(self) -> None:
        """Raises JitUnavailable where nothing can be compiled, RuntimeError without a device."""
        self._kernels = Kernels(
            "packed_skinny",
            kernel_cubin,
            "skinny GEMMs by packed weights are Triton's",
            prefer_shared=True,
        )

    def norm_linear(
        self,
        x_MD: Tensor,
        residual_MD: Tensor | None,
        norm_weight: Tensor | None,
        eps: float,
        weight: Packed,
        bias: Tensor | None,
        gate: Activation | None,
    ) -> tuple[Tensor, Tensor] | None:
        """See `Ops.norm_linear`; without a norm weight, `Ops.linear`. Returns None if Triton should
        compute it."""
        outputs = weight.shape[-2] // (2 if gate else 1)
        most = MAX_FP8_ROWS if weight.kind == "fp8" else MAX_ROWS
        if not 0 < len(x_MD) <= most or outputs % (8 if gate else 16) or not takes(weight):
            return None
        if x_MD.dtype != torch.bfloat16 or not x_MD.is_contiguous():
            return None
        config = choose_config(
            weight,
            len(x_MD),
            Gate(is_gelu=gate == "gelu_tanh") if gate else None,
            self._kernels.num_cores,
            is_plain=norm_weight is None and residual_MD is None,
        )
        if config is None or not self._kernels.get(config.numbers):
            return None
        out_MF = torch.empty((len(x_MD), outputs), dtype=x_MD.dtype, device=x_MD.device)
        total_MD = x_MD if residual_MD is None else torch.empty_like(x_MD)
        is_float = norm_weight is not None and norm_weight.dtype == torch.float32
        task = _Task(eps=eps, rows=len(x_MD), float_norm=is_float)
        _fill(task, x=x_MD, residual=residual_MD, norm=norm_weight, bias=bias, total=total_MD)
        self._launch(task, config, weight, out_MF)
        return out_MF, total_MD

    def experts(
        self,
        x_TD: Tensor,
        gate_up: Packed,
        down: Packed,
        weights_TK: Tensor,
        ids_TK: Tensor,
        first: int,
        gate: Gate,
        biases: tuple[Tensor | None, Tensor | None],
    ) -> Tensor | None:
        """Return the outputs of each pair of a token and an expert, times its weight: [T * K, D].
        Rows of pairs whose expert is on another rank are not written. None if Triton should compute
        them."""
        (num_tokens, hidden), pairs, inner = x_TD.shape, ids_TK.numel(), down.shape[-1]
        most = MAX_ROWS if gate_up.is_4_bit else MAX_8_BIT_TOKENS
        if not 0 < num_tokens <= most or pairs > MAX_PAIRS or x_TD.dtype != torch.bfloat16:
            return None
        if not (takes(gate_up) and takes(down)) or hidden % 16 or inner % 8:
            return None
        choose = partial(
            choose_config,
            num_cores=self._kernels.num_cores,
            is_plain=True,
            tokens=num_tokens,
            pairs=pairs,
        )
        up_config = choose(gate_up, num_tokens, gate, experts=1)
        down_config = choose(down, pairs, None, experts=2)
        if up_config is None or down_config is None:
            return None
        if not self._kernels.get_all((up_config.numbers, down_config.numbers)):
            return None
        act = torch.empty((pairs, inner), dtype=x_TD.dtype, device=x_TD.device)
        out = torch.empty((pairs, hidden), dtype=x_TD.dtype, device=x_TD.device)
        common = {
            "pairs": pairs,
            "top_k": ids_TK.shape[1],
            "first": first,
            "count": len(down.numbers),
        }
        task = _Task(rows=num_tokens, alpha=gate.alpha, limit=gate.limit, **common)
        _fill(task, x=x_TD, bias=biases[0], ids=ids_TK)
        self._launch(task, up_config, gate_up, act)
        task = _Task(rows=pairs, **common)
        _fill(task, x=act, bias=biases[1], ids=ids_TK, shares=weights_TK)
        self._launch(task, down_config, down, out)
        return out

    def _launch(self, task: _Task, config: Config, weight: Packed, out: Tensor) -> None:
        _fill(task, numbers=weight.numbers, scale=weight.scale, zero=weight.zero, out=out)
        _fill(task, outer=weight.outer)
        task.outputs, task.inputs = out.shape[1], weight.shape[-1]
        task.most_tiles = config.most_tiles
        num_blocks = self._kernels.num_cores * (2 if task.pairs else 1)
        self._kernels.launch(
            self._kernels.get(config.numbers), num_blocks, 32 * config.warps, config.shared_bytes,
            ctypes.addressof(task),
        )  # fmt: skip


def _fill(task: _Task, **tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        setattr(task, name, 0 if tensor is None else tensor.data_ptr())
