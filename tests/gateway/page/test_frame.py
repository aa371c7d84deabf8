"""Parts around the conversation: the header, the settings, the list, scrolling to the end."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from helpers.page import ask, until, wait_answers
from helpers.scripted_server import ScriptedServer


def test_the_header_names_what_is_set_and_one_button_resets_it(
    tab: Any, scripted: ScriptedServer
) -> None:
    tab.goto(scripted.url)
    assert tab.is_hidden("#active")
    tab.click("#open-settings")
    tab.fill("#system", "Be brief.")
    tab.fill("#sampling-max_tokens", "5")
    tab.select_option("#set-n", "2")
    tab.fill("#set-key", "mine")
    tab.press("#set-key", "Tab")
    tab.click("#close-settings")
    assert tab.text_content("#active") == "system prompt · max tokens 5 · 2 answers"
    tab.reload()
    tab.click("#active")
    assert tab.input_value("#sampling-max_tokens") == "5"
    tab.click("#reset")
    assert tab.input_value("#sampling-max_tokens") == ""
    assert tab.input_value("#system") == ""
    assert tab.input_value("#set-key") == "mine"
    tab.click("#close-settings")
    assert tab.is_hidden("#active")
    with tab.expect_request("**/v1/chat/completions") as request:
        ask(tab, "one two")
    sent = request.value.post_data_json
    assert "max_tokens" not in sent
    assert "n" not in sent
    assert [message["role"] for message in sent["messages"]] == ["user"]


def test_a_key_that_is_missing_is_asked_for(tab: Any, scripted: ScriptedServer) -> None:
    body = json.dumps({"error": {"message": "not known here", "code": "invalid_api_key"}})
    tab.route("**/v1/models", lambda route: route.fulfill(status=401, body=body))
    tab.goto(scripted.url)
    tab.wait_for_selector("#key-note:has-text('This server needs an API key.')")
    assert tab.evaluate("document.activeElement.id") == "set-key"
    tab.fill("#set-key", "wrong")
    tab.press("#set-key", "Enter")
    tab.wait_for_selector("#key-note:has-text('not known here')")
    tab.unroute("**/v1/models")
    tab.fill("#set-key", "right")
    tab.press("#set-key", "Tab")
    tab.wait_for_selector("#key-note", state="hidden")
    assert tab.text_content("#model") == "scripted"


def test_the_end_of_an_answer_is_in_view(
    tab: Any, scripted: ScriptedServer, answered: Callable[..., None]
) -> None:
    """So are the parts that appear below it when it is complete, unless the reader has scrolled
    up."""
    tab.goto(scripted.url)
    answered("A line.\n\n" * 30)
    ask(tab, "many lines")
    wait_answers(tab, 1)
    part = {"name": "weather", "arguments": "{}"}
    answered({"tool_calls": [{"index": 0, "id": "call", "function": part}]})
    ask(tab, "Is it warm?")
    wait_answers(tab, 2)
    below = "document.querySelector('#composer').getBoundingClientRect().top"
    end = "document.querySelector('.answer:last-child footer').getBoundingClientRect().bottom"
    until(tab, f"{end} <= {below}")
    assert tab.is_hidden("#to-end")
    tab.evaluate("document.querySelector('#view').scrollTop = 0")
    tab.wait_for_selector("#to-end:not([hidden])")
    tab.click("#to-end")
    until(tab, f"{end} <= {below}")


def test_the_list_on_a_phone_takes_the_focus_and_gives_it_back(
    tab: Any, scripted: ScriptedServer
) -> None:
    tab.set_viewport_size({"width": 390, "height": 780})
    tab.goto(scripted.url)
    tab.focus("#open-list")
    tab.keyboard.press("Enter")
    assert tab.evaluate("document.activeElement.id") == "new-chat"
    tab.keyboard.press("Escape")
    assert tab.evaluate("document.activeElement.id") == "open-list"
    assert tab.get_attribute("#open-list", "aria-expanded") == "false"
