"""Our calls of NCCL as a library sees them that only writes them down."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

COMPILER = shutil.which("c++")
FAKE = """
#include <cstdio>
#include <cstdlib>
struct Id { char bytes[128]; };
static int told(int result) { std::fflush(stdout); return result; }
extern "C" {
const char* ncclGetErrorString(int code) { return code == 4 ? "invalid argument" : "?"; }
int ncclGetUniqueId(Id* id) { for (int i = 0; i < 128; ++i) id->bytes[i] = char(i * 2); return 0; }
int ncclCommInitRank(void** comm, int size, Id id, int rank) {
  *comm = (void*)0x7f00aabbccdd;
  std::printf("init %d of %d, id %d\\n", rank, size, id.bytes[127] & 0xff);
  return told(0);
}
int ncclCommAbort(void* comm) { std::printf("abort %p\\n", comm); return told(0); }
int ncclAllReduce(const void* x, void* out, size_t n, int type, int op, void* c, void* stream) {
  std::printf("reduce %p %p %zu type %d op %d %p %p\\n", x, out, n, type, op, c, stream);
  return told(n == 3 ? 4 : 0);
}
int ncclAllGather(const void* x, void* out, size_t n, int type, void* c, void* stream) {
  std::printf("gather %p %p %zu type %d %p %p\\n", x, out, n, type, c, stream);
  return told(0);
}
int ncclBroadcast(const void* x, void* out, size_t n, int type, int root, void* c, void* stream) {
  std::printf("broadcast %p %p %zu type %d root %d %p %p\\n", x, out, n, type, root, c, stream);
  return told(0);
}
int ncclSend(const void* x, size_t n, int type, int rank, void* c, void* stream) {
  std::printf("send %p %zu type %d to %d %p %p\\n", x, n, type, rank, c, stream);
  return told(n == 3 ? 4 : 0);
}
int ncclRecv(void* out, size_t n, int type, int rank, void* c, void* stream) {
  std::printf("receive %p %zu type %d from %d %p %p\\n", out, n, type, rank, c, stream);
  return told(0);
}
int ncclGroupStart() { std::printf("group\\n"); return told(0); }
int ncclGroupEnd() { std::printf("end\\n"); return told(0); }
}
"""
CALLS = """
from minisgl.kernel import jit
library = jit.load_library(jit.CUDA)
comm = library.nccl_init(bytes(library.nccl_unique_id()), 1, 2)
library.nccl_all_reduce(comm, 0x7fff00000010, 1 << 33, 9, 5)
library.nccl_all_gather(comm, 0x10, 0x20, 30, 5)
library.nccl_broadcast(comm, 0x10, 30, 1, 5)
library.nccl_exchange(comm, 0x100, 0x200, 0x20, 2, 5)
for fail in (
    lambda: library.nccl_all_reduce(comm, 0x10, 3, 7, 5),
    lambda: library.nccl_exchange(comm, 0x100, 0x200, 3, 2, 5),
):
    try:
        fail()
    except RuntimeError as error:
        print(str(error).splitlines()[0], flush=True)
library.nccl_abort(comm)
"""
EXPECTED = """\
init 1 of 2, id 254
reduce 0x7fff00000010 0x7fff00000010 8589934592 type 9 op 0 0x7f00aabbccdd 0x5
gather 0x10 0x20 30 type 0 0x7f00aabbccdd 0x5
broadcast 0x10 0x10 30 type 0 root 1 0x7f00aabbccdd 0x5
group
send 0x100 32 type 0 to 0 0x7f00aabbccdd 0x5
receive 0x200 32 type 0 from 0 0x7f00aabbccdd 0x5
send 0x120 32 type 0 to 1 0x7f00aabbccdd 0x5
receive 0x220 32 type 0 from 1 0x7f00aabbccdd 0x5
end
reduce 0x10 0x10 3 type 7 op 0 0x7f00aabbccdd 0x5
ncclAllReduce: invalid argument
group
send 0x100 3 type 0 to 0 0x7f00aabbccdd 0x5
end
ncclSend and ncclRecv: invalid argument
abort 0x7f00aabbccdd
"""


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.skipif(torch.version.cuda is not None, reason="torch has the real NCCL loaded")
def test_each_call_has_its_arguments(tmp_path: Path) -> None:
    (tmp_path / "fake.cpp").write_text(FAKE)
    command = ("-shared", "-fPIC", "-w", "fake.cpp", "-o", "libnccl.so.2")
    subprocess.run([str(COMPILER), *command], cwd=tmp_path, check=True, timeout=60)
    done = subprocess.run(
        [sys.executable, "-c", CALLS],
        env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == EXPECTED, done.stderr
