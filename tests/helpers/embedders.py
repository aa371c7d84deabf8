"""Tiny embedders and rerankers with random weights, saved as their publishers spell them."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    ModernBertConfig,
    MPNetConfig,
    NomicBertConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    XLMRobertaConfig,
)

from helpers.model_harness import make_reference

SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
TEXTS = [
    "What is the capital of China?",
    "a",
    "Beijing is the capital of China, and Paris that of France. " * 5,
    "Gravity pulls two bodies together. 你好，世界",
    "the same beginning, then something else",
    "the same beginning, then another thing",
]
QUERY = (
    "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery:"
)
"""The prompt of Qwen3-Embedding's config_sentence_transformers.json."""
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% endif %}{% endif %}"
)
"""What Qwen3's template writes for turns without tools."""

IDENTITY = "torch.nn.modules.linear.Identity"
FLAGS = {
    "cls": "cls_token", "mean": "mean_tokens", "max": "max_tokens", "lasttoken": "lasttoken",
    "mean_sqrt_len_tokens": "mean_sqrt_len_tokens", "weightedmean": "weightedmean_tokens",
}  # fmt: skip
Config = dict[str, Any]


def older(mode: str) -> Config:
    """Return 1_Pooling/config.json as Qwen3-Embedding and most released embedders have it."""
    flags = {f"pooling_mode_{flag}": name == mode for name, flag in FLAGS.items()}
    return {"word_embedding_dimension": 48, **flags, "include_prompt": True}


def later(mode: str) -> Config:
    """Return it as sentence-transformers 5.4 and later save it."""
    return {"embedding_dimension": 48, "pooling_mode": mode, "include_prompt": True}


def tokenizer_with(folder: Path, *, eos: bool) -> None:
    """Write a byte-level tokenizer that appends <|endoftext|>, as Qwen3-Embedding's does, or adds
    nothing, as Qwen3-Reranker's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*TEXTS, "yes no yes no yes no", QUERY] * 3, trainer)
    if eos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="$A <|endoftext|>", special_tokens=[("<|endoftext|>", 0)]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": CHATML,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


CONFIGS: dict[str, PreTrainedConfig] = {
    "qwen3": Qwen3Config(**SIZES, head_dim=20, vocab_size=401, tie_word_embeddings=True),
    "mistral": MistralConfig(**SIZES, vocab_size=401, sliding_window=16),
    "qwen2": Qwen2Config(**SIZES, vocab_size=401),
    "llama": LlamaConfig(**SIZES, vocab_size=401),
}


_SMALL: dict[str, Any] = {**SIZES, "vocab_size": 200}
ENCODERS: dict[str, PreTrainedConfig] = {
    "bert": BertConfig(**_SMALL | {"max_position_embeddings": 32}),
    "xlm-roberta": XLMRobertaConfig(
        **_SMALL | {"max_position_embeddings": 34, "type_vocab_size": 1, "pad_token_id": 1}
    ),
    "mpnet": MPNetConfig(**_SMALL | {"max_position_embeddings": 34}),
    "nomic": NomicBertConfig(**_SMALL | {"max_position_embeddings": 32}),
    "modernbert": ModernBertConfig(
        **_SMALL
        | {"max_position_embeddings": 32, "num_hidden_layers": 4, "local_attention": 6}
        | {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2}
        | {"sep_token_id": 3, "classifier_pooling": "mean"},
    ),
    "gemma": Gemma3TextConfig(
        **_SMALL
        | {"max_position_embeddings": 64, "num_key_value_heads": 1, "head_dim": 16}
        | {"num_hidden_layers": 7, "sliding_window": 8, "query_pre_attn_scalar": 16}
        | {"use_bidirectional_attention": True, "eos_token_id": 3},
    ),
}


def save_embedder(
    folder: Path,
    family: str = "qwen3",
    *,
    pooling: Config,
    architecture: str | None = None,
    normalises: bool = True,
    eos: bool = True,
) -> Path:
    """Write an embedder: tensors without "model.", and sentence-transformers' files.

    architecture: Qwen3-Embedding's config.json names Qwen3ForCausalLM, E5-Mistral's MistralModel.
    """
    folder.mkdir(parents=True, exist_ok=True)
    whole = make_reference(CONFIGS[family])
    whole.model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    if architecture:
        config["architectures"] = [architecture]
        (folder / "config.json").write_text(json.dumps(config))
    tokenizer_with(folder, eos=eos)
    _write_modules(folder, pooling, normalises=normalises)
    return folder


def save_encoder(
    folder: Path,
    kind: str = "bert",
    *,
    pooling: Config | None = None,
    normalises: bool = True,
    labels: int = 0,
    dense: Sequence[int] = (),
    **sizes: int,
) -> Path:
    """Write an encoder of 32 positions with a WordPiece tokenizer. kind: of `ENCODERS`. pooling:
    None for a checkpoint without sentence-transformers' files. labels: of a cross-encoder. dense:
    sizes of what the layers behind the pooling return."""
    folder.mkdir(parents=True, exist_ok=True)
    config = copy.deepcopy(ENCODERS[kind])
    config.update(sizes)
    if labels:
        config.num_labels = labels
    with torch.random.fork_rng():
        torch.manual_seed(7)
        make = AutoModelForSequenceClassification if labels else AutoModel
        model = make.from_config(config).eval()
    for parameter in model.parameters():  # norms and biases are 1 and 0 in a new model
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=torch.manual_seed(7))
    model.save_pretrained(folder)
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=config.vocab_size, special_tokens=special, show_progress=False
    )
    tokenizer.train_from_iterator([*TEXTS, QUERY] * 3, trainer)
    ends = ("[SEP]", 3), ("[CLS]", 2)
    is_bert = kind == "bert"  # the others have two separators in a pair, and no types
    tokenizer.post_processor = (
        processors.BertProcessing(*ends) if is_bert else processors.RobertaProcessing(*ends)
    )
    tokenizer.enable_truncation(8)  # as released files have it, and as nobody may follow it
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {f"{token[1:-1].lower()}_token": token for token in special}
    # Transformers gives token types to models whose tokenizer has this class.
    kind_of = "BertTokenizer" if is_bert else "PreTrainedTokenizerFast"
    values = {"tokenizer_class": kind_of, "model_max_length": 32, **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
    if pooling:
        _write_modules(folder, pooling, normalises=normalises, dense=(config.hidden_size, *dense))
    return folder


def _write_modules(
    folder: Path, pooling: Config, *, normalises: bool, dense: Sequence[int] = ()
) -> None:
    """Write sentence-transformers' files."""
    kinds = [
        "Transformer",
        "Pooling",
        *["Dense" for _ in pairwise(dense)],
        *["Normalize"] * normalises,
    ]
    modules = [
        {
            "idx": index,
            "name": str(index),
            "path": f"{index}_{kind}" if index else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for index, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    for index, (size, out) in enumerate(pairwise(dense), 2):
        (folder / f"{index}_Dense").mkdir()
        config = {
            "in_features": size,
            "out_features": out,
            "bias": False,
            "activation_function": IDENTITY,
        }
        (folder / f"{index}_Dense" / "config.json").write_text(json.dumps(config))
        weight = torch.randn(out, size, generator=torch.manual_seed(index))
        save_file({"linear.weight": weight}, folder / f"{index}_Dense" / "model.safetensors")
    saved = {
        "prompts": {"query": QUERY, "document": ""},
        "default_prompt_name": None,
        "similarity_fn_name": "cosine",
    }
    (folder / "config_sentence_transformers.json").write_text(json.dumps(saved))


def save_reranker(folder: Path) -> Path:
    """Write a causal model with Qwen3's turns, as Qwen3-Reranker is one."""
    folder.mkdir(parents=True, exist_ok=True)
    make_reference(CONFIGS["qwen3"]).save_pretrained(folder)
    tokenizer_with(folder, eos=False)
    return folder


def embeddings_of(
    folder: Path, texts: Sequence[str], pooling: str, *, normalises: bool = True
) -> np.ndarray[Any, Any]:
    """Return transformers' embeddings, text by text, in float32. pooling: lasttoken, mean, cls."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    rows = []
    for text in texts:
        with torch.inference_mode():
            ids = tokenizer(text, truncation=False, padding=False, return_tensors="pt")["input_ids"]
            x = model(input_ids=ids).last_hidden_state[0]
        row = {"lasttoken": x[-1], "mean": x.mean(0), "cls": x[0]}[pooling]
        for layer in sorted(folder.glob("*_Dense")):
            row = load_file(layer / "model.safetensors")["linear.weight"] @ row
        rows.append((row / row.norm() if normalises else row).numpy())
    return np.stack(rows)


def scores_of(folder: Path, query: str, documents: Sequence[str], task: str) -> list[float]:
    """Return the scores of the code on Qwen3-Reranker's model card."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    before = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query "
        'and the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
        "<|im_start|>user\n"
    )
    after = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    labels = [tokenizer.convert_tokens_to_ids(word) for word in ("no", "yes")]
    scores = []
    for document in documents:
        text = f"<Instruct>: {task}\n<Query>: {query}\n<Document>: {document}"
        ids = [id for part in (before, text, after) for id in tokenizer(part)["input_ids"]]
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0, -1]
        scores.append(float(torch.log_softmax(logits[labels], 0)[1].exp()))
    return scores


def pair_logits(folder: Path, pairs: Sequence[tuple[str, str]]) -> torch.Tensor:
    """Return what transformers' class for sequence classification makes of each pair, alone. In a
    list, because a pair without a document is else no pair there."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        return torch.cat(
            [
                model(
                    **tokenizer([pair], truncation=False, padding=False, return_tensors="pt")
                ).logits[0]
                for pair in pairs
            ]
        )


def cosines(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the cosine of each row of `a` with the same row of `b`."""
    norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    return np.asarray((a * b).sum(1) / norms)
