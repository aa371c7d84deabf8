"""Compiles CUDA C++ when it is first used, in the cache of `minisgl.kernel.once`.

NVRTC, which comes with a CUDA build of torch, compiles it, so no CUDA toolkit is needed.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable
from pathlib import Path

from minisgl import env
from minisgl.kernel.jit import refuse_if_disabled
from minisgl.kernel.once import JitUnavailable, build_once, gist


def load_cubin(
    csrc: Path,
    name: str,
    arch: str,
    defines: Iterable[str] = (),
    headers: Iterable[str] = (),
    generated: str = "",
) -> bytes:
    """Compile `csrc`/NAME.cu for GPUs of `arch` ("sm_90"). Returns a cubin.

    defines: macros as NAME=VALUE. headers: files beside it, in the order of their text before its
    own; they and the source include nothing, because there may be no CUDA headers. generated: text
    between them. Raises JitUnavailable.
    """
    refuse_if_disabled()
    try:
        from cuda.bindings import nvrtc

        version = nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:
        raise JitUnavailable(
            f"no NVRTC, which comes with CUDA builds of torch: {gist(str(error))}"
        ) from error
    from tvm_ffi.cpp.nvrtc import nvrtc_compile

    texts = [(csrc / file).read_text() for file in (*headers, f"{name}.cu")]
    source = "".join((*texts[:-1], generated, texts[-1]))
    options = ["-std=c++17", *(f"-D{define}" for define in defines)]

    def compile_cubin(folder: Path) -> Path:
        cubin = folder / name
        cubin.write_bytes(nvrtc_compile(source, name=f"{name}.cu", arch=arch, extra_opts=options))
        return cubin

    key = hashlib.sha256(repr((source, options, version)).encode()).hexdigest()[:16]
    path = env.cache_dir() / f"{name}-{arch}-{key}.cubin"
    build_once(path, f"{name}.cu for {arch}", compile_cubin, logging.DEBUG)
    return path.read_bytes()
