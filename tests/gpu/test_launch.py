"""What is launched only to be compiled is compiled at once, and does not run.

Needs Triton and no GPU: a driver that knows its target compiles for it.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton", reason="a CPU build of torch brings none")

import triton
from triton.backends.compiler import GPUTarget

from minisgl.kernel.triton import launch
from minisgl.kernel.triton.step import take_ids, write_pages

HAS_GPU = torch.cuda.is_available()


class HopperDriver:
    """Of no GPU."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


@pytest.fixture
def compiled(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[str]]:
    """Names of the kernels that are compiled, in an empty cache."""
    names: list[str] = []
    if not HAS_GPU:
        triton.runtime.driver.set_active(HopperDriver())  # there is no other to go back to
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(launch, "has_pdl", lambda: True)
    monkeypatch.setattr(launch, "INTERPRET", False)
    with triton.knobs.cache.scope(), triton.knobs.compilation.scope():
        triton.knobs.cache.dir = str(tmp_path_factory.mktemp("triton"))
        triton.knobs.compilation.listener = lambda *, src, **_: names.append(src.name)
        yield names


def test_what_is_only_compiled_does_not_run(compiled: list[str]) -> None:
    device = "cuda" if HAS_GPU else "cpu"
    table = torch.zeros(3, 1009, dtype=torch.int32, device=device)  # no other test's width
    pages = torch.tensor([[2], [5], [7]], device=device)
    ids = torch.zeros(4, dtype=torch.int32, device=device)

    def work() -> None:
        for _ in range(2):
            write_pages(table, pages)
            take_ids(ids, ids[:1], ids)

    launch.compile_only(work)
    assert sorted({*compiled, "_take_ids"}) == ["_take_ids", "_write_pages"]
    assert compiled.count("_write_pages") == 1
    assert not table.any()
    if HAS_GPU:
        compiled.clear()
        write_pages(table, pages)
        assert compiled == []
        assert table[2, 5] == 7
        assert table.sum() == 7


def test_errors_of_the_compiler_are_raised(compiled: list[str]) -> None:
    @triton.jit
    def broken(x_ptr, PDL: launch.tl.constexpr):
        launch.tl.store(x_ptr, "no number")

    x = torch.zeros(1, device="cuda" if HAS_GPU else "cpu")
    launch_broken = launch.Launcher(broken)
    for _ in range(2):  # the first leaves nothing behind that keeps the second from starting
        with pytest.raises(triton.CompilationError, match="no number"):
            launch.compile_only(
                lambda: launch_broken((1, 1, 1), (x,), (), dtype=x.dtype, num_warps=1)
            )
    assert launch._compile_only.get() is None
