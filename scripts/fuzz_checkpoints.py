"""The targets of `fuzz.py` that read files of a checkpoint; `fuzz_targets.py` has the others."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from minisgl.builtin import model_path
from minisgl.errors import ConfigError, EngineError, RequestError
from minisgl.models.loading.reading import read_config
from minisgl.models.registry import spec_of

Target = Callable[[bytes], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fuzz:
    """seeds: inputs to begin with. words: pieces that inputs are likely to need."""

    run: Target
    seeds: Callable[[], list[bytes]]
    words: tuple[str, ...] = ()


@cache
def _folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="minisgl-fuzz-"))


def weights(data: bytes) -> None:
    """model.safetensors: its header, then each tensor."""
    from minisgl.models.loading.weight import Checkpoint

    (_folder() / "model.safetensors").write_bytes(data)
    try:
        checkpoint = Checkpoint(_folder())
        for name in checkpoint.names:
            checkpoint.shape(name), checkpoint.dtype(name)
    except ConfigError:
        pass


def _weight_seeds() -> list[bytes]:
    header = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"__metadata__":{"x":"y"}}'
    return [len(header).to_bytes(8, "little") + header + bytes(8)]


def configs(data: bytes) -> None:
    """config.json, up to the shapes of the model that it describes."""

    (_folder() / "config.json").write_bytes(data)
    try:
        config = read_config(_folder())
        if config.num_layers < 100:
            spec_of(config)
    except ConfigError:
        pass


def _config_seeds() -> list[bytes]:
    return [(Path(model_path()) / "config.json").read_bytes()]


def tokenizers(data: bytes) -> None:
    """tokenizer.json (first byte even) or tokenizer_config.json, then a text there and back."""
    from minisgl.tokenizer import load_tokenizer

    if not data:
        return
    names, source = ("tokenizer.json", "tokenizer_config.json"), Path(model_path())
    for index, name in enumerate(names):
        is_given = index == data[0] % 2
        content = data[1:] if is_given else (source / name).read_bytes() if index else _SMALL
        (_folder() / name).write_bytes(content)
    try:
        tokenizer = load_tokenizer(_folder())
    except ConfigError:
        return
    ids = tokenizer.encode("Hi <|im_end|> 1")
    stream = tokenizer.stream(skip_special_tokens=False)
    assert "".join([*map(stream.feed, ids), stream.flush()]) == tokenizer.decode(
        ids, skip_special_tokens=False
    )


_SMALL: Final = (
    b'{"version":"1.0","added_tokens":[{"id":3,"content":"<|im_end|>","special":true,'
    b'"single_word":false,"lstrip":false,"rstrip":false,"normalized":false}],"normalizer":null,'
    b'"pre_tokenizer":{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,'
    b'"use_regex":true},"post_processor":null,"decoder":{"type":"ByteLevel",'
    b'"add_prefix_space":true,"trim_offsets":true,"use_regex":true},"model":{"type":"BPE",'
    b'"dropout":null,"unk_token":null,"vocab":{"H":0,"i":1,"Hi":2},"merges":[["H","i"]]}}'
)


def _tokenizer_seeds() -> list[bytes]:
    config = (Path(model_path()) / "tokenizer_config.json").read_bytes()
    return [b"\0" + _SMALL, b"\1" + config[:1500], b'\1{"eos_token": {"content": "<|im_end|>"}}']


def ggufs(data: bytes) -> None:
    """A GGUF file: metadata, tensors' directory, and the checkpoint folder made from it."""
    from minisgl_zoo.gguf.folder import gguf_folder

    path = _folder() / "x.gguf"
    path.write_bytes(data)
    os.environ.setdefault("MINISGL_CACHE_DIR", str(_folder() / "cache"))
    with contextlib.suppress(ConfigError):
        gguf_folder(path)


def _gguf_seeds() -> list[bytes]:
    import gguf
    import numpy as np

    path = _folder() / "seed.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_embedding_length(8)
    writer.add_head_count(1)
    writer.add_token_list(["a", "b"])
    writer.add_tensor("token_embd.weight", np.zeros((2, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return [path.read_bytes()]


def templates(data: bytes) -> None:
    """A chat template, over messages with every kind of value."""
    from minisgl.tokenizer.template import ChatTemplate

    source = data.decode(errors="ignore")
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [_CALL]},
        {"role": "tool", "content": "1", "tool_call_id": "c"},
    ]
    try:
        template = ChatTemplate({"default": source}, {"eos_token": "</s>"})
        template.render(messages, {"tools": [{"type": "function", "function": {"name": "f"}}]})
    except (RequestError, ConfigError, EngineError):
        pass


_CALL: Final = {
    "id": "c",
    "type": "function",
    "function": {"name": "f", "arguments": '{"a": 1}'},
}


def _template_seeds() -> list[bytes]:
    folder = Path(__file__).parents[1] / "tests/templates"
    files: Iterator[Path] = folder.rglob("*.jinja")
    small = sorted(files, key=lambda path: path.stat().st_size)[:6]
    hostile = "{% for i in range(9) %}{{ loop.index ** 9 }}{{ '%9d' % i }}{% endfor %}"
    return [hostile.encode(), *(path.read_bytes() for path in small)]


OF_CHECKPOINTS: Final[dict[str, Fuzz]] = {
    "weights": Fuzz(run=weights, seeds=_weight_seeds, words=('"dtype"', '"shape"', "BF16")),
    "configs": Fuzz(run=configs, seeds=_config_seeds, words=('"rope_scaling"', '"Qwen3', "null")),
    "tokenizers": Fuzz(run=tokenizers, seeds=_tokenizer_seeds, words=('"type"', '"Split"')),
    "ggufs": Fuzz(run=ggufs, seeds=_gguf_seeds, words=("GGUF", "general.architecture", "llama")),
    "templates": Fuzz(
        run=templates,
        seeds=_template_seeds,
        words=("{{", "}}", "{%", "%}", "for", "messages", "|tojson", "**", "__class__", "range("),
    ),
}
