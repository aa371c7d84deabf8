"""MINISGL_CPU_ISA limits what the kernels are compiled for."""

from __future__ import annotations

from pathlib import Path

import pytest

from minisgl.errors import ConfigError
from minisgl.kernel import jit
from minisgl.utils import arch

ALL = frozenset({"sse2", "avx2", "fma", "avx512f", "bmi1", "bmi2", "f16c", "movbe", "abm"})


@pytest.fixture(autouse=True)
def some_x86(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU with AVX2, and with a part of AVX-512."""
    monkeypatch.setattr(arch.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(arch, "_all_cpu_flags", lambda: ALL)
    monkeypatch.delenv("MINISGL_CPU_ISA", raising=False)


@pytest.mark.parametrize(
    ("name", "flags", "compiled"),
    [
        ("", ALL, "-march=native"),
        ("avx2", ALL - {"avx512f"}, "-march=x86-64-v3"),
        ("sse2", {"sse2"}, "-march=x86-64"),
    ],
)
def test_a_limit_takes_features_away(
    name: str, flags: frozenset[str], compiled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINISGL_CPU_ISA", name)
    assert arch.cpu_flags() == flags
    assert jit.own_flags() == (compiled,)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("avx3", "must be one of avx512bf16, .*, got 'avx3'"),
        ("avx512", "this CPU does not have it; it has avx2, sse2"),
        ("neon", "this CPU does not have it; it has avx2, sse2"),
    ],
)
def test_a_set_that_is_not_there_is_refused(
    name: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINISGL_CPU_ISA", name)
    with pytest.raises(ConfigError, match=reason):
        jit.own_flags()


def test_each_set_has_a_library_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "CSRC", tmp_path)
    paths = set()
    for name in ("", "avx2", "sse2"):
        monkeypatch.setenv("MINISGL_CPU_ISA", name)
        paths.add(jit._library_path(jit.CPU, jit._compiler()))
    assert len(paths) == 3
