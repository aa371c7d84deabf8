"""Packs conversations into rows of equal length.

A row holds whole conversations, each with positions from zero and seen only by itself. Row i is a
function of (seed, i), so the data does not depend on how many processes make it.
"""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from training.conversation import Conversation
from training.corpus import conversation
from training.source import Source
from training.tokenizer import Encoder, load

ROW_LENGTH = 1536  # the longest conversation that is taught
# (upper end of a draw, share of prompt words that become bytes): unknown words come in training.
SPELLED = ((0.05, 1.0), (0.25, 0.12))
TRIES = 6  # conversations that are tried to fill the end of a row
IGNORED = -100


class Row(NamedTuple):
    """One row; all arrays are int64 of length ROW_LENGTH.

    targets: the next token if it is learned, else IGNORED. documents: 0 is padding.
    """

    ids: npt.NDArray[np.int64]
    targets: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    documents: npt.NDArray[np.int64]


class Packer:
    """Fills one row; mutable because it grows."""

    def __init__(self, pad: int, length: int = ROW_LENGTH) -> None:
        self.used = 0
        self.num_documents = 0
        self.row = Row(
            np.full(length, pad, dtype=np.int64),
            np.full(length, IGNORED, dtype=np.int64),
            np.zeros(length, dtype=np.int64),
            np.zeros(length, dtype=np.int64),
        )

    def add(self, ids: list[int], learned: list[bool]) -> bool:
        """Appends a document; False if it does not fit."""
        end = self.used + len(ids)
        if end > len(self.row.ids):
            return False
        self.num_documents += 1
        span = slice(self.used, end)
        self.row.ids[span] = ids
        self.row.positions[span] = np.arange(len(ids))
        self.row.documents[span] = self.num_documents
        targets = np.where(learned, ids, IGNORED)
        self.row.targets[self.used : end - 1] = targets[1:]
        self.used = end
        return True


class Rows(Dataset[Row]):
    """The training rows from `start` on."""

    def __init__(self, folder: Path, seed: int, num_rows: int) -> None:
        self.folder = folder
        self.seed = seed
        self.num_rows = num_rows
        self._encoder: Encoder | None = None

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, index: int) -> Row:
        if self._encoder is None:
            self._encoder = Encoder(load(self.folder))
        source = Source(Random(f"{self.seed}/row/{index}"))
        packer = Packer(self._encoder.pad)
        misses = 0
        while misses < TRIES:
            draw = source.rng.random()
            share = next((share for limit, share in SPELLED if draw < limit), 0.0)
            ids, learned = self._encoder.conversation(
                conversation(source), share=share, rng=source.rng
            )
            misses += not packer.add(ids, learned)
        return packer.row


def pack(conversations: list[Conversation], encoder: Encoder) -> tuple[Row, list[tuple[int, int]]]:
    """Rows [B, T] where only the last answer counts, and each conversation's (row, document)."""
    packers = [Packer(encoder.pad)]
    places: list[tuple[int, int]] = []
    for c in conversations:
        ids, _ = encoder.conversation(c)
        start = len(encoder.prompt(c))
        learned = [i >= start for i in range(len(ids))]
        if not c.raw:
            learned[-1] = False  # the newline after the end
        if not packers[-1].add(ids, learned):
            packers.append(Packer(encoder.pad))
            assert packers[-1].add(ids, learned), "longer than a row"
        places.append((len(packers) - 1, packers[-1].num_documents))
    return Row(
        *(np.stack(column) for column in zip(*(p.row for p in packers), strict=True))
    ), places


def collate(rows: list[Row]) -> tuple[torch.Tensor, ...]:
    """Four int64 tensors [B, T]."""
    return tuple(torch.from_numpy(np.stack(column)) for column in zip(*rows, strict=True))
