"""A checkpoint's tokenizer, from its tokenizer.json.

The Rust library `tokenizers` does the work, as it does inside transformers. Importing transformers
takes seconds, so this module does what transformers adds to a folder's tokenizer.json: special
tokens that only tokenizer_config.json names, and no truncation. One difference is deliberate: text
is never "cleaned up" (spaces before punctuation removed), which cannot be done token by token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from minisgl import plugins
from minisgl.errors import CheckpointError
from minisgl.tokenizer.stream import TextStream, stream_factory
from minisgl.utils.hf import mending, read_json
from minisgl.utils.logger import get_logger

logger = get_logger(__name__)

Convert = Callable[[Path, dict[str, Any]], tuple[tokenizers.Tokenizer, dict[str, Any]]]
"""The row `convert` of the table `tokenizers`: makes the tokenizer of a folder without a
tokenizer.json, and tokenizer_config.json with its special tokens. Raises CheckpointError and
ConfigError."""

_NAMED = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))


class Tokenizer:
    """Text to ids and back.

    special_tokens: the text of each named one ({"eos_token": "</s>", ...}). special_ids: every id
    that `skip_special_tokens` leaves out. vocab_size: above every id, those of added tokens
    included. backend: the library's tokenizer; nothing changes it.
    """

    def __init__(self, backend: tokenizers.Tokenizer, config: dict[str, Any]) -> None:
        """config: content of tokenizer_config.json. This changes `backend`."""
        backend.no_truncation()
        backend.no_padding()
        added = config.get("added_tokens_decoder") or {}
        backend.add_tokens([_added_token(added[token_id]) for token_id in sorted(added, key=int)])
        self.special_tokens = {name: _text(config[name]) for name in _NAMED if config.get(name)}
        extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
        texts = [*self.special_tokens.values()]
        texts += [_text(token) for token in (extra.values() if isinstance(extra, dict) else extra)]
        backend.add_special_tokens(
            [tokenizers.AddedToken(text, special=True, normalized=False) for text in texts]
        )

        self.backend = backend
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        # A token of `texts` is special, even if tokenizer.json adds it as a plain one.
        self.special_ids = frozenset(
            token_id
            for token_id, token in backend.get_added_tokens_decoder().items()
            if token.special or token.content in texts
        )
        self.bos_token_id = self._named_id("bos_token")
        self.eos_token_id = self._named_id("eos_token")
        self._open = stream_factory(backend)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of `text`. add_special_tokens: with the checkpoint's BOS or EOS token."""
        # "fast" leaves out the offsets, which take half of the time.
        [encoding] = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`. Bytes that are not UTF-8 become U+FFFD. Unknown ids have no
        text."""
        return str(self.backend.decode(ids, skip_special_tokens=skip_special_tokens))

    def stream(
        self, *, skip_special_tokens: bool = True, shown: frozenset[int] = frozenset()
    ) -> TextStream:
        """Return a stream that decodes the tokens of one request one by one. shown: special tokens
        that are not skipped."""
        return self._open(self.special_ids - shown if skip_special_tokens else frozenset())

    def to_json(self) -> str:
        """Return the content of tokenizer.json, with the added tokens of all files."""
        return str(self.backend.to_str())

    def _named_id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self.backend.token_to_id(text)


def load_tokenizer(folder: Path) -> Tokenizer:
    """Return the tokenizer of the checkpoint in `folder`.

    Without a tokenizer.json, transformers converts another format (sentencepiece, for example).
    Raises CheckpointError if there is no tokenizer or it does not load, ConfigError if transformers
    is needed and missing.
    """
    config = load_tokenizer_config(folder)
    path = folder / "tokenizer.json"
    if not path.is_file():
        convert: Convert | None = plugins.find("tokenizers", "convert")
        if convert is None:
            raise CheckpointError(
                f"{folder} has no tokenizer.json, and converting another format needs minisgl_zoo, "
                "which is not installed here"
            )
        return Tokenizer(*convert(folder, config))
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more precise
        raise CheckpointError(
            f"{path} does not load as a tokenizer ({error}); {mending(path)}"
        ) from error
    try:
        return Tokenizer(backend, config)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{folder / 'tokenizer_config.json'} names special tokens in an unknown form: {error!r}"
        ) from error


def warn_of_unknown_ids(tokenizer: Tokenizer, folder: Path) -> None:
    """Warn if the tokenizer has ids that the model in `folder` has no embedding for. A request that
    needs such an id is refused later."""
    known = read_json_object(folder / "config.json").get("vocab_size")
    if type(known) is int and known < tokenizer.vocab_size:
        logger.warning(
            "the tokenizer in %s has %s tokens, but by config.json the model has only %s: a text "
            "that needs one of the other tokens will be refused",
            folder,
            f"{tokenizer.vocab_size:,}",
            f"{known:,}",
        )


def load_tokenizer_config(folder: Path) -> dict[str, Any]:
    """Return tokenizer_config.json, with the fields of special_tokens_map.json if the checkpoint is
    an old one, which needs them."""
    config = read_json_object(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:
        config |= read_json_object(folder / "special_tokens_map.json")
    return config


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in the file, {} if there is no file. Raises CheckpointError if the
    file holds no JSON object."""
    return read_json(path) if path.exists() else {}


def _text(token: Any) -> str:
    """Return the text of a token, which a configuration has as a string or as an object."""
    return str(token["content"] if isinstance(token, dict) else token)


def _added_token(token: Any) -> tokenizers.AddedToken:
    if not isinstance(token, dict):
        return tokenizers.AddedToken(str(token))
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return tokenizers.AddedToken(
        token["content"], **{flag: token[flag] for flag in flags if flag in token}
    )
