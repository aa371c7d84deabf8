"""The C++ kernels of another kind of processor, run by an emulator instead of this one's.

`minisgl.kernel.jit.load_library` returns functions that take tensors; so does `Emulated`. Each call
sends the tensors' memories to the emulated process and takes them back.
"""

from __future__ import annotations

import ctypes
import struct
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

import torch
import tvm_ffi
from torch import Tensor

from minisgl.kernel.jit import CFLAGS, CSRC

DTYPES = {  # as DLPack numbers them
    torch.int8: (0, 8),
    torch.int32: (0, 32),
    torch.int64: (0, 64),
    torch.uint8: (1, 8),
    torch.float16: (2, 16),
    torch.float32: (2, 32),
    torch.float64: (2, 64),
    torch.bfloat16: (4, 16),
    torch.bool: (6, 8),
    torch.float8_e4m3fn: (10, 8),
}
ERRORS = {"ValueError": ValueError, "TypeError": TypeError, "AttributeError": AttributeError}
NONE, INT, FLOAT, TENSOR = range(4)


def build(compiler: str, flags: Sequence[str], sources: Sequence[str], folder: Path) -> Path:
    """Compile these files of `csrc/` for the processor of `compiler`. Returns the program."""
    include = Path(tvm_ffi.__file__).parent / "include"
    files = [CSRC / source for source in sources]
    program = folder / "kernels"
    subprocess.run(
        [
            compiler, *CFLAGS, *flags, f"-I{include}", "-rdynamic", "-o", program, *files,
            Path(__file__).with_suffix(".cpp"), "-Wl,--unresolved-symbols=ignore-all",
        ],
        check=True,
    )  # fmt: skip
    return program


class Emulated:
    """An emulated process that answers one call at a time. Mutable."""

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=-1
        )

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args: self._call(name, args)

    def _call(self, name: str, args: Sequence[Any]) -> int:
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in tensors}
        places = {address: index for index, address in enumerate(storages)}
        parts = [_text(name.encode()), _numbers(len(storages))]
        for address, storage in storages.items():
            parts.append(_text(ctypes.string_at(address, storage.nbytes())))
        parts.append(_numbers(len(args)))
        for arg in args:
            if isinstance(arg, Tensor):
                address = arg.untyped_storage().data_ptr()
                at = arg.data_ptr() - address
                axes = (arg.dim(), *arg.shape, *arg.stride())
                parts.append(_numbers(TENSOR, places[address], at, *DTYPES[arg.dtype], *axes))
            elif isinstance(arg, float):
                parts.append(_numbers(FLOAT) + struct.pack("=d", arg))
            else:
                parts.append(_numbers(NONE) if arg is None else _numbers(INT, int(arg)))
        to, back = self._process.stdin, self._process.stdout
        assert to
        assert back
        to.write(b"".join(parts))
        to.flush()
        if _number(back):
            raise ERRORS[_bytes(back).decode()](_bytes(back).decode())
        result = _number(back)
        for address in storages:
            memory = _bytes(back)
            ctypes.memmove(address, memory, len(memory))
        return result


def _numbers(*values: int) -> bytes:
    return struct.pack(f"={len(values)}q", *values)


def _text(data: bytes) -> bytes:
    return _numbers(len(data)) + data


def _number(stream: IO[bytes]) -> int:
    data = stream.read(8)
    if len(data) < 8:
        raise RuntimeError("the emulated process has ended")
    value: int = struct.unpack("=q", data)[0]
    return value


def _bytes(stream: IO[bytes]) -> bytes:
    return stream.read(_number(stream))
