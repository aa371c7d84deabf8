"""``python -m minisgl.kernel.build`` compiles now what the first start would compile.

These are the C++ kernels; with a CUDA build of torch also the calls of NCCL and the CUDA driver; on
a machine with GPUs also the all-reduce for 2 ranks up to the number of GPUs (NVRTC). Triton
compiles its kernels when they are first used, and caches them itself. Exits with 1 if anything does
not compile.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial

import torch

from minisgl import env, plugins
from minisgl.kernel.jit import CPU, CUDA, build_ahead, load_library
from minisgl.kernel.once import JitUnavailable
from minisgl.utils.logger import setup_logging

WITHOUT_CPU = "The server runs without them, on plain torch and slower."
WITHOUT_AHEAD = "A wheel would compile them at the first start."
WITHOUT_CUDA = "cuBLAS and Triton do all GEMMs, several ranks use torch's NCCL; all are slower."


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m minisgl.kernel.build",
        description="Compile now what the first start would: C++ kernels, and more for GPUs.",
        epilog=f"They are kept in {env.cache_dir()} (MINISGL_CACHE_DIR); what is there already is "
        "not compiled again. Ends with 1 if anything is not available.",
    )
    parser.add_argument(
        "--ahead",
        action="store_true",
        help="for all instruction sets, into the package: wheels of it need no compiler",
    )
    args = parser.parse_args()
    setup_logging("build")
    if args.ahead:
        return 0 if _build("the C++ kernels of a wheel", build_ahead, WITHOUT_AHEAD) else 1
    done = [_build("the C++ kernels", lambda: load_library(CPU), WITHOUT_CPU)]
    if torch.version.cuda:
        done.append(_build(CUDA.what, lambda: load_library(CUDA), WITHOUT_CUDA))
        if compile_cubin := plugins.find("all_reduce", "compile"):
            for num_ranks in range(2, torch.cuda.device_count() + 1):
                compile_it = partial(compile_cubin, torch.device("cuda", 0), num_ranks)
                what = f"the all-reduce kernels for {num_ranks} ranks"
                done.append(_build(what, compile_it, WITHOUT_CUDA))
    return 0 if all(done) else 1


def _build(what: str, compile_it: Callable[[], object], without: str) -> bool:
    try:
        compile_it()
    except JitUnavailable as error:
        print(f"minisgl: {what} are not available: {error}\n{without}", file=sys.stderr)
        return False
    except KeyboardInterrupt:
        sys.exit(130)
    print(f"minisgl: {what} are ready.")
    return True


if __name__ == "__main__":
    sys.exit(main())
