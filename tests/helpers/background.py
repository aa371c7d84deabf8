"""Calls in the background."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


# --- joining -------------------------------------------------------------------------------------


class Background:
    """Runs calls in daemon threads, which a failed test does not wait for."""

    def submit(self, call: Callable[..., T], *args: Any) -> Future[T]:
        future: Future[T] = Future()

        def work() -> None:
            try:
                future.set_result(call(*args))
            except Exception as error:
                future.set_exception(error)

        threading.Thread(target=work, daemon=True).start()
        return future
