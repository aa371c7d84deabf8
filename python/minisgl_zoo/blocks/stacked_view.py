"""Shows stacked experts as the layers declare them: gate then up, [E, 2F, D]; down, [E, D, F].

In gpt-oss's files the rows of gate and up alternate; so do their biases and MXFP4's blocks and
scales. Tensors that are not quantised have inputs before outputs, also in Qwen3-VL's files::

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
    alternates = True

    @classmethod
    def of(cls, view: CheckpointView, config: ModelConfig) -> StackedExperts:
        return cls(view.folder, text_name)

    def is_transposed(self, name: str) -> bool:
        return name.endswith(TRANSPOSED)

    def shape(self, name: str) -> tuple[int, ...]:
        shape = super().shape(name)
        return (shape[0], shape[2], shape[1]) if self.is_transposed(name) else shape

    def share(self, name: str, part: Part) -> Tensor:
        if part.stack is None or name != part.stack.name:
            return super().share(name, part)
        index = [slice(0, size) for size in part.shape]
        index[part.axis] = slice(part.share.start, part.share.stop)
        first, rows, alternate = part.stack.first, index[0], slice(None)
        if not self.alternates:
            index[0] = slice(first + rows.start, first + rows.stop)
        elif ".gate_up_proj" in name:
            index[0] = slice(2 * rows.start, 2 * rows.stop)
            alternate = slice(int(first > 0), None, 2)
        is_transposed = self.is_transposed(name)
        places = index[::-1] if is_transposed else index
        file_name, _ = self._places[name]
        file = self._file_of[file_name]
        tensor: Tensor = file.get_slice(file_name)[(part.stack.index, *places)]
        return (tensor.mT if is_transposed else tensor)[alternate]


class TransposedExperts(StackedExperts):
    """Gate and up one after another. As in transformers 5, which also writes such files without the
    transposition, a tensor is transposed if its last axis is not that of the inputs."""

    alternates = False
    num_inputs: dict[str, int]

    @classmethod
    def of(cls, view: CheckpointView, config: ModelConfig) -> TransposedExperts:
        made = cls(view.folder, text_name)
        sizes = config.hidden_size, config.fields.integer("moe_intermediate_size")
        made.num_inputs = dict(zip(TRANSPOSED, sizes, strict=True))
        return made

    def is_transposed(self, name: str) -> bool:
        if not super().is_transposed(name):
            return False
        module = f".experts.{name.rpartition('.')[2]}"
        return CheckpointView.shape(self, name)[-1] != self.num_inputs[module]
