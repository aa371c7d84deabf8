"""Names this server's flag for a flag of vLLM, SGLang, llama.cpp or TGI.

Sources of the names: `vllm serve --help`, SGLang's page "Server Arguments", llama.cpp's
tools/server/README.md, TGI's page "Text-generation-launcher arguments". A flag in neither table is
for a part that this engine does not have.
"""

from __future__ import annotations

from typing import Final

OURS: Final[dict[str, tuple[str, ...]]] = {
    "--model": (
        "-m", "--model-id", "--hf-repo", "-hf", "-hfr", "--tokenizer-path",
        "--tokenizer",
    ),
    "--served-model-name": ("--alias", "-a"),
    "--dtype": ("--torch-dtype",),
    "--tp": (
        "--tensor-parallel-size", "--tp-size", "-tp", "--num-shard", "--sharded",
        "--tensor-split", "-ts", "--split-mode", "-sm",
    ),
    "--ep": ("--enable-expert-parallel", "--ep-size", "--expert-parallel-size", "-ep"),
    "--quantization": ("-q", "--quantize", "--load-in-4bit"),
    "--kv-cache-dtype": ("--cache-type-k", "-ctk", "--cache-type-v", "-ctv"),
    "--host": ("--hostname",),
    "--max-seq-len": (
        "--max-model-len", "--context-length", "--ctx-size", "-c", "--max-input-tokens",
        "--max-input-length",
    ),
    "--memory-ratio": (
        "--gpu-memory-utilization", "--mem-fraction-static", "--cuda-memory-fraction",
    ),
    "--max-running-requests": ("--max-num-seqs", "--parallel", "-np", "--max-batch-size"),
    "--max-queued-requests": ("--max-concurrent-requests",),
    "--max-prefill-length": (
        "--max-num-batched-tokens", "--chunked-prefill-size", "--max-prefill-tokens",
        "--max-batch-prefill-tokens", "--batch-size", "-b", "--ubatch-size", "-ub",
    ),
    "--page-size": ("--block-size",),
    "--draft-model": ("--speculative-draft-model-path", "--model-draft", "-md"),
    "--num-pages": (
        "--num-gpu-blocks-override", "--max-total-tokens", "--max-batch-total-tokens",
    ),
    "--attn": ("--attention-backend", "--flash-attn", "-fa", "--prefill-attention-backend",
               "--decode-attention-backend"),
    "--cache naive": ("--no-enable-prefix-caching", "--disable-radix-cache", "--no-cache-prompt"),
    "--threads": ("-t", "--threads-batch", "-tb"),
    "--cuda-graph-max-bs": ("--cuda-graphs", "--cuda-graph-bs", "--cudagraph-capture-sizes"),
    "--cuda-graph-max-bs 0": ("--enforce-eager", "--disable-cuda-graph"),
    "--dummy-weight": ("--load-format",),
    "--device": ("--n-gpu-layers", "--gpu-layers", "-ngl", "-dev"),
    "--dist-init-addr HOST:PORT": ("--master-addr", "--master-port", "--nccl-init-addr"),
    "--disable-pynccl": ("--disable-custom-all-reduce",),
    "--cors-origin": ("--allowed-origins", "--cors-allow-origin"),
    "--log-requests": ("--enable-log-requests",),
    "--log-steps FILE": ("--decode-log-interval", "--enable-request-time-stats-logging"),
    "--log-level": (
        "--uvicorn-log-level", "--log-verbosity", "--log-level-http", "--verbosity", "-lv",
        "--verbose", "-v", "--log-disable",
    ),
    "--log-format json": ("--json-output",),
    "--ssl-certfile": ("--ssl-cert-file",),
    "--ssl-keyfile": ("--ssl-key-file",),
    "--otlp-endpoint": ("--otlp-traces-endpoint",),
    "--hang-timeout": ("--watchdog-timeout",),
    "--num-tokenizer": ("--tokenizer-worker-num", "--tokenizer-pool-size", "--threads-http"),
    "--lora": ("--lora-modules", "--lora-paths", "--lora-adapters"),
    "--max-loras": ("--max-loras-per-batch",),
    "minisgl chat": ("--conversation", "-cnv"),
}  # fmt: skip
"""For each flag of this server, the other engines' flags."""

NONE: Final[dict[str, tuple[str, ...]]] = {
    "it is always on here: leave it out": (
        "--enable-prefix-caching", "--enable-chunked-prefill", "--cont-batching", "-cb",
        "--cache-prompt", "--metrics", "--enable-metrics", "--jinja", "--enable-mixed-chunk",
        "--async-scheduling", "--enable-auto-tool-choice", "--slots", "--props", "--webui",
        "--enable-cache-report", "--enable-prefill-logprobs", "--enable-prompt-tokens-details",
        "--flash-attention",
    ),
    "this server does no such thing: leave it out": (
        "--disable-log-requests", "--disable-log-stats", "--no-warmup", "--skip-server-warmup",
        "--no-webui", "--no-context-shift", "--usage-stats", "--disable-fastapi-docs",
    ),
    "the code of a checkpoint is never run here: leave it out": ("--trust-remote-code",),
    "chat template, tokenizer and sampling defaults come from the checkpoint: change its files":
        ("--chat-template", "--chat-template-file", "--tokenizer-mode", "--generation-config",
         "--override-generation-config", "--tokenizer-config-path", "--hf-overrides",
         "--json-model-override-args", "--rope-scaling", "--rope-theta", "--rope-freq-base",
         "--rope-freq-scale", "--rope-factor"),
    "the chat template shows how the model reasons; a request sets enable_thinking and "
    "reasoning_effort": (
        "--reasoning-parser", "--reasoning-format", "--reasoning-budget", "--enable-reasoning",
    ),
    "a model is divided by --tp alone here, and minisgl route spreads requests over servers": (
        "--pipeline-parallel-size", "--pp-size", "-pp",
        "--data-parallel-size", "--dp-size", "-dp", "--enable-dp-attention", "--api-server-count",
    ),
    "--drafts takes auto, off, or some of grammar,tree,ngram,mtp; --draft-model a small model": (
        "--speculative-config", "--speculative-algorithm",
        "--speculative-num-steps", "--speculative-num-draft-tokens", "--speculative-eagle-topk",
        "--speculate", "--draft", "--draft-max", "--draft-min",
    ),
    "adapters have the scale of their files: merge others into the checkpoint": ("--lora-scaled",),
    "--lora NAME=PATH, or --lora-folder DIR, is enough here: leave it out": ("--enable-lora",),
    "a safetensors model that reads pictures does so without a flag: pip install "
    "'minisgl[vision]'": (
        "--mmproj", "--limit-mm-per-prompt", "--enable-multimodal",
    ),
    "every model embeds and ranks here, without a flag (docs/embeddings.md)": (
        "--embedding", "--embeddings", "--reranking", "--rerank", "--is-embedding", "--task",
        "--runner", "--convert", "--pooling", "--override-pooler-config", "--pooler-config",
    ),
    "weights and KV cache stay on the device here; a smaller --memory-ratio, fewer --num-pages or "
    "--quantization save memory": (
        "--cpu-offload-gb", "--swap-space", "--kv-offloading-size", "--enable-hierarchical-cache",
        "--hicache-ratio", "--hicache-size", "--n-cpu-moe", "--cpu-moe", "--no-kv-offload", "-nkvo",
    ),
    "set the environment variable HF_HUB_CACHE or HF_TOKEN": (
        "--download-dir", "--huggingface-hub-cache", "--hf-token", "-hft",
    ),
    "give the folder of that download as MODEL": (
        "--revision", "--tokenizer-revision", "--code-revision", "--hf-file", "-hff",
    ),
    "structured output needs no flag here": (
        "--guided-decoding-backend", "--structured-outputs-config", "--grammar-backend",
        "--grammar", "--grammar-file", "--json-schema", "-j", "--disable-grammar-support",
    ),
    "sampling settings are fields of a request; `minisgl chat` and `minisgl run` take "
    "--set NAME=VALUE": (
        "--temp", "--temperature", "--top-p", "--top-k", "--min-p", "--max-tokens", "--seed", "-s",
        "--random-seed", "--n-predict", "-n", "--predict", "--repeat-penalty",
        "--presence-penalty", "--frequency-penalty", "--samplers", "--max-best-of",
        "--max-stop-sequences", "--max-top-n-tokens", "--max-logprobs",
    ),
    "set the environment variable CUDA_VISIBLE_DEVICES": (
        "--base-gpu-id", "--gpu-id-step", "--main-gpu", "-mg", "--device-ids",
    ),
    "set the environment variable MINISGL_DISABLE_OVERLAP_SCHEDULING=1": (
        "--disable-overlap-schedule", "--no-async-scheduling",
    ),
    "experts have one backend for each kind of device and weight, which is chosen by itself: leave "
    "it out": ("--moe-backend", "--moe-runner-backend"),
    "the priority is a field of a request": ("--scheduling-policy", "--schedule-policy"),
    "put the server behind a proxy that removes the prefix from paths": (
        "--root-path", "--api-prefix", "--fastapi-root-path",
    ),
}  # fmt: skip
"""For each advice, the other engines' flags that have no counterpart here."""


def answer(flag: str) -> str:
    """Return what to write instead of another engine's flag, or "" for an unknown flag."""
    for ours, theirs in OURS.items():
        if flag in theirs:
            return f"that is {ours} here"
    return next((text for text, flags in NONE.items() if flag in flags), "")


COMMANDS: Final = {
    "ps": "a server is a process of its own, without a daemon: `pgrep -af minisgl` finds those of "
    "this machine, and GET /v1/models of a server's address says what it serves",
    "stop": "Ctrl-C in its terminal, or SIGTERM, stops a server",
    "ls": "minisgl list shows the models that are downloaded",
    "show": "GET /v1/models and POST /api/show of a running server describe its model",
}
"""Commands of Ollama that are not here -> what to do instead."""


def instead_of(command: str) -> str:
    """Return what to do instead of another program's command, or "" for an unknown one."""
    return COMMANDS.get(command, "")
