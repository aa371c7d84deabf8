"""The page at `/` in Chromium: a visit, streams, branches, failures, what a model writes."""

from __future__ import annotations

import gzip
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from helpers.page import answers, ask, until, wait_answers
from helpers.running_server import RunningServer
from helpers.scripted_server import ScriptedServer

STATIC = Path(__file__).parents[2] / "python/minisgl/server/page/static"


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
    tab.goto(scripted.url)
    scripted.resumed.clear()
    ask(tab, "so far !pause !fail")  # it fails when the words are on the page
    until(tab, "document.querySelector('.answer .markdown')?.textContent.includes('so far')")
    scripted.resumed.set()
    wait_answers(tab, 1)
    assert answers(tab) == ["so far"]
    assert "out of luck" in tab.text_content(".note.error")
    ask(tab, "!refuse")
    wait_answers(tab, 2)
    assert "too long" in tab.text_content("article:nth-child(4) .note.error")
    tab.click("article:nth-child(4) .note button")
    tab.wait_for_selector("article:nth-child(4) .nav >> text=2/2")


def test_a_killed_engine_is_reported_and_the_page_recovers(
    tab: Any, start: Callable[..., RunningServer]
) -> None:
    first = start()
    port = first.url.rpartition(":")[2]
    tab.goto(first.url)
    tab.click("#open-settings")
    tab.fill("#sampling-max_tokens", "1500")
    tab.press("#sampling-max_tokens", "Tab")
    tab.click("#close-settings")
    tab.route("**/v1/chat/completions", _ignoring_eos)
    ask(tab, "What is a radix cache?")
    until(tab, "document.querySelector('.markdown')?.innerText.length > 20")
    os.kill(first.pid("engine"), 9)
    wait_answers(tab, 1)
    assert tab.text_content(".note.error")
    first.ended()
    tab.wait_for_selector("#banner:not([hidden])")
    start("--port", port)
    tab.wait_for_selector("#banner", state="hidden")
    tab.unroute("**/v1/chat/completions")
    tab.click(".note button")
    tab.wait_for_selector(".answer .nav >> text=2/2")
    wait_answers(tab, 1)
    assert "tree of token prefixes" in answers(tab)[0]


def _ignoring_eos(route: Any) -> None:
    body = json.loads(route.request.post_data)
    route.continue_(post_data=json.dumps({**body, "ignore_eos": True}))


MARKDOWN = """\
# Title

A **bold** word, `code`, and $e^{i\\pi} + 1 = 0$ for $5 and $6.

$$\\int_0^1 x^2 \\, dx = \\frac{1}{3}$$

| a | b |
|---|---|
| 1 | 2 |

```python
def add(a, b):
    return a + b
```

3. three

- [x] done
- a [link](https://example.org/x)
"""


def test_markdown_code_and_formulas(
    tab: Any, scripted: ScriptedServer, answered: Callable[..., None]
) -> None:
    answered(*re.findall(r"[\s\S]{1,7}", MARKDOWN))
    tab.goto(scripted.url)
    ask(tab, "go")
    wait_answers(tab, 1)
    tab.wait_for_selector(".hljs-keyword")
    tab.wait_for_selector(".tex math mfrac")
    assert tab.inner_text(".markdown h1") == "Title"
    assert tab.locator(".tex").count() == 2  # not "$5 and $6"
    assert tab.inner_text(".markdown td >> nth=0") == "1"
    assert tab.inner_text(".code-head") == "python"
    assert "☑ done" in tab.inner_text(".markdown ul li >> nth=0")
    assert tab.get_attribute(".markdown ol", "start") == "3"
    link = tab.locator(".markdown a")
    assert link.get_attribute("rel") == "noopener noreferrer nofollow"


def test_streamed_markdown_equals_the_whole(tab: Any, scripted: ScriptedServer) -> None:
    tab.goto(scripted.url)
    equal = tab.evaluate(
        """async (text) => {
          const { render } = await import("/page/markdown.js");
          const [grown, whole] = [0, 0].map(() => document.createElement("div"));
          for (let end = 1; end < text.length; end++) render(grown, text.slice(0, end), false);
          const kept = grown.firstChild;
          for (const one of [grown, whole]) render(one, text, true);
          await new Promise((resolve) => setTimeout(resolve, 300));
          return [grown.innerHTML === whole.innerHTML, grown.children.length];
        }""",
        MARKDOWN,
    )
    assert equal == [True, 7]


ATTACKS = (
    "<script>window.hit = 1</script>",
    "<img src=x onerror='window.hit = 1'>",
    "<svg onload='window.hit = 1'><style>@import url(/hit)</style></svg>",
    "<a href='javascript:window.hit=1' onclick='window.hit=1'>a</a>",
    "[click](javascript:window.hit=1) [data](data:text/html,<script>window.hit=1</script>)",
    "![pixel](http://127.0.0.1:9/hit.png)",
    "<math><mtext><style><img src=x onerror=window.hit=1></style></mtext></math>",
    "$\\href{javascript:window.hit=1}{x}$ $\\htmlClass{a}{b}$ $\\includegraphics{/hit}$",
    "```html\n<script>window.hit = 1</script>\n```",
    '```"><img src=x onerror=window.hit=1>\ncode\n```',
    '$"><img src=x onerror=window.hit=1>$',
    "<iframe srcdoc='<script>parent.hit=1</script>'></iframe>",
    "<form action=/hit><button id=question>x</button></form>",
)


def test_what_a_model_writes_runs_nothing_and_fetches_nothing(
    tab: Any, scripted: ScriptedServer, answered: Callable[..., None]
) -> None:
    text = "\n\n".join(ATTACKS)
    answered({"reasoning_content": text}, text)
    tab.goto(scripted.url)
    requests: list[str] = []
    tab.on("request", lambda request: requests.append(request.url))
    ask(tab, text)
    wait_answers(tab, 1)
    tab.wait_for_selector(".tex")
    tab.wait_for_timeout(300)
    assert tab.evaluate("window.hit") is None
    assert not [url for url in requests if "hit" in url or not url.startswith(scripted.url)]
    bad = "script, img, style, iframe, form, svg, [onclick], [onerror], [style], [id]"
    assert tab.locator(f".markdown :is({bad}):not(svg.icon)").count() == 0
    for href in tab.eval_on_selector_all(".markdown a", "all => all.map((a) => a.href)"):
        assert re.match(r"https?:|$", href)


def test_the_policy_stops_a_script_that_got_in(tab: Any, scripted: ScriptedServer) -> None:
    """The second wall: an element that the sanitiser would have missed."""
    tab.goto(scripted.url)
    blocked = tab.evaluate(
        """() => {
          try {
            document.body.innerHTML += "<img src=x onerror='window.hit=1'>";
          } catch (error) { return error.name; }
        }"""
    )
    assert blocked == "TypeError"  # no HTML is parsed but what the sanitiser made


def test_thinking_is_folded_and_not_sent_back(
    tab: Any, scripted: ScriptedServer, answered: Callable[..., None]
) -> None:
    answered("<thi", "nk>first I", " think</think>", "\n\nthen I speak")
    tab.goto(scripted.url)
    ask(tab, "go")
    wait_answers(tab, 1)
    assert answers(tab) == ["then I speak"]
    assert not tab.is_visible("text=first I think")
    tab.click("summary")
    assert tab.is_visible("text=first I think")
    tab.unroute("**/v1/chat/completions")
    ask(tab, "and now")
    wait_answers(tab, 2)
    contents = [message["content"] for message in scripted.received[-1].prompt.messages]
    assert contents == ["go", "then I speak", "and now"]


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
    tab.set_input_files("#import-file", file)
    tab.wait_for_selector("#list li:nth-child(2)")
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
    tab.click(".toast button")
    until(tab, "document.querySelectorAll('#list li').length === 2")


@pytest.mark.parametrize(("theme", "width"), [("light", 1240), ("dark", 1240), ("light", 390)])
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


def test_images_are_refused_politely(tab: Any, scripted: ScriptedServer) -> None:
    tab.goto(scripted.url)
    tab.evaluate(
        """() => {
          const data = new DataTransfer();
          data.items.add(new File(["x"], "cat.png", { type: "image/png" }));
          document.dispatchEvent(new DragEvent("drop", { dataTransfer: data, bubbles: true }));
        }"""
    )
    assert "text only" in tab.inner_text("#toasts")


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
    """What is held after a collection, in a new chat."""
    tab.keyboard.press("Control+Shift+O")
    session = tab.context.new_cdp_session(tab)
    session.send("HeapProfiler.collectGarbage")
    return session.send("Memory.getDOMCounters")


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
