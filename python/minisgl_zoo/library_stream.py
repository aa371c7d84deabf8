"""A stream by the library `tokenizers`, for decoders that the core's own streams do not know."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import tokenizers
from tokenizers.decoders import DecodeStream

from minisgl.tokenizer.stream import MakeStream
from minisgl.utils.logger import get_logger

logger = get_logger(__name__)


class LibraryStream:
    """A `DecodeStream`. At the end, `flush` adds the text that it holds back. Mutable."""

    def __init__(self, backend: tokenizers.Tokenizer, skip_ids: frozenset[int]) -> None:
        self._backend = backend
        self._skip_ids = skip_ids
        self._stream = DecodeStream(skip_special_tokens=False)
        self._ids: list[int] = []
        self._length = 0

    def feed(self, token_id: int) -> str:
        if token_id in self._skip_ids:
            return ""
        self._ids.append(token_id)
        with _panics_as_errors():
            text = self._stream.step(self._backend, token_id) or ""
        self._length += len(text)
        return text

    def flush(self) -> str:
        if not self._ids:
            return ""
        with _panics_as_errors():
            whole: str = self._backend.decode(self._ids, skip_special_tokens=False)
        return whole[self._length :]

    def data(self, token_id: int) -> bytes:
        with _panics_as_errors():
            text: str = self._backend.decode([token_id], skip_special_tokens=False)
        return text.encode()


def library_streams(backend: tokenizers.Tokenizer) -> MakeStream:
    """Return what makes the streams of a tokenizer with any decoder."""
    logger.info(
        "the tokenizer has an unusual decoder: the library tokenizers decodes each token, which "
        "takes more time"
    )
    return partial(LibraryStream, backend)


@contextmanager
def _panics_as_errors() -> Iterator[None]:
    """Raise RuntimeError in place of a panic of the library, which is no `Exception`.

    A panic must fail one request, not the process.
    """
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception | KeyboardInterrupt | SystemExit):
            raise
        raise RuntimeError(f"the tokenizers library failed: {error}") from error
