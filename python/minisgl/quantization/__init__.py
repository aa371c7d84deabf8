"""A weight is a value: tensors in a storage format, and how they multiply.

What it is for: `Weight`, one class per format (`PlainWeight`; `packed.PackedWeight` for the CPU),
which knows its checkpoint names, its share on each rank and its reference arithmetic; `Formats`,
which maps each module of a checkpoint to its format. What it does not know: layers, families,
files, formats with fewer bits. Read next: `weight`.
"""

from minisgl.quantization.parameter import Parameter, Part, Stack, TensorOwner
from minisgl.quantization.weight import (
    PLAIN,
    UNQUANTISED,
    Format,
    Formats,
    PlainWeight,
    Weight,
    WeightBuild,
)

__all__ = [
    "PLAIN",
    "UNQUANTISED",
    "Format",
    "Formats",
    "Parameter",
    "Part",
    "PlainWeight",
    "Stack",
    "TensorOwner",
    "Weight",
    "WeightBuild",
]
