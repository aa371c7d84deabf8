"""The page at /docs in Chromium."""

from __future__ import annotations

import json
from typing import Any

import pytest

from helpers.scripted_server import ScriptedServer


def test_it_shows_the_schema_and_tries_it(tab: Any, scripted: ScriptedServer) -> None:
    requests: list[str] = []
    tab.on("request", lambda request: requests.append(request.url))
    tab.goto(f"{scripted.url}/docs")
    form = tab.locator("details", has=tab.locator("code:text-is('/v1/chat/completions')"))
    form.locator("summary").click()
    assert "log-probabilities" in tab.text_content("#operations")
    fields = form.locator("td:first-child code").all_text_contents()
    assert {"messages", "temperature", "role", "content"} <= set(fields)
    form.locator("textarea").fill(json.dumps({"messages": [{"role": "user", "content": "hi"}]}))
    form.locator("button").click()
    tab.wait_for_selector(".answered:has-text('hi .')")
    assert form.locator(".answered").inner_text().startswith("200\n")
    form.locator("textarea").fill("{}")
    form.locator("button").click()
    tab.wait_for_selector(".answered:has-text('messages')")
    assert form.locator(".answered").inner_text().startswith("400\n")
    assert all(url.startswith(scripted.url) for url in requests), "it needs the internet"
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is missing")
    found = axe.Axe().run(tab).response["violations"]
    serious = [fault for fault in found if fault["impact"] in ("serious", "critical")]
    assert [(fault["id"], fault["nodes"][0]["html"]) for fault in serious] == []
