"""Ctrl-C, SIGTERM and SIGHUP at moments when an exception would be lost."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time

import pytest

from minisgl.runtime.signals import Signals, held


def hold(seen: list[str]) -> None:
    with held():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.05)
        seen.append("the end of the block")


def test_a_signal_is_held_until_the_block_ends() -> None:
    seen: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        hold(seen)
    assert seen == ["the end of the block"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_signal_that_another_thread_takes_is_held() -> None:
    ended, seen = threading.Event(), list[str]()
    other = threading.Thread(target=ended.wait)
    other.start()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        hold(seen)  # what it raises at its end is blocked here
        assert seen == ["the end of the block"]
        with pytest.raises(KeyboardInterrupt):
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        ended.set()
        other.join()


def test_check_raises_after_a_dropped_interrupt() -> None:
    with Signals() as signals:
        signals.check()
        with contextlib.suppress(KeyboardInterrupt):  # as C code may
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signals.check()


class Interrupted:
    """An object that a signal meets in its `__del__`."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


def test_a_lost_interrupt_is_raised_again(capfd: pytest.CaptureFixture[str]) -> None:
    hook = sys.unraisablehook
    with Signals(), pytest.raises(KeyboardInterrupt):
        threading.Event().wait(60 * isinstance(Interrupted(), Interrupted))
    assert sys.unraisablehook is hook
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("before", [signal.SIG_DFL, signal.SIG_IGN])
def test_a_hang_up_counts_once_and_only_if_it_was_not_ignored(before: signal.Handlers) -> None:
    ours, seen = signal.signal(signal.SIGHUP, before), list[str]()
    try:
        with Signals() as signals:
            signals.first = lambda: seen.append("first")
            for _ in range(2):
                signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == before
    finally:
        signal.signal(signal.SIGHUP, ours)
    assert seen == (["first"] if before == signal.SIG_DFL else [])


def test_held_does_nothing_in_other_threads() -> None:
    seen: list[str] = []

    def work() -> None:
        with held():
            seen.append("ran")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == ["ran"]
