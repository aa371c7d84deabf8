"""What a GGUF file says of itself, kept beside the config that is made from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from minisgl_zoo.gguf.tensor import MappedTensor

_GUESSED: Final = 1024
"""llama.cpp sets this flag in a `general.file_type` that no converter wrote."""


def card_of(values: Mapping[str, Any], tensors: Mapping[str, MappedTensor]) -> dict[str, Any]:
    """Return the architecture, the name of the file's type, such as Q4_K_M, and the number of
    parameters.

    values: the metadata. tensors: of all parts. If the metadata have no type that is known, it is
    the one that most parameters have.
    """
    from gguf import LlamaFileType

    sizes = {name: prod(tensor.shape) for name, tensor in tensors.items()}
    types: Counter[str] = Counter()
    for name, tensor in tensors.items():
        types[tensor.kind] += sizes[name]
    names = {kind.value: kind.name.partition("_")[2] for kind in LlamaFileType}
    names.pop(_GUESSED, None)
    usual = types.most_common(1)[0][0] if types else ""
    return {
        "architecture": values["general.architecture"],
        "file_type": names.get(values.get("general.file_type", -1), usual),
        "num_parameters": sum(sizes.values()),
    }
