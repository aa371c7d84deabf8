"""llama.cpp beside our engines: a file of random weights, and greedy decode through its batch API.

`pip install llama-cpp-python` builds llama.cpp for this machine with CMake. The bfloat16 file is
written with the package `gguf`; llama.cpp's own quantiser makes the others from it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import gguf
import llama_cpp as api
import numpy as np
import torch

STD: Final = 0.02  # random rows; they are repeated, and cost as much as others
DRAWN_ROWS: Final = 256
MOST_TOKENS: Final = 1024  # tokens of the cache, and of a call
MOST_SEQUENCES: Final = 32
FILE_TYPES: Final = {
    "q8_0": api.LLAMA_FTYPE_MOSTLY_Q8_0,
    "q4_0": api.LLAMA_FTYPE_MOSTLY_Q4_0,
    "q4_k_m": api.LLAMA_FTYPE_MOSTLY_Q4_K_M,
}


@api.llama_log_callback  # type: ignore[untyped-decorator] # no types
def _silent(level: int, text: bytes, data: object) -> None:
    pass


def write_random(path: Path, values: dict[str, Any]) -> None:
    """Write a Qwen3 with tied embeddings in bfloat16. values: the content of config.json."""
    hidden, inner, heads = (
        values["hidden_size"],
        values["intermediate_size"],
        values["num_attention_heads"],
    )
    head_dim, kv_heads = values["head_dim"], values["num_key_value_heads"]
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_context_length(values["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_block_count(values["num_hidden_layers"])
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_freq_base(values["rope_theta"])
    writer.add_layer_norm_rms_eps(values["rms_norm_eps"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_vocab_size(values["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    rng = np.random.default_rng(0)

    def matrix(name: str, rows: int, columns: int) -> None:
        drawn = rng.standard_normal((DRAWN_ROWS, columns), np.float32) * np.float32(STD)
        block = gguf.quants.quantize(drawn, gguf.GGMLQuantizationType.BF16)
        repeated = np.resize(block, (rows, *block.shape[1:]))
        writer.add_tensor(name, repeated, raw_dtype=gguf.GGMLQuantizationType.BF16)

    def norm(name: str, size: int) -> None:
        writer.add_tensor(name, np.ones(size, np.float32))

    matrix("token_embd.weight", values["vocab_size"], hidden)
    norm("output_norm.weight", hidden)
    for layer in range(values["num_hidden_layers"]):
        at = f"blk.{layer}."
        norm(at + "attn_norm.weight", hidden)
        norm(at + "ffn_norm.weight", hidden)
        norm(at + "attn_q_norm.weight", head_dim)
        norm(at + "attn_k_norm.weight", head_dim)
        matrix(at + "attn_q.weight", heads * head_dim, hidden)
        matrix(at + "attn_k.weight", kv_heads * head_dim, hidden)
        matrix(at + "attn_v.weight", kv_heads * head_dim, hidden)
        matrix(at + "attn_output.weight", hidden, heads * head_dim)
        matrix(at + "ffn_gate.weight", inner, hidden)
        matrix(at + "ffn_up.weight", inner, hidden)
        matrix(at + "ffn_down.weight", hidden, inner)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantise(source: Path, target: Path, kind: str, num_threads: int) -> None:
    params = api.llama_model_quantize_default_params()
    params.ftype, params.nthread = FILE_TYPES[kind], num_threads
    failed = api.llama_model_quantize(str(source).encode(), str(target).encode(), params)
    if failed:
        raise RuntimeError(f"llama.cpp did not quantise {source} to {kind}")


class LlamaCpp:
    """One model with its context. Called with prompts [B, T] and the tokens of each answer."""

    def __init__(self, path: Path, num_threads: int) -> None:
        api.llama_log_set(_silent, None)
        self._model = api.llama_model_load_from_file(
            str(path).encode(), api.llama_model_default_params()
        )
        params = api.llama_context_default_params()
        params.n_ctx = params.n_batch = MOST_TOKENS
        params.n_ubatch = 512
        params.n_seq_max = MOST_SEQUENCES
        params.n_threads = params.n_threads_batch = num_threads
        params.kv_unified = True
        self._context = self._model and api.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError(f"llama.cpp does not load {path}")
        self._vocab = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self._model))
        self._batch = api.llama_batch_init(MOST_TOKENS, 0, 1)

    def close(self) -> None:
        api.llama_batch_free(self._batch)
        api.llama_free(self._context)
        api.llama_model_free(self._model)

    def __call__(self, prompts: torch.Tensor, count: int) -> None:
        api.llama_memory_clear(api.llama_get_memory(self._context), False)
        length = prompts.shape[1]
        ids = self._step(
            [
                (token, position, row, position == length - 1)
                for row, prompt in enumerate(prompts.tolist())
                for position, token in enumerate(prompt)
            ]
        )
        for position in range(length, length + count - 1):
            ids = self._step([(token, position, row, True) for row, token in enumerate(ids)])

    def _step(self, tokens: list[tuple[int, int, int, bool]]) -> list[int]:
        """Compute tokens: (id, position, row, whether the next id is wanted). Returns the wanted
        ids."""
        batch = self._batch
        batch.n_tokens = len(tokens)
        for i, (token, position, row, is_wanted) in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, is_wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, row
        if api.llama_decode(self._context, batch):
            raise RuntimeError(f"llama.cpp did not compute {len(tokens)} tokens")
        shape = (sum(is_wanted for *_, is_wanted in tokens), self._vocab)
        first = api.llama_get_logits(self._context)
        logits = np.ctypeslib.as_array(ctypes.cast(first, ctypes.POINTER(ctypes.c_float)), shape)
        ids: list[int] = logits.argmax(-1).tolist()
        return ids


@contextmanager
def llama_engines(
    folder: Path, values: dict[str, Any], num_threads: int
) -> Iterator[dict[str, LlamaCpp]]:
    """Yield loaded models in bf16 and `FILE_TYPES`. Files that `folder` lacks are made in it."""
    plain = folder / "bf16.gguf"
    if not plain.exists():
        write_random(plain, values)
    engines: dict[str, LlamaCpp] = {"llama.cpp bf16": LlamaCpp(plain, num_threads)}
    try:
        for kind in FILE_TYPES:
            path = folder / f"{kind}.gguf"
            if not path.exists():
                quantise(plain, path, kind, num_threads)
            engines[f"llama.cpp {kind}"] = LlamaCpp(path, num_threads)
        yield engines
    finally:
        for engine in engines.values():
            engine.close()
