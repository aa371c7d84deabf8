"""The engine's options: the name, type, default, bounds and help of each, in one place.

A field of `EngineConfig` is a keyword of `LLM`, a flag of the server and a setting of the engine,
all by the same name. `minisgl.server.flags` makes the command line, `--help` and docs/flags.md from
the fields. An option of an engine is a field here and a keyword of `LLM` (a test compares them). An
option that only a server has is a field in `minisgl.runtime.args` if its workers read it, else in
`minisgl.server.args`. The record that the command line or `LLM` makes travels to the engine of each
rank, whole.

If the default is None, the engine chooses the value, because it knows the device and the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from minisgl import plugins
from minisgl.builtin import model_path
from minisgl.core.adapters import are_adapters, pairs_of
from minisgl.core.options import SWITCH, Rule, check_option, one_of, option, options_of, text, whole
from minisgl.errors import ConfigError
from minisgl.utils.text import counted

CacheKind = Literal["radix", "naive"]
DeviceName = Literal["auto", "cpu", "cuda"]
DTypeName = Literal["auto", "float32", "bfloat16", "float16"]
KVCacheDType = Literal["auto", "fp8", "int8"]
ModelSource = Literal["huggingface", "modelscope"]
Quantization = Literal["fp8", "int8", "int4"]


def context_exceeded(asked: int, context: int) -> str:
    """Return the sentence about a `--max-seq-len` of more tokens than the model's context."""
    return (
        f"--max-seq-len {asked} exceeds the {counted(context, 'token')} that the model was made "
        "for (max_position_embeddings and its rope scaling)"
    )


def _is_attention(name: str) -> bool:
    # `minisgl.attention.registry` has the same names, but imports torch. A test compares them.
    prefill, comma, decode = name.partition(",")
    if not comma:
        return name in ("auto", "torch", "cpu", "triton", "fa")
    return prefill in ("triton", "fa", "fa2", "fi") and decode in ("triton", "fa", "trtllm")


_ATTENTION = text(
    "auto, torch, cpu, triton or fa, or PREFILL,DECODE with triton, fa, fa2 or fi, and triton, fa "
    "or trtllm",
    _is_attention,
)
_ADAPTERS = Rule(
    words="NAME=PATH_OR_ID with a printable name, each name once",
    accepts=are_adapters, parse=pairs_of, metavar="NAME=PATH_OR_ID",
)  # fmt: skip
_RATIO = Rule(
    words="a number above 0 and at most 1",
    accepts=lambda value: type(value) in (int, float) and 0 < value <= 1,
    parse=float,
    metavar="R",
)


MTP: Final = "mtp"
"""The drafter whose guesses the model makes."""
DRAFT: Final = "draft"
"""The drafter whose guesses the draft model makes."""


def with_draft_model(drafts: str, draft_model: str | None) -> str:
    """Return the value of `--drafts`, with the drafter of a draft model if there is one."""
    if draft_model is None or DRAFT in drafts.split(","):
        return drafts
    return DRAFT if drafts == "off" else f"{drafts},{DRAFT}"


def _are_drafters(names: str) -> bool:
    known = {row.name for row in plugins.installed() if row.table == "drafters"}
    return names in ("auto", "off") or known.issuperset(names.split(","))


_DRAFTS = text(
    "auto, off, or drafters joined by commas: "
    + (
        ", ".join(row.name for row in plugins.installed() if row.table == "drafters")
        or plugins.absent("drafters")
    ),
    _are_drafters,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The options of an engine, checked, and the place of its rank. Raises ConfigError.

    model: a folder or a model id, and a folder once that was fetched; None is the built-in model.
    rank: this rank, of `tp`. store: where the ranks meet
    (`minisgl.distributed.ranks.create_communicator`).
    """

    # fmt: off
    model: str | None = option(
        None, text("a folder or a model id"), "model",
        "a checkpoint folder, a .gguf file, or a model id such as Qwen/Qwen3-0.6B",
        unset="the built-in model, a small one that needs no download",
    )
    model_source: ModelSource = option(
        "huggingface", one_of(ModelSource), "model", "where model ids are fetched from"
    )
    dtype: DTypeName = option(
        "auto", one_of(DTypeName), "model",
        "number format of weights and KV cache; auto is the checkpoint's; the log says what it "
        "costs on a CPU without instructions for it",
    )
    kv_cache_dtype: KVCacheDType = option(
        "auto", one_of(KVCacheDType), "model",
        "number format of the KV cache; auto is that of --dtype. fp8 (e4m3, with the checkpoint's "
        "scales if it has them) and int8 (a scale for each token and head) round keys and values, "
        "and take half the memory of bfloat16",
    )
    quantization: Quantization | None = option(
        None, one_of(Quantization), "model",
        "quantise a plain checkpoint's linear layers while loading: fp8 with a scale for each "
        "block of 128 x 128, int8 for each row, int4 with a scale and a zero point for each group "
        "of inputs and int8 where that matters most; on a CPU also the LM head, as int8. It saves "
        "memory; docs/quantization.md says where it costs time",
    )
    lora: Any = option(
        None, _ADAPTERS, "model",
        "a LoRA adapter in PEFT's format, which requests choose by the model NAME; give the flag "
        "once for each", repeats=True,
    )
    max_loras: int = option(
        8, whole(1, 256), "model", "LoRA adapters on the device at one time; the others wait"
    )
    max_lora_rank: int | None = option(
        None, whole(1, 128), "model", "the largest rank of a LoRA adapter",
        unset="that of the --lora adapters; 16 without any",
    )
    page_size: int = option(16, whole(1, 1024), "scheduling", "tokens per page of the KV cache")
    cache: CacheKind = option(
        "radix", one_of(CacheKind), "scheduling",
        "radix reuses the KV of equal prompt prefixes, naive reuses nothing",
    )
    max_prefill_length: int | None = option(
        None, whole(1), "scheduling",
        "prompt tokens computed in one step at most; --max-stall-ms allows fewer beside running "
        "streams", unset="the size with the best rate: 8192 on a GPU, 256 on a CPU",
    )
    drafts: str = option(
        "auto", _DRAFTS, "scheduling",
        "guess next tokens and let a step confirm several of them, where that is predicted to be "
        "faster: grammar guesses what a schema or grammar forces, tree what followed in an earlier "
        "request, ngram what followed the same three tokens before. Answers do not change. auto is "
        "all of these on a CPU, and none on a GPU. mtp, which auto leaves out, is the checkpoint's "
        "layer of multi-token prediction",
        metavar="NAMES",
    )
    draft_model: str | None = option(
        None, text("a folder or a model id"), "scheduling",
        "a small model of the same vocabulary that guesses the next tokens of the served one, on a "
        "CPU; its drafter, draft, is added to those of --drafts",
        metavar="PATH_OR_ID", unset="none",
    )
    max_running_requests: int = option(
        256, whole(1), "scheduling", "requests computed together at most"
    )
    max_seq_len: int | None = option(
        None, whole(2), "scheduling", "tokens of prompt and answer together at most",
        unset="the checkpoint's context; with longrope (Phi-3.5, Phi-4-mini) its original one",
    )
    device: DeviceName = option(
        "auto", one_of(DeviceName), "engine", "what computes; auto takes the best that is there"
    )
    attn: str = option(
        "auto", _ATTENTION, "engine",
        "attention backend. torch is the plain reference; cpu is the compiled kernel of a CPU; "
        "triton and fa (FlashAttention 3, on Hopper, package sglang-kernel) are for a GPU. Two "
        "names are one for prompts, which may be fa2 (FlashAttention 2, which comes with torch; "
        "where 3 does not run, fa means fa2) or fi (FlashInfer), and one for decode, which may be "
        "trtllm (TensorRT-LLM). auto is the fastest that works here: cpu or torch on a CPU, triton "
        "or fa on a GPU", metavar="NAME[,NAME]",
    )
    memory_ratio: float | None = option(
        None, _RATIO, "engine",
        "share of the free memory that weights, activations and KV cache together may use, above 0 "
        "and at most 1", unset="0.9 on a GPU; 0.5 on a CPU, and at most a quarter of the "
        "machine's memory for the KV cache",
    )
    num_pages: int | None = option(
        None, whole(1), "engine", "pages of the KV cache, instead of --memory-ratio",
        unset="from --memory-ratio",
    )
    threads: int | None = option(
        None, whole(1, 4096), "engine", "threads that a CPU's steps run on, for each rank",
        unset="the cores that this process may use, or one where that is faster",
    )
    cuda_graph_max_bs: int = option(
        256, whole(0), "engine",
        "steps of up to N decoding requests are replayed, as CUDA graphs or on a CPU; 0 for none"
    )
    dummy_weight: bool = option(
        False, SWITCH, "engine",
        "random weights instead of the checkpoint's, to measure speed; the folder needs "
        "config.json and a tokenizer",
    )
    tp: int = option(
        1, whole(1, 1024), "many devices",
        "tensor parallelism: N processes share each layer of the model, each on a GPU of its own; "
        "on a CPU they share the cores; at most as many as the model has query heads",
    )
    ep: bool = option(
        False, SWITCH, "many devices",
        "expert parallelism: the --tp ranks share the experts of a mixture, not each expert's "
        "columns; for models that have experts",
    )
    disable_pynccl: bool = option(
        False, SWITCH, "many devices",
        "leave all collectives between GPUs to torch.distributed: the same tokens, slower",
    )
    # fmt: on
    rank: int = 0
    store: str = ""

    @property
    def loras(self) -> dict[str, str]:
        """`lora` as a mapping: a name -> the adapter's folder, or its id until it was fetched."""
        return dict(self.lora or {})

    @property
    def num_slots(self) -> int:
        """The adapters that the device holds; 0 without adapters."""
        return self.max_loras if self.lora else 0

    @property
    def draft_names(self) -> str:
        """The drafters of this engine: those of `--drafts` and the draft model's, or "off" where
        another option excludes them."""
        return with_draft_model(self.drafts, self.draft_model)

    @property
    def mtp(self) -> bool:
        """See `minisgl.models.ModelConfig`."""
        return MTP in self.draft_names.split(",")

    @property
    def folder(self) -> Path:
        """The checkpoint on disk. Only once the model was fetched."""
        return Path(self.model) if self.model else model_path()

    @property
    def draft_folder(self) -> Path:
        """The draft model's checkpoint on disk. Only once it was fetched."""
        return Path(self.draft_model or "")

    @property
    def local_ranks(self) -> range:
        """The ranks on this machine."""
        return range(self.tp)

    @property
    def num_local(self) -> int:
        """The number of ranks on each machine."""
        return len(self.local_ranks)

    def __post_init__(self) -> None:
        for name, (default, about) in options_of(type(self)).items():
            value = getattr(self, name)
            if value is not None or default is not None:
                check_option(name, value, about.rule)
        if self.num_pages is not None and self.memory_ratio is not None:
            raise ConfigError(
                "--num-pages and --memory-ratio both size the KV cache: give one of them"
            )
        if self.mtp and self.num_slots:
            raise ConfigError(
                "--drafts mtp guesses for the model without adapters: leave out mtp, or adapters"
            )
        if self.draft_model is None:
            if DRAFT in self.draft_names.split(","):
                raise ConfigError("--drafts draft needs a draft model: add --draft-model")
        elif self.mtp or self.num_slots:
            other = "--drafts mtp" if self.mtp else "adapters"
            raise ConfigError(f"--draft-model does not go with {other}; leave one of them out")
