"""All-reduce latency of each communicator, 8 KB to 16 MB, in CUDA graphs and eager.

There is one process per GPU. Graphs, as in decode: one capture holds many calls on bfloat16 in
place; the result is the median replay divided by their number. Eager, as in prefill: calls in a
row, host time included. Bus bandwidth is NCCL's convention, 2 (N - 1) / N times the bytes over the
time. `default` is the engine's choice: `one-shot`, `two-shot` or `nccl` by size. Without GPUs it
measures gloo, eager.
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from minisgl.benchmark.perf import events_s
from minisgl.distributed import DistributedInfo
from minisgl.distributed.gloo import GlooCommunicator, meet
from minisgl.distributed.ranks import create_communicator
from minisgl.server.flags import integer
from minisgl_bench.arguments import add_json, benchmark_parser, natural
from minisgl_bench.report import machine_load, write_json

MIN_BYTES, MAX_BYTES = 8 << 10, 16 << 20
REPLAYS = 7
TIMEOUT_S = 300
Reduce = Callable[[Tensor], Tensor]


def main(argv: Sequence[str]) -> int:
    parser = benchmark_parser(__name__, __doc__)
    gpus = torch.cuda.device_count()
    parser.add_argument("--ranks", type=natural, default=gpus or 2, help="default: every GPU")
    parser.add_argument("--calls", type=natural, default=100, help="in a graph; fewer above 1 MB")
    parser.add_argument(
        "--max-bytes",
        type=integer(MIN_BYTES),
        default=MAX_BYTES,
        help="bytes of the largest tensor",
    )
    add_json(parser)
    args = parser.parse_args(argv)
    if gpus and args.ranks > gpus:
        parser.error(f"--ranks {args.ranks}: this machine has {gpus} GPUs")
    sizes = [MIN_BYTES]
    while 2 * sizes[-1] <= args.max_bytes:
        sizes.append(2 * sizes[-1])
    load = machine_load()
    rows = _run_ranks(args.ranks, sizes, args.calls)
    if rows is None:
        print("a rank failed, or none came to an end")
        return 1
    _print_table(rows)
    if args.json:
        nccl: Any = torch.cuda.nccl  # which has no annotations
        version = nccl.version() if gpus else None
        result = {"load_before": load, "ranks": args.ranks, "calls": args.calls, "nccl": version}
        write_json(args.json, {**result, "rows": rows})
    return 0


def _run_ranks(size: int, sizes: list[int], calls: int) -> list[dict[str, Any]] | None:
    """Run a process for each rank. Returns rank 0's rows, or None if a rank failed."""
    context = multiprocessing.get_context("spawn")
    rows: Any = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(
                target=_rank, args=(rank, size, f"file://{folder}/store", sizes, calls, rows)
            )
            for rank in range(size)
        ]
        for process in ranks:
            process.start()
        deadline = time.monotonic() + TIMEOUT_S
        try:
            while rows.empty():
                failed = any(process.exitcode for process in ranks)
                if failed or time.monotonic() > deadline:
                    return None
                time.sleep(0.05)
            result: list[dict[str, Any]] = rows.get()
            for process in ranks:
                process.join(timeout=20)
            return result
        finally:
            for process in ranks:
                process.kill()
                process.join()


def _rank(rank: int, size: int, store: str, sizes: list[int], calls: int, rows: Any) -> None:
    with torch.inference_mode():
        result = list(_measure(DistributedInfo(rank, size), store, sizes, calls))
    if rank == 0:
        rows.put(result)


def _measure(
    info: DistributedInfo, store: str, sizes: list[int], calls: int
) -> Iterator[dict[str, Any]]:
    host = GlooCommunicator(info, meet(info, store))
    if torch.cuda.is_available():
        device = torch.device("cuda", info.rank)
        torch.cuda.set_device(device)
        reduces = _gpu_reduces(info, host, store, device)
    else:
        device = torch.device("cpu")
        reduces = {"gloo": host.all_reduce}
    for num_bytes in sizes:
        x = torch.zeros(num_bytes // 2, dtype=torch.bfloat16, device=device)
        for name, reduce in reduces.items():
            count = calls if num_bytes <= 1 << 20 else max(calls // 5, 1)
            host.all_min(0)
            eager_s = _eager_s(reduce, x, count)
            host.all_min(0)
            graph_s = _graph_s(reduce, x, count, host) if device.type == "cuda" else None
            best = graph_s or eager_s
            yield {
                "bytes": num_bytes,
                "communicator": name,
                "graph_us": round(graph_s * 1e6, 2) if graph_s else None,
                "eager_us": round(eager_s * 1e6, 2),
                "bus_gb_s": round(2 * (info.size - 1) / info.size * num_bytes / best / 1e9, 2),
            }


def _gpu_reduces(
    info: DistributedInfo, host: GlooCommunicator, store: str, device: torch.device
) -> dict[str, Reduce]:
    """Return every way to sum, by name. They stay connected until the process ends."""
    from minisgl.distributed.nccl import PyNcclCommunicator, TorchNcclCommunicator
    from minisgl.kernel import jit
    from minisgl_kernels.peer import connect_peers

    torch.cuda.synchronize()
    library = jit.load_library(jit.CUDA)
    peer = connect_peers(host, device, library, share_bytes=MAX_BYTES)
    reduces: dict[str, Reduce] = {
        "torch": TorchNcclCommunicator(host, device).all_reduce,
        "nccl": PyNcclCommunicator(host, library, peer=None).all_reduce,
    }
    if peer:
        reduces["one-shot"] = partial(peer.all_reduce, algorithm="one_shot")
        reduces["two-shot"] = partial(peer.all_reduce, algorithm="two_shot")
    default = create_communicator(info, store=f"{store}-default", device=device)
    return {**reduces, "default": default.all_reduce}


def _eager_s(reduce: Reduce, x: Tensor, calls: int) -> float:
    for _ in range(5):
        reduce(x)
    _synchronize(x)
    start = time.perf_counter()
    for _ in range(calls):
        reduce(x)
    _synchronize(x)
    return (time.perf_counter() - start) / calls


def _graph_s(reduce: Reduce, x: Tensor, calls: int, host: GlooCommunicator) -> float:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(calls):
            reduce(x)
    seconds = []
    for _ in range(REPLAYS + 1):  # the first is not counted
        host.all_min(0)
        seconds.append(events_s(graph.replay) / calls)
    return statistics.median(seconds[1:])


def _synchronize(x: Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize()


def _print_table(rows: list[dict[str, Any]]) -> None:
    names = list(dict.fromkeys(row["communicator"] for row in rows))
    print("us in a graph (eager)\n" + " " * 12 + "".join(f"{name:>18}" for name in names))
    for num_bytes in dict.fromkeys(row["bytes"] for row in rows):
        cells = {row["communicator"]: row for row in rows if row["bytes"] == num_bytes}
        texts = []
        for name in names:
            row = cells.get(name, {})
            graph, eager = row.get("graph_us"), row.get("eager_us")
            texts.append(f"{graph or '-'} ({eager or '-'})")
        print(f"{num_bytes >> 10:>9} KB" + "".join(f"{text:>18}" for text in texts))
