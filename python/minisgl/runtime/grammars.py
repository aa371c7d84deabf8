"""The maskers of requests with a grammar, as a rank sees them: the row `maskers` of `grammars`."""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import Protocol

from minisgl import plugins
from minisgl.core.req import Masker
from minisgl.message import AbortMsg, CompiledMsg, UserMsg
from minisgl.tokenizer.tokenizer import Tokenizer

Post = Callable[[CompiledMsg | AbortMsg], None]


class Grammars(Protocol):
    """The maskers of one rank."""

    def prepare(self) -> Future[object]:
        """Read the vocabulary now, in a thread, instead of with the first grammar."""

    def create(self, message: UserMsg) -> Masker | None:
        """Return the masker of a request, and let a thread compile its grammar. None if it has
        none."""

    def close(self) -> None:
        """Wait for the grammar that is being compiled. After that nothing is posted."""


def create_grammars(
    tokenizer: Callable[[], Tokenizer], vocab_size: int, eos_ids: Collection[int], post: Post
) -> Grammars | None:
    """Return the maskers; None without a package that has them, where grammars are refused.

    tokenizer: called once, in a thread. vocab_size: above every id of the model. post: called in
    the thread with a message for the scheduler, when a request's grammar is compiled or wrong.
    """
    create: Callable[..., Grammars] | None = plugins.find("grammars", "maskers")
    return create(tokenizer, vocab_size, eos_ids, post) if create else None
