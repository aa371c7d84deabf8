"""`LLM.stream`: one request, whose answer the caller reads while it is computed.

After a turn the loop wakes the readers of streams with news; a `Reader` makes a `Delta` of all that
is new.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator

from minisgl.llm.output import Delta, RequestOutput, fields, parts
from minisgl.llm.session import Call, Session


class Left(Exception):
    """The reader has left the stream."""


class Reader:
    """Cuts the output of a call with one request into deltas. Mutable: it counts what was read."""

    def __init__(self, session: Session, call: Call) -> None:
        self._session, self._call = session, call
        (self._request,) = call.requests
        self._read = (0, 0, 0)  # of each list of the answer

    def begin(self) -> None:
        """Send the request to the loop. Raises ConfigError. After any exception call `leave`."""
        self._session.submit(self._call)

    def news(self) -> tuple[Delta | None, bool]:
        """Return what is new since the last call of this method, if anything, and whether the
        request is over."""
        with self._session.lock:
            return self._delta(), self._call.is_over

    def output(self) -> RequestOutput:
        """Return the output of the request, which is over. Raises its error."""
        return self._call.outputs()[0]

    def leave(self) -> None:
        """Abort the request if it is not over."""
        if not self._call.is_over:
            self._session.abort(self._call, Left())

    def _delta(self) -> Delta | None:
        texts, token_ids, replies = self._call.answers[self._request.uid]
        text, id, reply = self._read
        self._read = len(texts), len(token_ids), len(replies)
        if text == len(texts):
            return None
        new = texts[text:], token_ids[id:], replies[reply:]
        return Delta(**fields(new, self._request.sampling), parts=parts(new))


class Stream(Iterator[Delta | RequestOutput]):
    """The iterator that `LLM.stream` returns. Mutable."""

    def __init__(self, reader: Reader, news: queue.SimpleQueue[None]) -> None:
        """Begin the request. news: gets an item when the reader has news. What fills it must not
        hold this object: a stream that its user drops is deleted, which ends the request."""
        self._reader, self._news = reader, news
        self._is_over = False
        reader.begin()  # if it raises, this object is deleted

    def __next__(self) -> Delta | RequestOutput:
        try:
            while not self._is_over:
                delta, is_over = self._reader.news()
                if delta:
                    return delta
                if is_over:
                    self._is_over = True
                    return self._reader.output()
                self._news.get()
        except KeyboardInterrupt:
            self.close()
            raise
        raise StopIteration

    def close(self) -> None:
        """End the request. The rest of its answer is dropped."""
        if not self._is_over:
            self._is_over = True
            self._reader.leave()

    def __del__(self) -> None:
        self.close()
