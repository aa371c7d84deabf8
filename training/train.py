"""Trains the built-in model and writes its checkpoint folder.

    python -m training.train --out python/minisgl/builtin

One pass over generated rows, AdamW with warm-up and cosine, loss on the answers only. Every so
often it measures the held-out suite by teacher forcing: an answer counts when each of its tokens
is the most likely one, which is the same as greedy decoding of it. `evaluate.py` is the real
measurement.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import DataLoader

from training import tokenizer as tok
from training.corpus import suite
from training.data import IGNORED, Row, Rows, collate, pack
from training.model import Qwen3, Shape, packed_mask, save

WARMUP_STEPS = 300


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train the built-in model.")
    parser.add_argument("--out", type=Path, required=True, help="checkpoint folder")
    parser.add_argument("--steps", type=int, default=9000, help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=math.inf, help="end the schedule early")
    parser.add_argument(
        "--rows", type=int, default=24, help="rows of 1536 tokens in a step (default: %(default)s)"
    )
    parser.add_argument(
        "--lr", type=float, default=2e-3, help="peak learning rate (default: %(default)s)"
    )
    parser.add_argument("--weight-decay", type=float, default=0.05, help="default: %(default)s")
    parser.add_argument(
        "--layers", type=int, default=6, help="layers of the model (default: %(default)s)"
    )
    parser.add_argument("--init", type=Path, help="checkpoint folder to start from")
    parser.add_argument(
        "--seed", type=int, default=1, help="seed of weights and rows (default: %(default)s)"
    )
    parser.add_argument(
        "--workers", type=int, default=4, help="processes that make text (default: %(default)s)"
    )
    parser.add_argument(
        "--measure-every",
        type=int,
        default=1500,
        help="steps between measurements (default: %(default)s)",
    )
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="torch.compile (default: on a GPU)",
    )
    return parser.parse_args()


def rate(progress: float, step: int, peak: float) -> float:
    """Learning rate: linear warm-up, then cosine to zero at progress 1."""
    return peak * min(1.0, (step + 1) / WARMUP_STEPS) * (1 + math.cos(math.pi * progress)) / 2


def loss_of(model: torch.nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """Mean cross entropy over the learned tokens of a batch."""
    ids, targets, positions, documents = batch
    logits = model(ids, positions, packed_mask(documents))
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED)


@torch.no_grad()
def measure(
    model: torch.nn.Module,
    packed: tuple[Row, list[tuple[int, int]]],
    labels: list[str],
    device: torch.device,
    rows: int,
) -> dict[str, float]:
    """Share of exact last answers for each row of the suite."""
    columns, places = packed
    tensors = [torch.from_numpy(c) for c in columns]
    wrong: set[tuple[int, int]] = set()
    for start in range(0, len(tensors[0]), rows):
        ids, targets, positions, documents = (
            F.pad(t[start : start + rows], (0, 0, 0, max(0, start + rows - len(t)))).to(device)
            for t in tensors
        )
        with autocast(device):
            best = model(ids, positions, packed_mask(documents)).argmax(-1)
        bad = (best != targets) & (targets != IGNORED) & (documents > 0)
        wrong |= {(start + int(r), int(documents[r, t])) for r, t in bad.nonzero().tolist()}
    right: dict[str, list[bool]] = defaultdict(list)
    for label, place in zip(labels, places, strict=True):
        right[label].append(place not in wrong)
    return {label: sum(r) / len(r) for label, r in right.items()}


def autocast(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """bfloat16 on a GPU, float32 on a CPU."""
    if device.type == "cuda":
        return torch.autocast("cuda", torch.bfloat16)
    return contextlib.nullcontext()


def main() -> None:
    """Builds the tokenizer if the folder has none, trains, saves."""
    args = arguments()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(args.seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    if not (args.out / "tokenizer.json").exists():
        pieces = tok.frequent_pieces(tok.VOCAB_SIZE - 256 - len(tok.SPECIAL))
        tok.save(tok.build(pieces), args.out)
    tokenizer = tok.load(args.out)
    encoder = tok.Encoder(tokenizer)
    shape = Shape(vocab_size=tokenizer.get_vocab_size(), num_layers=args.layers)
    model = Qwen3(shape).to(device)
    if args.init:
        model.load_state_dict(load_file(args.init / "model.safetensors"))
    num_parameters = sum(p.numel() for p in model.parameters())
    print(f"{num_parameters / 1e6:.2f} M parameters, {device}", flush=True)
    with_compile = device.type == "cuda" if args.compile is None else args.compile
    step_model: Any = torch.compile(model) if with_compile else model
    decayed = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    optimizer = torch.optim.AdamW(
        [
            {"params": decayed, "weight_decay": args.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ],
        lr=args.lr,
        betas=(0.9, 0.98),
        fused=device.type == "cuda",
    )
    measured = suite(count=100)
    labels = [label for label, group in measured.items() for _ in group]
    conversations = [c for group in measured.values() for c in group]
    packed = pack(conversations, encoder)
    loader = DataLoader(
        Rows(args.out, args.seed, args.steps * args.rows),
        batch_size=args.rows,
        num_workers=args.workers,
        collate_fn=collate,
        pin_memory=device.type == "cuda",
        prefetch_factor=8 if args.workers else None,
    )
    start = time.perf_counter()
    running = torch.zeros((), device=device)
    num_done, last_print = 0, 0
    for step, batch in enumerate(loader):
        elapsed = time.perf_counter() - start
        progress = max(step / args.steps, elapsed / args.seconds)
        if progress >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = rate(progress, step, args.lr)
        with autocast(device):
            loss = loss_of(step_model, tuple(t.to(device, non_blocking=True) for t in batch))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        running += loss.detach()
        num_done = step + 1
        if num_done % 100 == 0 or step < 3:
            mean = running.item() / (num_done - last_print)
            running.zero_()
            last_print = num_done
            speed = num_done * batch[0].numel() / (time.perf_counter() - start)
            now = time.perf_counter() - start
            print(
                f"step {num_done} loss {mean:.4f} {now:.0f} s {speed / 1e3:.0f} ktok/s", flush=True
            )
        if num_done % args.measure_every == 0:
            scores = measure(model, packed, labels, device, args.rows)
            worst = sorted(scores.items(), key=lambda item: item[1])[:10]
            mean_score = sum(scores.values()) / len(scores)
            print(f"  held out: mean {mean_score:.3f}; worst {worst}", flush=True)
            save(model, args.out, eos=encoder.end, pad=encoder.pad)
    save(model, args.out, eos=encoder.end, pad=encoder.pad)
    seconds = time.perf_counter() - start
    scores = measure(model, packed, labels, device, args.rows)
    print(f"{num_done} steps, {seconds:.0f} s")
    print(json.dumps(scores, indent=1), flush=True)


if __name__ == "__main__":
    main()
