"""Shows gpt-oss's experts as the layers declare them: gate then up, [E, 2F, D]; down, [E, D, F].

In the files the rows of gate and up alternate; so do their biases and MXFP4's blocks and scales.
Tensors that are not quantised have inputs before outputs::

    in the files    gate_up_proj [E, D, 2F]     gate_up_proj_blocks [E, 2F, D / 32, 16]
                    down_proj    [E, F, D]      down_proj_blocks    [E, D, F / 32, 16]
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from minisgl.models.view import CheckpointView
from minisgl.models.wrapper import text_name

if TYPE_CHECKING:
    from minisgl.models.config import ModelConfig
    from minisgl.quantization import Part

TRANSPOSED = (".experts.gate_up_proj", ".experts.down_proj")


class StackedExperts(CheckpointView):
    @classmethod
    def of(cls, view: CheckpointView, config: ModelConfig) -> StackedExperts:
        return cls(view.folder, text_name)

    def shape(self, name: str) -> tuple[int, ...]:
        shape = super().shape(name)
        return (shape[0], shape[2], shape[1]) if name.endswith(TRANSPOSED) else shape

    def share(self, name: str, part: Part) -> Tensor:
        if part.stack is None or name != part.stack.name:
            return super().share(name, part)
        index = [slice(0, size) for size in part.shape]
        index[part.axis] = slice(part.share.start, part.share.stop)
        alternate = slice(None)
        if ".gate_up_proj" in name:
            is_up = part.stack.first > 0
            index[0] = slice(2 * index[0].start, 2 * index[0].stop)
            alternate = slice(int(is_up), None, 2)
        is_transposed = name.endswith(TRANSPOSED)
        places = index[::-1] if is_transposed else index
        file_name, _ = self._places[name]
        file = self._file_of[file_name]
        tensor: Tensor = file.get_slice(file_name)[(part.stack.index, *places)]
        return (tensor.mT if is_transposed else tensor)[alternate]
