"""A browser for the tests of this folder; a page with an error fails its test."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from helpers.browser import CHROMIUM, chromium
from helpers.scripted_server import ScriptedServer
from minisgl.server.web.respond import HOLD_ON

HERE = Path(__file__).parent
_opened = ExitStack()
_browsers: list[Any] = []
_tabs: list[Any] = []  # that a test left clean


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """Close the browser behind the last test here: it runs an event loop in this thread, which
    other tests do not expect."""
    try:
        return (yield)
    finally:
        if nextitem is None or nextitem.path.parent != HERE:
            _tabs.clear()
            _browsers.clear()
            _opened.close()


@pytest.fixture
def tab() -> Iterator[Any]:
    """A tab of the browser, as in a new profile. The next test has it, too: its process and the
    compiled scripts are half of a visit's CPU time. An exception, or a refusal by the page's
    policy, fails the test."""
    pytest.importorskip("playwright", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("chromium is not installed (apt-get install chromium)")
    if not _browsers:
        _browsers.append(_opened.enter_context(chromium()))
    if _tabs:
        tab = _tabs.pop()
    else:
        context = _browsers[0].new_context()
        context.set_default_timeout(60_000)
        tab = context.new_page()
    tab.set_viewport_size({"width": 1240, "height": 800})
    tab.emulate_media(color_scheme="light", reduced_motion="no-preference")
    wrong: list[str] = []

    def hear(message: Any) -> None:
        if "Content Security Policy" in message.text:
            wrong.append(message.text)

    def fail(error: Any) -> None:
        wrong.append(str(error))

    tab.on("pageerror", fail)
    tab.on("console", hear)
    yield tab
    tab.unroute_all()
    tab.goto("about:blank")
    tab.remove_listener("pageerror", fail)
    tab.remove_listener("console", hear)
    session = tab.context.new_cdp_session(tab)
    session.send("Storage.clearDataForOrigin", {"origin": "*", "storageTypes": "all"})
    session.detach()
    _tabs.append(tab)
    assert not wrong


@pytest.fixture(scope="session")
def scripted() -> Iterator[ScriptedServer]:
    with ScriptedServer() as server:
        yield server


@pytest.fixture
def answered(tab: Any) -> Callable[..., None]:
    """Let the browser itself answer chat completions: each part is a delta of a stream. Behind the
    first comes what a server says while its engine starts again."""

    def answer(*parts: dict[str, Any] | str) -> None:
        deltas = [{"content": part} if isinstance(part, str) else part for part in parts]
        choices = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
        choices.append({"index": 0, "delta": {}, "finish_reason": "stop"})
        events = [f"data: {json.dumps({'choices': [choice]})}\n\n" for choice in choices]
        body = "".join([*events[:1], HOLD_ON.decode(), *events[1:], "data: [DONE]\n\n"])
        tab.route(
            "**/v1/chat/completions",
            lambda route: route.fulfill(body=body, content_type="text/event-stream"),
        )

    return answer


@pytest.fixture(scope="session")
def images() -> Path:
    return Path(__file__).parents[3] / "docs" / "images"
