"""The values of tiles, number by number: a second reading of the layout that
`minisgl_zoo.gguf.tiles` describes."""

from __future__ import annotations

import torch
from torch import Tensor

from minisgl_zoo.gguf.tiles import Tiles

TABLE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def number_of(tiles: Tiles, output: int, column: int) -> int:
    """Return a number of the matrix, minus what the format subtracts."""
    form = tiles.form
    row, g = divmod(output % 16, 8)
    step, within = divmod(column, 64)
    j, within = divmod(within, 16)
    t, i = divmod(within, 4)
    lane, pair, second = 4 * g + t, 2 * j + i // 2, i % 2
    bytes_ = tiles.numbers[output // 16, step].tolist()

    def word(first: int, index: int) -> int:
        at = first + 4 * index
        return int.from_bytes(bytes(bytes_[at : at + 4]), "little")

    def bits(first: int, width: int, shift: int) -> int:
        return first >> shift & ((1 << width) - 1)

    byte = i // 2 + 2 * second
    if form.bits == 8:
        own = bits(word(512 * (j // 2), 4 * lane + 2 * (j % 2) + row), 8, 8 * byte)
        return own - 256 * (own > 127)
    value = at = done = 0
    if form.bits >= 4:
        own = word(0, 4 * lane + 2 * (j // 2) + row)
        if form.is_table:
            return TABLE[bits(own, 4, 16 * (j % 2) + 4 * byte)]
        value, at, done = bits(own, 4, 4 * (pair % 4) + 16 * second), 512, 4
    if form.bits in (2, 3, 6):
        value |= bits(word(at, 2 * lane + row), 2, 2 * pair + 16 * second) << done
        at, done = at + 256, done + 2
    if form.bits in (3, 5):
        value |= bits(word(at, lane), 1, pair + 8 * row + 16 * second) << done
    return value - form.middle


def values_of(tiles: Tiles, outputs: range, columns: range) -> Tensor:
    """Return some values in float32."""
    form = tiles.form
    made = torch.empty(len(outputs), len(columns), dtype=torch.float32)
    for y, output in enumerate(outputs):
        row, g = divmod(output % 16, 8)
        for x, column in enumerate(columns):
            step, group = column // 64, column % 64 // form.group
            at = column // 256 if form.block == 256 else step
            halves = tiles.scales[output // 16, at, g, row].float()
            scale, offset = halves[0], torch.tensor(0.0)
            if form.block == 256:
                bytes_ = tiles.factors[output // 16, step, g, row].tolist()
                if form.bits == 2:
                    scale = scale * (bytes_[group] & 15)
                    offset = halves[1] * (bytes_[group] >> 4)
                else:
                    scale = scale * (bytes_[group] - 128)
                    if form.has_step:
                        offset = halves[1] * bytes_[64 // form.group + group]
            else:
                scale = halves[group]
                offset = halves[2 + group] if form.has_step else offset
            made[y, x] = scale * number_of(tiles, output, column) - offset
    return made
