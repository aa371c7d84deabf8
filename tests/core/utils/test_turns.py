"""Keys take turns, in queues and in threads."""

from __future__ import annotations

import threading
from functools import partial

import pytest

from minisgl.utils.turns import TurnQueue, TurnThreads

WAIT_S = 60


def test_keys_take_turns_and_keep_their_order() -> None:
    queue: TurnQueue[str] = TurnQueue()
    for item in ("a1", "a3", "b1", "c1", "b2"):
        queue.put(item[0], item)
    assert [queue.take(busy={"a"}), queue.take()] == [("b", "b1"), ("a", "a1")]
    queue.put("d", "d1")
    taken = [queue.take() for _ in range(5)]
    assert taken == [("c", "c1"), ("b", "b2"), ("a", "a3"), ("d", "d1"), None]
    assert not queue


def test_one_thread_serves_keys_in_turn() -> None:
    threads, done = TurnThreads("test"), list[str]()
    begun, go_on = threading.Event(), threading.Event()

    def first() -> None:
        begun.set()
        go_on.wait(WAIT_S)

    threads.submit("a", first)
    assert begun.wait(WAIT_S)
    names = ("a1", "a3", "b1", "c1")
    futures = {name: threads.submit(name[0], partial(done.append, name)) for name in names}
    go_on.set()
    for name in names:
        futures[name].result(WAIT_S)
    assert done == ["a1", "b1", "c1", "a3"]


def test_two_threads_run_functions_of_two_keys() -> None:
    """Four of one key run one after another, so another key has a thread."""
    threads, meet = TurnThreads("test", 2), threading.Barrier(2, timeout=WAIT_S)
    lock = threading.Lock()

    def alone() -> bool:
        with lock:
            meet.wait()
            return True

    ours = [threads.submit("a", alone) for _ in range(4)]
    for future in ours:
        assert not future.done()
        threads.submit("b", meet.wait).result(WAIT_S)
        assert future.result(WAIT_S)


def test_an_error_is_the_result_and_the_thread_goes_on() -> None:
    threads = TurnThreads("test")

    def fail() -> None:
        raise KeyError("a bug")

    with pytest.raises(KeyError, match="a bug"):
        threads.submit("a", fail).result(WAIT_S)
    assert threads.submit("a", lambda: 5).result(WAIT_S) == 5


def test_the_longest_function_and_the_end() -> None:
    threads, begun, go_on = TurnThreads("test"), threading.Event(), threading.Event()
    assert threads.longest_s() == 0

    def run() -> None:
        begun.set()
        go_on.wait(WAIT_S)

    running = threads.submit("a", run)
    never = threads.submit("a", run)
    assert begun.wait(WAIT_S)
    assert threads.longest_s() > 0
    threading.Timer(0.05, go_on.set).start()
    threads.close()
    assert running.done()
    assert not never.done()
