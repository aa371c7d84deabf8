"""GEMMs by weights of 4 or 8 bits on Hopper, grouped by experts or of one matrix: the host side of
`csrc/packed_grouped.cu`, for packed weights.

Each format and activation has a kernel, which NVRTC compiles at its first use, in 12 to 18 s, and
which is cached on disk.

Axes: L experts of this rank, T tokens, M rows, D inputs, F outputs, G = 2F, gate then up.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from minisgl.kernel.ops import Activation
from minisgl.kernel.triton.moe import Gate, place
from minisgl_kernels.grouped import (
    BOX,
    MAX_EXPERTS,
    STEP,
    Task,
    beside_bytes,
    launch,
    make_task,
    shared_bytes,
)
from minisgl_kernels.hopper import Kernels, load_gemm
from minisgl_kernels.packed_formats import CHUNK_BYTES, decodes, format_macros
from minisgl_kernels.stream import MOST_ROWS, Stream
from minisgl_kernels.triton.arrange import PERIOD, arrange
from minisgl_zoo.weights.quantised import Packed

MOST = 112
"""Pairs of a tile. Their sums and two batches of weights are in registers."""
STAGES = {True: 4, False: 6}
"""By whether numbers have 4 bits: the turns that are fetched ahead fill shared memory."""
X_UNIT = 2.0**60
"""What x is multiplied by for weights that are floats: their decoded numbers are tiny."""
Macros = tuple[tuple[str, int], ...]
HEADERS = ("decode.cuh", "gate.cuh", "grouped_tiles.cuh", "packed_rows.cuh")


def kernel_cubin(macros: Macros) -> bytes:
    """Return the compiled kernel. Raises JitUnavailable. macros: of `macros_of`."""
    numbers = dict(macros)
    columns = range(STEP, numbers["MOST"] + 1, STEP)
    del numbers["BFLOAT16"]  # load_gemm defines it
    return load_gemm(
        "packed_grouped", torch.bfloat16, columns, numbers, HEADERS, from_registers=True
    )


def inputs_of(weight: Packed) -> int:
    """Return the inputs of a turn, 64 bytes of each row of weights."""
    return CHUNK_BYTES * (2 if weight.is_4_bit else 1)


def stage_bytes(weight: Packed, most: int = MOST) -> int:
    """Return the shared memory of all stages. most: pairs or rows of a tile."""
    return STAGES[weight.is_4_bit] * (2 * BOX * CHUNK_BYTES + most * inputs_of(weight) * 2)


def takes(weight: Packed) -> bool:
    """Return whether a kernel reads this stack."""
    num_experts, outputs, inputs = weight.shape
    turn = inputs_of(weight)
    if not decodes(weight) or num_experts > MAX_EXPERTS or outputs % 16:
        return False
    if inputs % (turn // 4) or weight.numbers.data_ptr() % 16:  # the bulk copy engine's rows
        return False
    if weight.scale is None or weight.kind == "fp4":
        return True
    is_narrow = weight.kind == "int4" and weight.group in (32, 64) and weight.rows == 1
    if is_narrow and weight.scale.dtype == torch.bfloat16:
        return True
    return outputs % weight.rows == 0 and weight.group % turn == 0


def as_stack(weight: Packed) -> Packed:
    """Return a matrix as a stack of one."""
    tensors = {name: getattr(weight, name) for name in ("numbers", "scale", "zero", "outer")}
    return replace(weight, **{name: x[None] for name, x in tensors.items() if x is not None})


def macros_of(weight: Packed, gate: Gate | None, *, is_stack: bool = True) -> Macros:
    """Return the macros of a kernel for this format. is_stack: of experts, not of one matrix."""
    most = MOST if is_stack else MOST_ROWS
    return tuple({
        **format_macros(weight, gate),
        "GATED": int(gate is not None),
        "PACKED": 1,
        "TILED": 0,
        "MOST": most,
        "STAGES": STAGES[weight.is_4_bit],
        "BESIDE": beside_bytes(most, has_pairs=is_stack),
        "INPUTS": inputs_of(weight),
        "ROW_BYTES": CHUNK_BYTES,
        "X_SCALES": 0,
        "STREAM": int(not is_stack),
    }.items())  # fmt: skip


class PackedGrouped:
    """The kernels on the current device."""

    def __init__(self) -> None:
        """Raises JitUnavailable where nothing can be compiled, RuntimeError without a device."""
        self._kernels = Kernels(
            "grouped_product", kernel_cubin, "GEMMs of many rows by packed weights are Triton's"
        )
        self._stream = Stream(self._kernels)

    def experts(
        self,
        x_TD: Tensor,
        gate_up: Packed,
        down: Packed,
        weights_TK: Tensor,
        ids_TK: Tensor,
        first: int,
        gate: Gate,
        bias_LG: Tensor | None,
    ) -> Tensor | None:
        """Return the outputs of each pair of a token and an expert, times its weight: [T * K, D].
        Rows of pairs whose expert is on another rank are not written. None if Triton should compute
        them.

        bias_LG: of gate and up.
        """
        if x_TD.dtype != torch.bfloat16 or gate.is_squared or gate_up.kind != down.kind:
            return None
        if not (takes(gate_up) and takes(down)):
            return None
        up_macros, down_macros = macros_of(gate_up, gate), macros_of(down, None)
        if not self._kernels.get_all((up_macros, down_macros)):
            return None
        counts_L = torch.zeros(len(down.numbers), dtype=torch.int32, device=x_TD.device)
        rows_LT = place(ids_TK, counts_L, first)
        num_pairs, inner = weights_TK.numel(), down.shape[-1]
        act = x_TD.new_empty((num_pairs, -(-inner // PERIOD) * PERIOD))
        out = x_TD.new_empty((num_pairs, x_TD.shape[1]))
        unit = X_UNIT if gate_up.kind.startswith("fp") else 1.0
        x = arrange(x_TD, inputs_of(gate_up), unit)
        task = make_task(x, counts_L, rows_LT, None, act, inner)
        task.bias = 0 if bias_LG is None else bias_LG.data_ptr()
        task.alpha, task.limit = gate.alpha, gate.limit
        self._launch(task, gate_up, up_macros)
        task = make_task(act, counts_L, rows_LT, weights_TK, out, out.shape[1])
        self._launch(task, down, down_macros)
        return out

    def prepare(self, weight: Packed) -> Packed | None:
        """Return the stack of a matrix for `linear`, or None if no kernel reads it. Begins to
        compile the kernels of its format, and takes memory for the sums that blocks exchange."""
        stack = as_stack(weight)
        if not takes(stack):
            return None
        self._stream.take_memory(weight.numbers.device)
        for gate in (None, Gate()):
            self._kernels.begin_compiling(macros_of(stack, gate, is_stack=False))
        return stack

    def linear(
        self, x_MD: Tensor, weight: Packed, bias: Tensor | None, activation: Activation | None
    ) -> Tensor | None:
        """See `Ops.linear`. weight: of `prepare`. None if another kernel should compute it."""
        _, outputs, _ = weight.shape
        gate = Gate(is_gelu=activation == "gelu_tanh") if activation else None
        macros = macros_of(weight, gate, is_stack=False)
        if x_MD.dtype != torch.bfloat16 or (gate and outputs % 32):
            return None
        kernel = self._kernels.get(macros)
        if kernel is None:
            return None
        x = arrange(x_MD, inputs_of(weight), X_UNIT if weight.kind.startswith("fp") else 1.0)
        out_MF = x_MD.new_empty((len(x_MD), outputs // 2 if gate else outputs))
        task = self._stream.task(x, out_MF, bias)
        weight_map = self._fill(task, weight)
        self._stream.launch(kernel, weight_map, task, x, outputs, stage_bytes(weight, MOST_ROWS))
        return out_MF

    def _launch(self, task: Task, weight: Packed, macros: Macros) -> None:
        kernel = self._kernels.get(macros)
        assert kernel is not None
        weight_map = self._fill(task, weight)
        needed = shared_bytes(stage_bytes(weight), MOST, task.experts)
        launch(self._kernels, kernel, weight_map, task, needed)

    def _fill(self, task: Task, weight: Packed) -> bytes:
        """Write what the task says of the weight. Returns the tensor map of its numbers."""
        if weight.scale is not None:
            task.scale, task.groups = weight.scale.data_ptr(), weight.scale.shape[-1]
        task.zero = 0 if weight.zero is None else weight.zero.data_ptr()
        task.outer = 0 if weight.outer is None else weight.outer.data_ptr()
        num_experts, outputs, inputs = weight.shape
        row_bytes = inputs * CHUNK_BYTES // inputs_of(weight)
        return self._kernels.weight_map(
            weight.numbers.data_ptr(), num_experts * outputs, row_bytes, BOX, itemsize=1
        )
