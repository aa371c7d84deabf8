"""GEMMs by weights of 4 or 8 bits on Hopper, grouped by experts or of one matrix: the host side of
`csrc/packed_grouped.cu`, for packed weights.

Each format and activation has a kernel, which NVRTC compiles at its first use, in 8 to 12 s, and
which is cached on disk.

Axes: L experts of this rank, T tokens, M rows, D inputs, F outputs, G = 2F, gate then up.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

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
    one_stage_bytes,
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


def stage_bytes(weight: Packed) -> int:
    """Return the shared memory of all stages of a stack of experts."""
    return STAGES[weight.is_4_bit] * one_stage_bytes(CHUNK_BYTES, MOST * inputs_of(weight) * 2)


@dataclass(frozen=True, slots=True)
class Streamed:
    """A matrix for `PackedGrouped.linear`. scale_GF, zero_GF: where numbers of int4 are multiplied
    by their scales, those with a row for each group of inputs: a turn's are contiguous."""

    stack: Packed
    scale_GF: Tensor | None = None
    zero_GF: Tensor | None = None

    @staticmethod
    def of(stack: Packed) -> Streamed:
        if stack.kind != "int4" or stack.scale is None or stack.scale.dtype == torch.float32:
            return Streamed(stack)
        zero_GF = None if stack.zero is None else stack.zero[0].T.contiguous()
        return Streamed(stack, stack.scale[0].T.contiguous(), zero_GF)

    @property
    def stage_bytes(self) -> int:
        """The shared memory of all stages."""
        inputs, scales = inputs_of(self.stack), 0 if self.scale_GF is None else 2 * BOX
        rows = -(-inputs // self.stack.group) if scales else 1
        zeros = 0 if self.zero_GF is None else BOX
        one = one_stage_bytes(CHUNK_BYTES, MOST_ROWS * inputs * 2, rows, zeros, scales)
        return STAGES[self.stack.is_4_bit] * one


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
    if weight.kind == "int4" and weight.scale.dtype != torch.float32 and weight.group in (32, 64):
        return weight.rows == 1
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

    def prepare(self, weight: Packed) -> Streamed | None:
        """Return a matrix for `linear`, or None if no kernel reads it. Begins to compile the
        kernels of its format, and takes memory for the sums that blocks exchange."""
        stack = as_stack(weight)
        if not takes(stack):
            return None
        self._stream.take_memory(weight.numbers.device)
        for gate in (None, Gate()):
            self._kernels.begin_compiling(macros_of(stack, gate, is_stack=False))
        return Streamed.of(stack)

    def linear(
        self, x_MD: Tensor, weight: Streamed, bias: Tensor | None, activation: Activation | None
    ) -> Tensor | None:
        """See `Ops.linear`. weight: of `prepare`. None if another kernel should compute it."""
        stack = weight.stack
        _, outputs, _ = stack.shape
        gate = Gate(is_gelu=activation == "gelu_tanh") if activation else None
        macros = macros_of(stack, gate, is_stack=False)
        if x_MD.dtype != torch.bfloat16 or (gate and outputs % 32):
            return None
        kernel = self._kernels.get(macros)
        if kernel is None:
            return None
        x = arrange(x_MD, inputs_of(stack), X_UNIT if stack.kind.startswith("fp") else 1.0)
        out_MF = x_MD.new_empty((len(x_MD), outputs // 2 if gate else outputs))
        task = self._stream.task(x, out_MF, bias)
        maps = (self._fill(task, stack), *self._scale_maps(weight))
        self._stream.launch(kernel, maps, task, x, outputs, weight.stage_bytes)
        return out_MF

    def _scale_maps(self, weight: Streamed) -> tuple[bytes, ...]:
        """Return the tensor maps of zeros and scales. A copy takes those of `BOX` outputs."""
        if weight.scale_GF is None:
            return ()
        rows = -(-inputs_of(weight.stack) // weight.stack.group)
        return tuple(
            bytes(128) if x is None else self._kernels.weight_map(
                x.data_ptr(), x.shape[0], x.shape[1], rows, itemsize=x.itemsize, box_columns=BOX
            )
            for x in (weight.zero_GF, weight.scale_GF)
        )  # fmt: skip

    def _launch(self, task: Task, weight: Packed, macros: Macros) -> None:
        kernel = self._kernels.get(macros)
        assert kernel is not None
        weight_map = self._fill(task, weight)
        needed = shared_bytes(stage_bytes(weight), MOST, task.experts)
        launch(self._kernels, kernel, (weight_map,), task, needed)

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
