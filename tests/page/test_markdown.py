"""The text of a model on the page in Chromium: Markdown, formulas, attacks, thinking."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from helpers.page import MARKDOWN, answers, ask, wait_answers
from helpers.scripted_server import ScriptedServer

STATIC = Path(__file__).parents[2] / "python/minisgl/server/page/static"


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
