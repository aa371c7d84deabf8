"""The chat at `/` in Chromium: a visit, streams, branches, settings, tools, failures."""

from __future__ import annotations

import gzip
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from helpers.page import answers, ask, until, wait_answers
from helpers.running_server import RunningServer
from helpers.scripted_server import ScriptedServer

STATIC = Path(__file__).parents[3] / "python/minisgl_gateway/page/static"


def test_files_are_compressed_cached_and_under_a_strict_policy(scripted: ScriptedServer) -> None:
    with httpx.Client(base_url=scripted.url) as http:
        page = http.get("/")
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        policy = page.headers["content-security-policy"]
        assert "unsafe" not in policy
        assert "default-src 'none'" in policy
        assert page.headers["content-encoding"] == "gzip"
        plain = http.get("/", headers={"accept-encoding": "identity"})
        assert plain.text == page.text
        assert "content-encoding" not in plain.headers
        again = http.get("/", headers={"if-none-match": page.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        assert http.get("/page/../api_server.py").status_code == 404
        assert http.get("/page/none.js").status_code == 404
        for path in re.findall(r'(?:href|src)="(page/[^"]+)"', page.text):
            assert http.get(f"/{path}").status_code == 200
    assert not re.search(r"<script(?![^>]*src=)|<style|\son\w+=|style=", page.text)


def test_all_files_together_are_at_most_400_kb_compressed() -> None:
    packed = sum(len(gzip.compress(path.read_bytes(), 9)) for path in STATIC.rglob("*.*"))
    assert packed <= 400_000


def test_first_visit_streams_an_answer_with_its_times_and_tokens(
    tab: Any, builtin: RunningServer, images: Path
) -> None:
    tab.goto(builtin.url)
    tab.click("text=What is a radix cache?")
    wait_answers(tab, 1)
    assert "tree of token prefixes" in answers(tab)[0]
    ask(tab, "What is 12 + 30?")
    wait_answers(tab, 2)
    assert answers(tab)[1] == "12 + 30 = 42."
    stats = tab.text_content("article:nth-child(4) .stats")
    assert re.search(r"queue .*prefill .*decode .*\d+ tokens.*tokens/s.*\d+ of \d+", stats, re.S)
    tab.click("article:nth-child(4) [aria-label='Show the tokens']")
    tab.hover("article:nth-child(4) .token:nth-child(8)")
    card = tab.inner_text(".token-card")
    assert "%" in card
    assert len(card.split("%")) == 6  # five alternatives
    if os.environ.get("MINISGL_SCREENSHOTS"):
        tab.screenshot(path=images / "page.png")
    tab.reload()
    wait_answers(tab, 2)  # kept in the browser
    assert "12 + 30" in answers(tab)[1]
    tab.goto(builtin.url)
    assert answers(tab) == []
    until(tab, "document.querySelector('#list a')?.text === 'What is a radix cache?'")


def test_stop_keeps_the_text_and_aborts_the_request(tab: Any, scripted: ScriptedServer) -> None:
    tab.goto(scripted.url)
    num_aborted = len(scripted.aborted)
    ask(tab, "!forever")
    until(tab, "document.querySelector('.markdown').innerText.includes('more more')")
    assert tab.get_attribute("#send", "aria-label") == "Stop"
    tab.keyboard.press("Escape")
    wait_answers(tab, 1)
    assert "You stopped this answer." in tab.text_content(".note")
    assert len(scripted.wait_aborted(num_aborted + 1)) == num_aborted + 1
    assert tab.get_attribute("#send", "aria-label") == "Send"


def test_edit_and_regenerate_make_branches(tab: Any, scripted: ScriptedServer) -> None:
    tab.goto(scripted.url)
    ask(tab, "first question")
    wait_answers(tab, 1)
    tab.click("[aria-label='Answer again']")
    tab.wait_for_selector("text=2/2")
    wait_answers(tab, 1)
    tab.hover(".question")
    tab.click("[aria-label='Edit this message']")
    tab.fill(".editor textarea", "second question")
    tab.press(".editor textarea", "Control+Enter")
    tab.wait_for_selector("text=second question .")
    wait_answers(tab, 1)  # versions cannot be counted while an answer is written
    assert [message["content"] for message in scripted.received[-1].prompt.messages] == [
        "second question"
    ]
    tab.hover(".question")
    tab.click(".question [aria-label='The version before']")
    assert tab.inner_text(".bubble") == "first question"
    tab.wait_for_selector(".answer .nav:has-text('2/2')")
    ask(tab, "more")
    wait_answers(tab, 2)
    contents = [message["content"] for message in scripted.received[-1].prompt.messages]
    assert contents == ["first question", "first question .", "more"]


def test_settings_are_sent_and_kept(tab: Any, scripted: ScriptedServer) -> None:
    tab.goto(scripted.url)
    tab.click("#open-settings")
    tab.fill("#system", "Be brief.")
    tab.fill("#sampling-temperature", "0.7")
    tab.fill("#sampling-max_tokens", "5")
    tab.fill("#sampling-stop", "END")
    tab.select_option("#set-theme", "dark")
    tab.fill("#set-key", "secret")
    tab.press("#set-key", "Tab")
    tab.click("#close-settings")
    tab.reload()
    assert tab.get_attribute("html", "data-theme") == "dark"
    with tab.expect_request("**/v1/chat/completions") as request:
        ask(tab, "one two three")
    assert request.value.headers["authorization"] == "Bearer secret"
    wait_answers(tab, 1)
    message = scripted.received[-1]
    assert message.prompt.messages[0] == {"role": "system", "content": "Be brief."}
    sampling = message.sampling
    assert (sampling.temperature, sampling.max_tokens, sampling.stop) == (0.7, 5, ("END",))
    assert (sampling.logprobs, sampling.top_logprobs) == (True, 5)


WEATHER = {"name": "weather", "parameters": {"type": "object", "properties": {}}}


def call(index: int, name: str, given: str) -> dict[str, Any]:
    return {"index": index, "id": f"call-{index}", "function": {"name": name, "arguments": given}}


def test_tools_by_hand(
    tab: Any, scripted: ScriptedServer, answered: Callable[..., None], tmp_path: Path
) -> None:
    """The user plays the tool: the results go back under the calls' ids, and can be edited."""
    tab.goto(scripted.url)
    tab.click("#open-settings")
    assert not tab.is_visible("#set-choice")
    tab.fill("#set-tools", json.dumps([WEATHER]))
    tab.press("#set-tools", "Tab")
    tab.select_option("#set-choice", "required")
    tab.click("#close-settings")
    answered(
        {"tool_calls": [call(0, "weather", '{"city": ')]},
        {"tool_calls": [call(0, "", '"Paris"}'), call(1, "weather", "{}")]},
    )
    with tab.expect_request("**/v1/chat/completions") as asked:
        ask(tab, "Is it warm in Paris?")
    sent = asked.value.post_data_json
    assert sent["tools"] == [{"type": "function", "function": WEATHER}]
    assert sent["tool_choice"] == "required"
    wait_answers(tab, 1)
    assert tab.text_content(".call code >> nth=0") == '{"city": "Paris"}'
    tab.fill(".results textarea >> nth=0", "21 degrees")
    tab.fill(".results textarea >> nth=1", "<b>no such city</b>")
    answered("It is warm.")
    with tab.expect_request("**/v1/chat/completions") as asked:
        tab.click("text=Send the results")
    messages = asked.value.post_data_json["messages"]
    assert [one["role"] for one in messages] == ["user", "assistant", "tool", "tool"]
    assert [one["id"] for one in messages[1]["tool_calls"]] == ["call-0", "call-1"]
    assert [(one["tool_call_id"], one["content"]) for one in messages[2:]] == [
        ("call-0", "21 degrees"),
        ("call-1", "<b>no such city</b>"),
    ]
    wait_answers(tab, 2)
    assert tab.locator(".results:visible").count() == 0, "only the last message asks for results"
    tab.click("[aria-label='Edit the results']")
    tab.fill(".results:visible textarea >> nth=0", "3 degrees")
    with tab.expect_request("**/v1/chat/completions") as asked:
        tab.click("form.results:visible >> text=Send the results")
    assert asked.value.post_data_json["messages"][2]["content"] == "3 degrees"
    tab.wait_for_selector(".tool-results .nav >> text=2/2")
    wait_answers(tab, 2)
    tab.reload()
    wait_answers(tab, 2)
    assert "3 degrees" in tab.text_content(".tool-results")


def test_tools_that_are_no_list_are_reported(tab: Any, scripted: ScriptedServer) -> None:
    tab.goto(scripted.url)
    for number, (tools, said) in enumerate(
        [("{", "The tools in the settings are no JSON"), ("{}", "a JSON list of functions")], 1
    ):
        tab.click("#open-settings")
        tab.fill("#set-tools", tools)
        tab.press("#set-tools", "Tab")
        tab.click("#close-settings")
        ask(tab, "go")
        wait_answers(tab, number)
        assert said in tab.text_content(".note.error >> nth=-1")


def test_answers_side_by_side_of_two_settings(tab: Any, scripted: ScriptedServer) -> None:
    tab.goto(scripted.url)
    tab.click("#open-settings")
    tab.select_option("#set-n", "2")
    tab.check("#set-compare")
    tab.fill("#second-max_tokens", "2")
    tab.press("#second-max_tokens", "Tab")
    tab.click("#close-settings")
    ask(tab, "one two three")
    wait_answers(tab, 4)
    assert answers(tab) == ["one two three ."] * 2 + ["one two"] * 2
    tab.click(".answers article:nth-child(3) .keep")
    ask(tab, "next")
    until(tab, "document.querySelectorAll('.question').length === 2")
    wait_answers(tab, 5)  # the kept one, and four new ones
    contents = [message["content"] for message in scripted.received[-1].prompt.messages]
    assert contents == ["one two three", "one two ", "next"]


def test_failures_are_reported_and_can_be_tried_again(tab: Any, scripted: ScriptedServer) -> None:
    """The server does not answer for a while behind the first, as one whose engine was killed."""
    tab.goto(scripted.url)
    scripted.resumed.clear()
    ask(tab, "so far !pause !fail")  # it fails when the words are on the page
    until(tab, "document.querySelector('.answer .markdown')?.textContent.includes('so far')")
    tab.route("**/health", lambda route: route.abort())
    scripted.resumed.set()
    wait_answers(tab, 1)
    assert answers(tab) == ["so far"]
    assert "out of luck" in tab.text_content(".note.error")
    tab.wait_for_selector("#banner:not([hidden])")
    tab.unroute("**/health")
    tab.wait_for_selector("#banner", state="hidden")
    ask(tab, "!refuse")
    wait_answers(tab, 2)
    assert "too long" in tab.text_content("article:nth-child(4) .note.error")
    tab.click("article:nth-child(4) .note button")
    tab.wait_for_selector("article:nth-child(4) .nav >> text=2/2")


def test_a_json_schema_is_sent(tab: Any, builtin: RunningServer) -> None:
    tab.goto(builtin.url)
    tab.click("#open-settings")
    tab.select_option("#set-form", "schema")
    tab.fill("#set-schema", '{"type": "object", "prop')
    tab.click("#close-settings")
    ask(tab, "What is 12 + 30?")
    wait_answers(tab, 1)
    assert "The JSON schema in the settings is no JSON" in tab.text_content(".note.error")
    tab.click("#open-settings")
    tab.fill("#set-schema", '{"enum": ["yes", "no"]}')
    tab.click("#close-settings")
    tab.click(".note button")
    tab.wait_for_selector(".answer .nav >> text=2/2")
    wait_answers(tab, 1)
    assert answers(tab)[0] in ('"yes"', '"no"')
