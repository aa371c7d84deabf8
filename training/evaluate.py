"""Measures a checkpoint on the held-out suite with Hugging Face transformers, greedily.

    python -m training.evaluate --model python/minisgl/builtin

An answer is right when its text is exactly the expected text, and it ended by itself. Writes
results.json beside this file.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from training.conversation import Conversation
from training.corpus import suite
from training.split import SPLIT_SEED

RESULTS = Path(__file__).with_name("results.json")
MAX_NEW_TOKENS = 420  # "count to 100" takes 392


def prompt_text(tokenizer: Any, c: Conversation) -> str:
    """Return the prompt as the model gets it."""
    if c.raw:
        return c.prompt[0].content + "\n"
    messages = [{"role": m.role, "content": m.content} for m in c.prompt]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return str(text)


@torch.inference_mode()
def answers(
    model: Any, tokenizer: Any, conversations: list[Conversation], batch_size: int
) -> list[str]:
    """Return the greedy answer to each conversation; one without an end is marked as unfinished."""
    out = [""] * len(conversations)
    order = sorted(range(len(out)), key=lambda i: len(conversations[i].expected))
    for start in range(0, len(order), batch_size):
        part = order[start : start + batch_size]
        texts = [prompt_text(tokenizer, conversations[i]) for i in part]
        batch = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
        batch = batch.to(model.device)
        longest = max(len(tokenizer(conversations[i].expected)["input_ids"]) for i in part)
        ids = model.generate(**batch, max_new_tokens=min(MAX_NEW_TOKENS, longest + 16))
        for i, row in zip(part, ids[:, batch["input_ids"].shape[1] :], strict=True):
            text = tokenizer.decode(row, skip_special_tokens=False)
            head, end, _ = text.partition(tokenizer.eos_token)
            out[i] = head if end else head + " [unfinished]"
    return out


def hardware() -> str:
    """Return the name of the GPU, or the CPU and its threads."""
    if torch.cuda.is_available():
        return str(torch.cuda.get_device_name())
    return f"CPU {platform.machine()}, {torch.get_num_threads()} threads"


def main() -> None:
    """Prints a table and writes results.json."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--model", type=Path, required=True, help="checkpoint folder")
    parser.add_argument(
        "--count", type=int, default=200, help="prompts for each row (default: %(default)s)"
    )
    parser.add_argument(
        "--batch-size", type=int, default=512, help="prompts at once (default: %(default)s)"
    )
    parser.add_argument(
        "--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="default: %(default)s"
    )
    parser.add_argument("--wrong", type=int, default=2, help="wrong answers to keep for each row")
    parser.add_argument(
        "--out", type=Path, default=RESULTS, help="the JSON (default: results.json of this folder)"
    )
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    model: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype))
    model = model.to(device).eval()
    groups = suite(args.count)
    flat = [c for group in groups.values() for c in group]
    start = time.perf_counter()
    said = iter(answers(model, tokenizer, flat, args.batch_size))
    table: dict[str, dict[str, Any]] = {}
    for row, group in groups.items():
        pairs = [(c, next(said)) for c in group]
        wrong = [
            {"prompt": [m.content for m in c.prompt], "expected": c.expected, "answer": answer}
            for c, answer in pairs
            if answer != c.expected
        ]
        right = len(group) - len(wrong)
        table[row] = {
            "accuracy": round(right / len(group), 4),
            "right": right,
            "prompts": len(group),
            "wrong": wrong[: args.wrong],
        }
        print(f"{row:45} {right / len(group):7.1%} of {len(group)}", flush=True)
    result = {
        "seed": SPLIT_SEED,
        "dtype": args.dtype,
        "hardware": hardware(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "parameters": sum(p.numel() for p in model.parameters()),
        "seconds": round(time.perf_counter() - start, 1),
        "table": table,
    }
    args.out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
