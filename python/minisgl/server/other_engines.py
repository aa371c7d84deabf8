"""What to write here instead of the flags of vLLM, SGLang and llama.cpp.

The names are those of `vllm serve --help`, SGLang's page "Server Arguments" and llama.cpp's
tools/server/README.md.
"""

from __future__ import annotations

from typing import Final

OURS: Final[dict[str, tuple[str, ...]]] = {
    "--model": ("--model-path", "-m"),
    "--served-model-name": ("--alias", "-a"),
    "--tp": ("--tensor-parallel-size", "--tp-size", "-tp"),
    "--ep": ("--enable-expert-parallel", "--ep-size", "--expert-parallel-size", "-ep"),
    "--quantization": ("-q",),
    "--max-seq-len": ("--max-model-len", "--context-length", "--ctx-size", "-c"),
    "--memory-ratio": ("--gpu-memory-utilization", "--mem-fraction-static"),
    "--max-running-requests": ("--max-num-seqs", "--parallel", "-np"),
    "--max-prefill-length": (
        "--max-num-batched-tokens", "--chunked-prefill-size",
        "--batch-size", "-b", "--ubatch-size", "-ub",
    ),
    "--page-size": ("--block-size",),
    "--num-pages": ("--num-gpu-blocks-override", "--max-total-tokens"),
    "--attn": ("--attention-backend", "--flash-attn", "-fa"),
    "--cache naive": ("--no-enable-prefix-caching", "--disable-radix-cache", "--no-cache-prompt"),
    "--cuda-graph-max-bs 0": ("--enforce-eager", "--disable-cuda-graph"),
    "--dummy-weight": ("--load-format",),
    "--device": ("--n-gpu-layers", "--gpu-layers", "-ngl"),
    "--dist-init-addr HOST:PORT": ("--master-addr", "--master-port"),
    "--cors-origin": ("--allowed-origins",),
    "--log-requests": ("--enable-log-requests",),
    "--log-level": ("--uvicorn-log-level", "--log-verbosity"),
    "--ssl-certfile": ("--ssl-cert-file",),
    "--ssl-keyfile": ("--ssl-key-file",),
    "--otlp-endpoint": ("--otlp-traces-endpoint",),
    "minisgl chat": ("--shell-mode", "--conversation", "-cnv"),
}  # fmt: skip
"""Their flags by ours."""

NONE: Final[dict[str, tuple[str, ...]]] = {
    "it is always on here: leave it out": (
        "--enable-prefix-caching", "--enable-chunked-prefill", "--cont-batching", "-cb",
        "--cache-prompt", "--metrics", "--enable-metrics", "--jinja",
    ),
    "the code of a checkpoint is never run here: leave it out": ("--trust-remote-code",),
    "a model is divided by --tp alone here": (
        "--pipeline-parallel-size", "--pp-size", "-pp",
        "--data-parallel-size", "--dp-size", "-dp",
    ),
    "sampling settings are fields of a request; `minisgl chat` and `minisgl run` take "
    "--set NAME=VALUE": (
        "--temp", "--temperature", "--top-p", "--top-k", "--min-p", "--max-tokens", "--seed",
        "--n-predict", "-n",
    ),
    "set the environment variable OMP_NUM_THREADS": ("--threads", "-t"),
}  # fmt: skip
"""Their flags that have no counterpart, by what to do."""


def answer(flag: str) -> str:
    """Return what to write instead of another engine's flag, or "" for an unknown flag."""
    for ours, theirs in OURS.items():
        if flag in theirs:
            return f"that is {ours} here"
    return next((text for text, flags in NONE.items() if flag in flags), "")
