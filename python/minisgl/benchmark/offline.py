"""What the engine reaches on a GPU, without a server: throughput, one stream, prefill, a prefix.

Random weights in real shapes: nothing is downloaded. Each workload runs once to compile, capture
and warm up, then `--repeats` times with fresh ids and an empty prefix cache; the median counts.
Beside each time stands the floor of `minisgl.benchmark.floor` and the share of it that was reached.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from minisgl.benchmark.arguments import add_json, benchmark_parser, integer, natural
from minisgl.benchmark.floor import Shape, floor_s
from minisgl.benchmark.gpu_time import card_rates, need_gpu
from minisgl.benchmark.lengths import lengths_of
from minisgl.benchmark.report import machine_load, write_json
from minisgl.core import SamplingParams
from minisgl.engine import Engine, EngineConfig
from minisgl.errors import ConfigError
from minisgl.message import UserMsg, ids_to_bytes
from minisgl.scheduler import Scheduler, SchedulerConfig, run
from minisgl.testing import ListInbox, ListOutbox
from minisgl.utils.logger import setup_logging

FIRST_ID, LAST_ID = 1_000, 100_000  # ordinary tokens of the shapes' vocabulary

_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "head_dim": 128,
    "num_key_value_heads": 8,
    "vocab_size": 151_936,
    "rope_theta": 1_000_000,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40_960,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        **_QWEN3,
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "intermediate_size": 3072,
        "tie_word_embeddings": True,
    },
    "qwen3-14b": {
        **_QWEN3,
        "hidden_size": 5120,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "intermediate_size": 17_408,
        "tie_word_embeddings": False,
    },
    "qwen3-32b": {
        **_QWEN3,
        "hidden_size": 5120,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "intermediate_size": 25_600,
        "tie_word_embeddings": False,
    },
    "qwen3-30b-a3b": {
        **_QWEN3,
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """requests: (prompt, output) lengths. shared: how many first prompt tokens are the same."""

    name: str
    requests: tuple[tuple[int, int], ...]
    temperature: float
    shared: int = 0


def workloads() -> list[Workload]:
    def fixed(name: str, temperature: float) -> Workload:
        return Workload(name=name, requests=tuple(lengths_of(name)), temperature=temperature)

    return [
        fixed("throughput", 0.6),
        fixed("single", 0.0),
        fixed("prefill", 0.0),
        Workload(name="shared", requests=((4160, 32),) * 128, temperature=0.0, shared=4096),
        Workload(name="long", requests=((32_768, 256),) * 8, temperature=0.0),
    ]


def main(argv: Sequence[str]) -> int:
    parser = benchmark_parser(__name__, __doc__)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b", help="the model's")
    parser.add_argument(
        "--workloads",
        default="throughput,single,prefill,shared",
        help="with commas; there is long, too",
    )
    parser.add_argument("--repeats", type=natural, default=3, help="runs, after one to warm up")
    parser.add_argument("--attn", default="auto", help="as the server's, like the next three")
    parser.add_argument("--page-size", type=natural, default=16, help="tokens")
    parser.add_argument(
        "--max-prefill-length", type=natural, default=None, help="default: from the measured rate"
    )
    parser.add_argument("--cuda-graph-max-bs", type=integer(0), default=256, help="rows")
    add_json(parser)
    args = parser.parse_args(argv)
    setup_logging("offline")

    known, names = {work.name: work for work in workloads()}, args.workloads.split(",")
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"there is no workload {unknown[0]!r}; there are: {', '.join(known)}")
    need_gpu()
    chosen = [known[name] for name in names]
    values = SHAPES[args.shape]
    load = machine_load()
    started = time.perf_counter()
    engine = random_engine(
        values,
        attn=args.attn,
        page_size=args.page_size,
        max_prefill_tokens=args.max_prefill_length,
        cuda_graph_max_bs=args.cuda_graph_max_bs,
    )
    build_s = time.perf_counter() - started
    rates = card_rates()
    print(f"{args.shape}: engine built in {build_s:.1f} s; {rates}")
    rows = [_measure(engine, shape_of(values), work, args.repeats) for work in chosen]
    if args.json:
        result = {"load_before": load, "shape": args.shape, "attn": args.attn, "build_s": build_s}
        write_json(args.json, {**result, **rates, "rows": rows})
    engine.close()
    return 0


def random_engine(values: dict[str, Any], **settings: Any) -> Engine:
    """Of random weights, on a GPU. values: of a config.json; settings: of `EngineConfig`."""
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "config.json").write_text(json.dumps(values))
        return Engine(EngineConfig(folder=Path(name), device="cuda", dummy_weight=True, **settings))


def shape_of(values: dict[str, Any]) -> Shape:
    """From a config.json's values; of a mixture one with all layers sparse."""
    num_experts = values.get("num_experts", 0)
    return Shape(
        hidden_size=values["hidden_size"],
        num_layers=values["num_hidden_layers"],
        num_heads=values["num_attention_heads"],
        num_kv_heads=values["num_key_value_heads"],
        head_dim=values["head_dim"],
        intermediate_size=values["moe_intermediate_size" if num_experts else "intermediate_size"],
        num_experts=num_experts,
        top_k=values["num_experts_per_tok"] if num_experts else 0,
        vocab_size=values["vocab_size"],
    )


def _measure(engine: Engine, shape: Shape, work: Workload, repeats: int) -> dict[str, Any]:
    warm_s = _run(engine, work, seed=0)[0]
    times, hosts = zip(*(_run(engine, work, seed=1 + i) for i in range(repeats)), strict=True)
    seconds = statistics.median(times)
    floor = floor_s(shape, work.requests, shared=work.shared)
    only_prefill = all(output == 1 for _, output in work.requests)
    tokens = sum(prompt if only_prefill else output for prompt, output in work.requests)
    row = {
        "workload": work.name,
        "requests": len(work.requests),
        "tokens": tokens,
        "seconds": round(seconds, 4),
        "all_seconds": [round(x, 4) for x in times],
        "tokens_per_s": round(tokens / seconds, 1),
        "floor_s": round(floor, 4),
        "of_floor": round(floor / seconds, 3),
        "first_run_s": round(warm_s, 2),
        "steps": hosts[0],
    }
    print(
        f"{work.name:<12}{seconds:9.3f} s {tokens / seconds:12,.0f} tok/s   floor {floor:.3f} s, "
        f"{floor / seconds:.2f} of it   runs {row['all_seconds']}, first {warm_s:.1f} s"
    )
    return row


def _run(engine: Engine, work: Workload, seed: int) -> tuple[float, int]:
    """(seconds, steps) of one run."""
    rng = np.random.default_rng([seed, len(work.requests)])
    shared = rng.integers(FIRST_ID, LAST_ID, work.shared)
    messages = []
    for uid, (prompt, output) in enumerate(work.requests):
        own = rng.integers(FIRST_ID, LAST_ID, prompt - work.shared)
        sampling = SamplingParams(
            temperature=work.temperature, max_tokens=output, ignore_eos=True, seed=uid
        )
        ids = ids_to_bytes(np.concatenate((shared, own)).astype(np.int32))
        messages.append(UserMsg(uid=uid, ids=ids, sampling=sampling))
    scheduler = Scheduler(
        SchedulerConfig(
            num_pages=engine.memory.num_pages,
            page_size=engine.page_size,
            max_seq_len=engine.max_seq_len,
            vocab_size=engine.model_config.vocab_size,
            eos_ids=frozenset(),
            max_prefill_tokens=engine.max_prefill_tokens,
            max_running=engine.max_running,
        )
    )
    outbox = ListOutbox()
    inbox = ListInbox([messages], more=lambda: [] if scheduler.runnable else None)
    start = time.perf_counter()
    run(scheduler, engine, inbox, outbox)
    seconds = time.perf_counter() - start
    assert scheduler.stats.num_finished == len(work.requests), scheduler.stats
    return seconds, scheduler.stats.num_steps
