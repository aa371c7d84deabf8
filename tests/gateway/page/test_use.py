"""The page in Chromium for all its users: keyboard, accessibility, export, long use."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.page import MARKDOWN, ask, until, wait_answers
from helpers.scripted_server import ScriptedServer

STATIC = Path(__file__).parents[3] / "python/minisgl_gateway/page/static"


NUM_KEPT = """new Promise((resolve) => {
  indexedDB.open("minisgl").onsuccess = ({ target: { result: db } }) => {
    const store = db.transaction("conversations").objectStore("conversations");
    store.count().onsuccess = ({ target }) => (db.close(), resolve(target.result));
  };
})"""
"""The conversations that the browser has."""
ANSWERED = "document.getElementById('announcer').textContent === 'The answer is complete'"


def test_export_and_import(tab: Any, scripted: ScriptedServer, tmp_path: Path) -> None:
    tab.goto(scripted.url)
    ask(tab, "keep this")
    wait_answers(tab, 1)
    tab.click("#open-settings")
    with tab.expect_download() as started:
        tab.click("#export")
    file = tmp_path / "out.json"
    started.value.save_as(file)
    exported = json.loads(file.read_text())
    assert [node["content"] for node in exported["conversations"][0]["nodes"]] == [
        "keep this",
        "keep this .",
    ]
    exported["conversations"][0] |= {"title": "older", "updated": 1}
    file.write_text(json.dumps(exported))
    tab.set_input_files("#import-file", file)
    tab.wait_for_selector("#list li:nth-child(2)")
    assert tab.locator("#list a").all_text_contents() == ["keep this", "older"]
    broken = tmp_path / "broken.json"
    broken.write_text(
        json.dumps({"format": "minisgl-conversations", "conversations": [{"nodes": [{}]}]})
    )
    tab.set_input_files("#import-file", broken)
    tab.wait_for_selector("text=A conversation in this file is damaged.")
    tab.click("#close-settings")
    tab.hover("#list li >> nth=0")
    tab.click("#list li >> nth=0 >> [aria-label^=Delete]")
    until(tab, "document.querySelectorAll('#list li').length === 1")
    assert tab.evaluate(NUM_KEPT) == 1
    tab.click(".toast button")
    until(tab, "document.querySelectorAll('#list li').length === 2")


def test_a_conversation_is_renamed_and_deleted_while_it_is_answered(
    tab: Any, scripted: ScriptedServer
) -> None:
    """Its run keeps it every few seconds, and at the end."""
    tab.goto(scripted.url)
    scripted.resumed.clear()
    ask(tab, "first !pause end")
    until(tab, "document.querySelector('.answer .markdown')?.textContent.includes('first')")
    tab.click("#new-chat")
    tab.hover("#list li")
    tab.click("#list li [aria-label^=Rename]")
    tab.fill("#list li input", "renamed")
    tab.press("#list li input", "Enter")
    tab.wait_for_selector("#list a:has-text('renamed')")
    scripted.resumed.set()
    until(tab, ANSWERED)
    tab.reload()
    tab.click("#list a:has-text('renamed')")
    wait_answers(tab, 1)

    scripted.resumed.clear()
    ask(tab, "second !pause end")
    until(tab, "document.querySelectorAll('.answer')[1]?.textContent.includes('second')")
    tab.hover("#list li")
    tab.click("#list li [aria-label^=Delete]")
    until(tab, "document.querySelectorAll('#list li').length === 0")
    scripted.resumed.set()
    until(tab, ANSWERED)
    assert tab.evaluate(NUM_KEPT) == 0
    tab.click(".toast button")
    tab.click("#list a:has-text('renamed')")
    wait_answers(tab, 2)


@pytest.mark.parametrize(("theme", "width"), [("dark", 1240), ("light", 390)])
def test_axe_finds_no_serious_fault(
    tab: Any, scripted: ScriptedServer, answered: Callable[..., None], theme: str, width: int
) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is missing")
    tab.emulate_media(color_scheme=theme, reduced_motion="reduce")
    tab.set_viewport_size({"width": width, "height": 800})
    tab.goto(scripted.url)
    states = [_faults(axe, tab)]
    answered("<think>hm</think>" + MARKDOWN)
    ask(tab, "go")
    wait_answers(tab, 1)
    tab.wait_for_selector(".hljs-keyword")
    states.append(_faults(axe, tab))
    tab.unroute("**/v1/chat/completions")
    scripted.resumed.clear()
    ask(tab, "shown with !pause !fail")
    shown = "[...document.querySelectorAll('.answer .markdown')].at(-1).textContent"
    until(tab, f"{shown}.includes('shown with')")
    scripted.resumed.set()
    wait_answers(tab, 2)
    tab.click("article:nth-child(4) [aria-label='Show the tokens']")
    tab.hover("article:nth-child(4) .token")
    states.append(_faults(axe, tab))
    tab.click("#open-settings")
    tab.check("#set-compare")
    states.append(_faults(axe, tab))
    assert states == [[], [], [], []]


def _faults(axe: Any, tab: Any) -> list[Any]:
    found = axe.Axe().run(tab).response["violations"]
    return [
        (fault["id"], [node["html"][:200] for node in fault["nodes"]])
        for fault in found
        if fault["impact"] in ("serious", "critical")
    ]


def test_keyboard_alone(tab: Any, scripted: ScriptedServer) -> None:
    tab.goto(scripted.url)
    assert tab.evaluate("document.activeElement.id") == "question"
    tab.keyboard.type("one")
    tab.keyboard.press("Shift+Enter")
    tab.keyboard.type("two")
    tab.keyboard.press("Enter")
    wait_answers(tab, 1)
    assert tab.inner_text(".bubble") == "one\ntwo"
    tab.keyboard.press("ArrowUp")
    assert tab.evaluate("document.activeElement.getAttribute('aria-label')") == "Edited message"
    tab.keyboard.press("Escape")
    tab.keyboard.press("Control+Shift+O")
    assert tab.locator(".question").count() == 0


def test_many_messages_leave_nothing_behind(tab: Any, scripted: ScriptedServer) -> None:
    """After a new chat the elements and listeners are as many as before."""
    count = int(os.environ.get("MINISGL_PAGE_MESSAGES", "40"))
    tab.goto(scripted.url)
    ask(tab, "warm up")
    wait_answers(tab, 1)
    before = _held(tab)
    for index in range(count):
        ask(tab, f"message {index} of some length")
        wait_answers(tab, index % 20 + 1)
        if index % 20 == 19:
            tab.keyboard.press("Control+Shift+O")
    after = _held(tab)
    listed = count // 20  # conversations in the list: 38 nodes and 4 listeners each
    assert after["nodes"] <= before["nodes"] + 150 + 45 * listed, (before, after)
    assert after["jsEventListeners"] <= before["jsEventListeners"] + 30 + 5 * listed


def _held(tab: Any) -> dict[str, Any]:
    """Return the counts of elements and listeners after a garbage collection, in a new chat."""
    tab.keyboard.press("Control+Shift+O")
    session = tab.context.new_cdp_session(tab)
    session.send("HeapProfiler.collectGarbage")
    return session.send("Memory.getDOMCounters")
