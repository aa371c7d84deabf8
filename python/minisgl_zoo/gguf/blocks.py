"""What blocks of llama.cpp's formats become in memory: integers with scales and offsets.

value = number * scale * factor - step * zero::

    numbers  int4, int6 or int8, one for each input
    scale    float16, of each block
    factor   int8, of each group of inputs in a block; absent where a block is one group
    step     float16, of each block; absent where the format has no offset
    zero     uint8, of each group; absent where a block is one group

Nothing is rounded: these are the file's numbers in another order, which the C++ of `kernel/csrc/
blocks.cpp` makes of them. Sources of the layouts: llama.cpp's specification and the package gguf.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

import torch

from minisgl.utils.arch import cpu_flags

Field = Literal["packed", "scale", "factor", "step", "zero"]


@dataclass(frozen=True, slots=True)
class Form:
    """Matrices of one form can be multiplied as one.

    group: inputs with one factor, and with one zero. block: inputs with one scale, and with one
    step.
    """

    kind: Literal["int4", "int6", "int8"]
    group: int
    block: int
    has_step: bool = False

    @property
    def has_factor(self) -> bool:
        return self.group < self.block

    @property
    def unit(self) -> int:
        """Inputs of a matrix are a multiple of this."""
        return self.block

    @property
    def fields(self) -> tuple[Field, ...]:
        """The tensors of a matrix in this form."""
        names: list[Field] = ["packed", "scale"]
        names += ["factor"] if self.has_factor else []
        names += ["step"] if self.has_step else []
        names += ["zero"] if self.has_step and self.has_factor else []
        return tuple(names)

    def width(self, field: Field, inputs: int) -> int:
        """Entries in a row of the tensor `field`, for a row of so many inputs."""
        if field == "packed":
            return inputs * {"int4": 4, "int6": 6, "int8": 8}[self.kind] // 8
        return inputs // (self.block if field in ("scale", "step") else self.group)

    @property
    def bits_in_memory(self) -> float:
        """Bits of memory for each weight, scales included."""
        a_block = sum(self.width(name, self.block) * DTYPES[name].itemsize for name in self.fields)
        return 8 * a_block / self.block


DTYPES: Final[Mapping[Field, torch.dtype]] = {
    "packed": torch.uint8,
    "scale": torch.float16,
    "factor": torch.int8,
    "step": torch.float16,
    "zero": torch.uint8,
}
"""The index of a field is its number in csrc/blocks.cpp."""
_SIX: Final[Literal["int6", "int8"]] = (
    "int6" if "avx2" in cpu_flags() and "avx512bw" not in cpu_flags() else "int8"
)
"""Numbers of Q5_K and Q6_K, on this processor: AVX-512 multiplies 8 bits faster. Those of Q5_0 and
Q5_1 have a float scale for each 32, and in 6 bits steps of eight rows and more are slower."""
FORMS: Final[Mapping[str, Form]] = {
    "Q4_0": Form("int4", 32, 32),
    "Q4_1": Form("int4", 32, 32, has_step=True),
    "Q5_0": Form("int8", 32, 32),
    "Q5_1": Form("int8", 32, 32, has_step=True),
    "Q8_0": Form("int8", 32, 32),
    "Q2_K": Form("int4", 16, 256, has_step=True),
    "Q3_K": Form("int4", 16, 256),
    "Q4_K": Form("int4", 32, 256, has_step=True),
    "Q5_K": Form(_SIX, 32, 256, has_step=True),
    "Q6_K": Form(_SIX, 16, 256),
    "IQ4_NL": Form("int8", 32, 32),
    "IQ4_XS": Form("int8", 32, 256),
}
"""llama.cpp's name of a format -> its form. The index of a format is its number there, too."""
