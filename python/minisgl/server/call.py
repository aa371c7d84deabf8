"""The call: it holds the replies to the prompts of one HTTP request until its handler reads them.

A call ends in one of four ways: all of its prompts finish; one prompt fails, and the others are
aborted; its client disconnects (`Call.abort`); a worker dies (`Frontend.fail_all`), and no new
one takes the call over (`minisgl_gateway.resume`). Later replies are dropped.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Sequence

from minisgl.core import Accepted, Failed, Finished
from minisgl.errors import EngineError, RequestError
from minisgl.message import RequestReply, TextReply


class ClientGone(Exception):
    """The call was aborted, because its client disconnected."""


Replies = list[tuple[int, TextReply | Finished]]
"""The replies since the last wake-up, each with the index of its prompt in the call."""


class Call:
    """The prompts of one HTTP request. Mutable: `Frontend` fills it, one task reads it."""

    def __init__(
        self,
        uids: Sequence[int],
        abort: Callable[[list[int], Exception], None],
        num_choices: int = 1,
    ) -> None:
        self._num_choices = num_choices
        self._indices = {uid: index for index, uid in enumerate(uids)}  # the unfinished prompts
        self._num_prompts = self._num_unaccepted = len(uids)
        self._pending: Replies = []
        self._failure: Exception | None = None
        self._wakeup: asyncio.Future[None] | None = None
        self._abort = abort
        self._is_held = False
        self.num_prompt_tokens = 0  # of the accepted prompts
        self.prompt_ids: dict[int, bytes] = {}  # theirs, by index, if they are asked for
        self.max_tokens = sys.maxsize  # the lowest of the accepted prompts' limits
        # Aborts the call when its client leaves. asyncio has only a weak reference to a task.
        self.watcher: asyncio.Task[None] | None = None

    # --- the reader's side -----------------------------------------------------------------------

    async def accepted(self) -> None:
        """Wait until every prompt is accepted. Raises the error of a refused one, or ClientGone.

        A failure after that is raised here if no text came before it. Otherwise the iteration
        raises it, after the text.
        """
        while self._num_unaccepted and not self._failure:
            await self._wait()
        if self._failure and (self._num_unaccepted or not self._pending):
            raise self._failure

    async def __aiter__(self) -> AsyncIterator[Replies]:
        """Yield batches of replies until every prompt has finished; an empty one after `hold_on`.

        Raises RequestError or EngineError if a prompt fails, ClientGone after `abort`.
        """
        while True:
            if self._pending or self._is_held:
                batch, self._pending, self._is_held = self._pending, [], False
                yield batch
            elif self._failure:
                raise self._failure
            elif not self._indices:
                return
            else:
                await self._wait()

    def abort(self) -> None:
        """Abort the unfinished prompts, which frees their pages. Without any, do nothing."""
        self.fail(ClientGone())

    # --- the frontend's side ---------------------------------------------------------------------

    def deliver(self, reply: RequestReply) -> None:
        """Store a reply for the reader, and wake the reader."""
        if isinstance(reply, TextReply):
            self._pending.append((self._indices[reply.uid], reply))
        elif isinstance(reply, Accepted):
            self._num_unaccepted -= 1
            if reply.prompt_ids:
                self.prompt_ids[self._indices[reply.uid]] = reply.prompt_ids
            self.num_prompt_tokens += reply.num_prompt_tokens
            self.max_tokens = min(self.max_tokens, reply.sampling.max_tokens or self.max_tokens)
        elif isinstance(reply, Finished) and reply.reason != "abort":
            self._pending.append((self._indices.pop(reply.uid), reply))
        else:
            self._end(self._error(self._indices.pop(reply.uid), reply))
        self._wake()

    def rename(self, uid: int, new: int) -> None:
        """Know an unfinished prompt by another uid."""
        self._indices[new] = self._indices.pop(uid)

    def hold_on(self) -> None:
        """Wake the reader, so that it tells the client that the answer will go on."""
        self._is_held = True
        self._wake()

    def fail(self, error: Exception) -> None:
        """End the call with `error`, and abort its unfinished prompts. After the end do nothing."""
        if self._indices:
            self._end(error)

    def _error(self, index: int, reply: Failed | Finished) -> Exception:
        if isinstance(reply, Finished):  # aborted, but not by this call
            return EngineError("the server aborted the request")
        error = reply.to_error()
        index //= self._num_choices
        if (
            self._num_prompts > self._num_choices
            and isinstance(error, RequestError)
            and error.status == 400
        ):
            error.param = f"prompt[{index}]" if error.param == "prompt" else error.param
            error.message = f"prompt[{index}]: {error.message}"
        return error

    def _end(self, error: Exception) -> None:
        uids = list(self._indices)
        self._indices.clear()
        self._failure = error
        self._abort(uids, error)
        self._wake()

    def _wake(self) -> None:
        if self._wakeup is not None and not self._wakeup.done():
            self._wakeup.set_result(None)

    async def _wait(self) -> None:
        self._wakeup = asyncio.get_running_loop().create_future()
        await self._wakeup
