"""A browser for each module and a fresh profile for each test; a page with an error fails its
test."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.browser import CHROMIUM, chromium
from helpers.scripted_server import ScriptedServer


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium, open for one module only: it runs an event loop in this thread, which tests of
    other modules do not expect."""
    pytest.importorskip("playwright", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("chromium is not installed (apt-get install chromium)")
    with chromium() as browser:
        yield browser


@pytest.fixture
def tab(browser: Any) -> Iterator[Any]:
    """A tab of a new profile. An exception, or a refusal by the page's policy, fails the test."""
    context = browser.new_context(viewport={"width": 1240, "height": 800})
    context.set_default_timeout(60_000)
    tab = context.new_page()
    wrong: list[str] = []
    tab.on("pageerror", lambda error: wrong.append(str(error)))
    tab.on(
        "console",
        lambda message: (
            wrong.append(message.text) if "Content Security Policy" in message.text else None
        ),
    )
    yield tab
    context.close()
    assert not wrong


@pytest.fixture(scope="session")
def scripted() -> Iterator[ScriptedServer]:
    with ScriptedServer() as server:
        yield server


@pytest.fixture
def answered(tab: Any) -> Callable[..., None]:
    """Let the browser itself answer chat completions: each part is a delta of a stream."""

    def answer(*parts: dict[str, Any] | str) -> None:
        deltas = [{"content": part} if isinstance(part, str) else part for part in parts]
        choices = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
        choices.append({"index": 0, "delta": {}, "finish_reason": "stop"})
        events = [f"data: {json.dumps({'choices': [choice]})}\n\n" for choice in choices]
        body = "".join([*events, "data: [DONE]\n\n"])
        tab.route(
            "**/v1/chat/completions",
            lambda route: route.fulfill(body=body, content_type="text/event-stream"),
        )

    return answer


@pytest.fixture(scope="session")
def images() -> Path:
    return Path(__file__).parents[3] / "docs" / "images"
