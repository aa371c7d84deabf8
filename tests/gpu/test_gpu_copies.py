"""Sums by the copy engines: each rank is a process that runs this file; ranks may share a GPU.

Exact, as the numbers are small integers, whichever rank is late; the same bits on every rank.
"""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from torch import Tensor

from minisgl.distributed import DistributedInfo
from minisgl.distributed.copies import CopySums
from minisgl.distributed.gloo import GlooCommunicator
from minisgl.distributed.rendezvous import meet
from minisgl.distributed.shared import connect
from minisgl.kernel import jit

TIMEOUT_S = 100
MAX_ROWS, ROW_BYTES = 4096, 5120 * 2
ROWS = (1024, 1025, 1, 7, 4096, 3000, 2)


def integers(
    rank: int, size: int, rows: int, dtype: torch.dtype, seed: int
) -> tuple[Tensor, Tensor]:
    """This rank's part, and the exact sum of all."""
    parts = [
        torch.randint(
            -8, 9, (rows, ROW_BYTES // dtype.itemsize), device="cuda",
            generator=torch.Generator("cuda").manual_seed(seed * size + of), dtype=torch.int8,
        )
        for of in range(size)
    ]  # fmt: skip
    total = sum(part.to(torch.int32) for part in parts)
    assert isinstance(total, Tensor)
    return parts[rank].to(dtype), total.to(dtype)


def check(copies: CopySums, host: GlooCommunicator) -> None:
    rank, size = host.rank, host.size
    assert copies.split(8192) == [4096, 4096]
    assert copies.split(2700) == [1536, 1164]
    assert copies.halves(8192, ROW_BYTES) == [4096, 4096]
    assert copies.halves(8193, ROW_BYTES) == [8193]
    assert copies.halves(200, ROW_BYTES) == [200]
    assert copies.halves(4096, ROW_BYTES // 2) == [4096]
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for rows in ROWS:
            x, total = integers(rank, size, rows, dtype, rows)
            got = copies.begin(x).wait()
            assert torch.equal(got, total), (dtype, rows)
            bits = got.view(torch.uint8)[:: max(rows // 7, 1)].contiguous().cpu()[None]
            assert len(host.all_gather(bits, 0).unique(dim=0)) == 1, "other bits"
    sizes, delays = random.Random(0), random.Random(rank)
    cases = [integers(rank, size, rows, torch.bfloat16, rows) for rows in ROWS]
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")

    def dawdle() -> None:
        if delays.random() < 0.1:
            torch.cuda._sleep(delays.randrange(3_000_000))

    for _ in range(200):  # as a decoder: a half's sum is used once the other's has begun
        halves = [sizes.choice(cases) for _ in range(2)]
        pending = []
        for x, _ in halves:
            dawdle()
            pending.append(copies.begin(x.clone()))
        for begun, (_, total) in zip(pending, halves, strict=True):
            dawdle()
            wrong += (begun.wait() != total).sum()
    assert wrong.item() == 0


def main(rank: int, size: int, store: str) -> None:
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    torch.cuda.synchronize()
    info = DistributedInfo(rank, size)
    host = GlooCommunicator(info, meet(info, store))
    library = jit.load_library(jit.CUDA)
    copies = connect(
        host,
        lambda: CopySums(info, device, library, max_rows=MAX_ROWS, row_bytes=ROW_BYTES),
        otherwise="no sums by copies",
    )
    assert copies is not None
    with torch.inference_mode():
        check(copies, host)
    torch.cuda.synchronize()
    host.all_min(0)
    copies.close()
    host.close()


@pytest.mark.parametrize("size", [2, 3, 4])
def test_sums(size: int, tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, str(rank), str(size), f"file://{folder}/store"],
                stderr=(tmp_path / f"err{rank}").open("w"),
            )
            for rank in range(size)
        ]
        try:
            codes = [process.wait(timeout=TIMEOUT_S) for process in ranks]
        finally:
            for process in ranks:
                process.kill()
                process.wait()
    errors = [(tmp_path / f"err{rank}").read_text()[-2000:] for rank in range(size)]
    assert codes == [0] * size, "\n".join(errors)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
