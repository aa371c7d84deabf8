"""Let lm-evaluation-harness score a checkpoint through a server and through transformers.

    python -m venv lm-eval
    lm-eval/bin/pip install 'lm_eval[api,hf]'
    minisgl serve --dtype float32 --port 1919 &
    lm-eval/bin/python scripts/try_lm_eval.py http://127.0.0.1:1919 python/minisgl/builtin

Prints a table of scores. The exit code is 1 if a score of the server differs from transformers' in
any digit, or if two log-likelihoods differ by more than 1e-4. The tasks are in tests/lm_eval. It
needs no minisgl and no network. The table is in docs/clients.md.
"""

from __future__ import annotations

import argparse
import os
import sys
from functools import cache
from pathlib import Path
from typing import Any, Final

TASKS: Final = Path(__file__).parents[1] / "tests/lm_eval"
MODEL: Final = "minisgl-builtin"
TOLERANCE: Final = 1e-4


def task(name: str) -> dict[str, Any]:
    """The configuration of a task, with the path of its data."""
    import yaml

    config: dict[str, Any] = yaml.safe_load((TASKS / f"{name}.yaml").read_text())
    files = config["dataset_kwargs"]["data_files"]
    files["test"] = str(TASKS / files["test"])
    return config


def run(
    name: str, model: str, args: dict[str, Any], *, is_chat: bool
) -> tuple[dict[str, float], list[Any]]:
    """Return the scores by metric, and the answer to each request."""
    import lm_eval

    result = lm_eval.simple_evaluate(
        model=model,
        model_args=args,
        tasks=[task(name)],
        apply_chat_template=is_chat,
        log_samples=True,
        bootstrap_iters=0,
        verbosity="ERROR",
    )
    scores = {
        key: value
        for key, value in result["results"][name].items()
        if isinstance(value, float) and "stderr" not in key
    }
    samples = sorted(result["samples"][name], key=lambda sample: sample["doc_id"])
    return scores, [answer for sample in samples for answer in sample["resps"]]


def largest_difference(ours: list[Any], theirs: list[Any]) -> str:
    """Return the largest difference of log-likelihoods, or the number of equal texts, as a text."""
    pairs = [(a[0], b[0]) for a, b in zip(ours, theirs, strict=True)]
    if isinstance(pairs[0][0], str):
        return f"{sum(a == b for a, b in pairs)} of {len(pairs)} texts are equal"
    assert all(bool(a[0][1]) == bool(b[0][1]) for a, b in zip(ours, theirs, strict=True)), (
        "is_greedy differs"
    )
    largest = max(abs(float(a[0]) - float(b[0])) for a, b in pairs)
    assert largest <= TOLERANCE, largest
    return f"log-likelihoods differ by at most {largest:.1e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("url", help="address of a server with the checkpoint")
    parser.add_argument("folder", help="the checkpoint")
    given = parser.parse_args()
    url, folder = given.url.rstrip("/"), given.folder
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OPENAI_API_KEY": "none"}
    local = {"model": MODEL, "tokenizer": folder, "tokenizer_backend": "huggingface"}
    completions = {**local, "base_url": f"{url}/v1/completions", "max_length": 2048}
    chat = {**local, "base_url": f"{url}/v1/chat/completions", "max_length": 2048}
    transformers = {"pretrained": folder, "dtype": "float32", "device": "cpu"}
    cases = [
        ("sums_choice", "local-completions", False, completions),
        ("sums_choice", "local-completions", True, completions),
        ("questions", "local-completions", True, completions),
        ("questions", "local-chat-completions", True, chat),
    ]
    is_equal = True

    @cache
    def reference(name: str, is_chat: bool) -> tuple[dict[str, float], list[Any]]:
        return run(name, "hf", transformers, is_chat=is_chat)

    print(
        "| task | through | metric | score | transformers' | answers |\n|---|---|---|---|---|---|"
    )
    for name, model, is_chat, args in cases:
        theirs, their_answers = reference(name, is_chat)
        ours, our_answers = run(name, model, args, is_chat=is_chat)
        is_equal = is_equal and ours == theirs
        for metric, score in ours.items():
            cells = (
                name + (", chat template" if is_chat else ""),
                model,
                metric.partition(",")[0],
                f"{score}",
                f"{theirs[metric]}",
                largest_difference(our_answers, their_answers),
            )
            print(f"| {' | '.join(cells)} |", flush=True)
    sys.exit(not is_equal)


if __name__ == "__main__":
    main()
