"""Is a row's result the same, bit by bit, alone and beside other rows? Op by op.

Each operation gets one row alone, and then in batches. The table has the largest difference of that
row, divided by its largest value; 0 is the same bits. docs/determinism.md explains the results.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from minisgl.kernel.ops import Ops
from minisgl.kernel.registry import create_ops
from minisgl_bench.arguments import add_json, benchmark_parser
from minisgl_bench.report import machine_load, write_json

ROWS = (2, 4, 8, 16, 64, 256)
WIDTH, OUT, VOCAB = 1024, 3072, 32_000

Op = Callable[[Tensor], Tensor]


def operations(ops: Ops, dtype: torch.dtype, device: torch.device) -> dict[str, Op]:
    """Return functions of a tensor [rows, WIDTH], by name."""

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape).div(shape[-1] ** 0.5).to(device, dtype)

    weight, head, scale = random(OUT, WIDTH), random(VOCAB, WIDTH), random(WIDTH)
    return {
        "rms_norm": lambda x: ops.rms_norm(x, scale, 1e-6),
        "silu_and_mul": lambda x: ops.gated(x, "silu"),
        "linear": lambda x: ops.linear(x, weight),
        "LM head": lambda x: ops.logits(x, head),
        "logprobs": lambda x: ops.logprobs(
            x.float(), torch.zeros(len(x), dtype=torch.int32, device=device)
        ),
    }


def measure(ops: Ops, dtype: torch.dtype, device: torch.device) -> list[dict[str, object]]:
    torch.manual_seed(0)
    x = torch.randn(max(ROWS), WIDTH).to(device, dtype)
    rows: list[dict[str, object]] = []
    for name, op in operations(ops, dtype, device).items():
        alone = op(x[:1])[0].float()
        differences = {
            str(n): float((op(x[:n])[0].float() - alone).abs().max() / alone.abs().max())
            for n in ROWS
        }
        rows.append({"name": name, "dtype": str(dtype).removeprefix("torch."), **differences})
    return rows


def main(argv: list[str]) -> None:
    parser = benchmark_parser(__name__, __doc__)
    add_json(parser)
    args = parser.parse_args(argv)
    load = machine_load()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ops = create_ops(device)
    print(f"{'operation':<14}{'dtype':<10}" + "".join(f"{n:>10}" for n in ROWS) + "  rows")
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        for row in measure(ops, dtype, device):
            rows.append(row)
            values = "".join(f"{row[str(n)]:>10.2g}" for n in ROWS)
            print(f"{row['name']:<14}{row['dtype']:<10}{values}")
    if args.json:
        write_json(args.json, {"load_before": load, "rows": rows})
