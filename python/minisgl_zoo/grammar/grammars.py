"""Makes the maskers of requests with a grammar. When it is compiled, the request may start."""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import Future

from minisgl.core import Failed
from minisgl.core.req import Masker
from minisgl.errors import RequestError
from minisgl.message import AbortMsg, CompiledMsg, UserMsg
from minisgl.runtime.grammars import Post
from minisgl.tokenizer.tokenizer import Tokenizer
from minisgl_zoo.grammar.maskers import Maskers


class Grammars:
    """The maskers of one rank. Mutable: a thread compiles.

    post: called in the thread with a message for the scheduler. On rank 0 it sends the message to
    its inbox, so every rank gets it in the same turn; on other ranks it does nothing.
    """

    def __init__(
        self,
        tokenizer: Callable[[], Tokenizer],
        vocab_size: int,
        eos_ids: Collection[int],
        post: Post,
    ) -> None:
        """tokenizer: called once, in the thread. vocab_size, eos_ids: see `Maskers`."""
        self._maskers = Maskers(lambda: tokenizer().to_json(), vocab_size, eos_ids)
        self._post = post

    def prepare(self) -> Future[object]:
        """Let the thread read the vocabulary now instead of with the first grammar."""
        return self._maskers.prepare()

    def create(self, message: UserMsg) -> Masker | None:
        """Return the masker of a request, and let the thread compile its grammar. None if it has
        none."""
        if not message.grammar:
            return None

        def on_compiled(error: RequestError | None) -> None:
            uid = message.uid
            self._post(
                AbortMsg(uid=uid, because=Failed.of(uid, error)) if error else CompiledMsg(uid=uid)
            )

        return self._maskers.create(message.grammar, on_compiled, key=message.share.key)

    def close(self) -> None:
        """Wait for the grammar that is being compiled. After that `post` is not called."""
        self._maskers.close()
