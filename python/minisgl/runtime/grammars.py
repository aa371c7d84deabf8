"""The grammars of an engine's requests: when one is compiled, its request may start."""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import Future
from pathlib import Path

from minisgl.core import Failed
from minisgl.core.req import Masker
from minisgl.errors import RequestError
from minisgl.grammar.maskers import Maskers
from minisgl.message import AbortMsg, CompiledMsg, UserMsg
from minisgl.scheduler import SchedulerConfig
from minisgl.tokenizer.tokenizer import Tokenizer, load_tokenizer

Post = Callable[[CompiledMsg | AbortMsg], None]


class Grammars:
    """Makes the maskers of one rank. Mutable: it has a thread, which compiles.

    post: called in the thread. Rank 0's sends a message to its scheduler's inbox, from where every
    rank gets it in the same turn; those of other ranks do nothing.
    """

    def __init__(
        self,
        tokenizer: Callable[[], Tokenizer],
        vocab_size: int,
        eos_ids: Collection[int],
        post: Post,
    ) -> None:
        """tokenizer: called once, in the thread. The others as in `Maskers`."""
        self._maskers = Maskers(lambda: tokenizer().to_json(), vocab_size, eos_ids)
        self._post = post

    def prepare(self) -> Future[object]:
        """Read the vocabulary now, in the thread, and not with the first grammar."""
        return self._maskers.prepare()

    def create(self, message: UserMsg) -> Masker | None:
        """Return the masker of a request and compile its grammar, None if it has no grammar."""
        if not message.grammar:
            return None

        def on_compiled(error: RequestError | None) -> None:
            uid = message.uid
            self._post(
                AbortMsg(uid=uid, because=Failed.of(uid, error)) if error else CompiledMsg(uid=uid)
            )

        return self._maskers.create(message.grammar, on_compiled)

    def close(self) -> None:
        """Wait for the grammar that is being compiled; after that nothing is posted."""
        self._maskers.close()


def grammars_of(folder: Path, config: SchedulerConfig, post: Post) -> Grammars:
    """folder: the checkpoint's, whose tokenizer the first grammar needs."""
    return Grammars(lambda: load_tokenizer(folder), config.vocab_size, config.eos_ids, post)
