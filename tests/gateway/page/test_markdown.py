"""The text of a model on the page in Chromium: Markdown, formulas, attacks, thinking."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from helpers.page import MARKDOWN, answers, ask, wait_answers
from helpers.scripted_server import ScriptedServer

STATIC = Path(__file__).parents[3] / "python/minisgl_gateway/page/static"


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
          const found = [grown.innerHTML === whole.innerHTML, grown.children.length];
          for (const end of [9, text.length]) render(grown, text.slice(0, end), true);
          return [...found, grown.children.length];
        }""",
        MARKDOWN,
    )
    assert equal == [True, 7, 7], "what was there before comes again, too"


WIDE = "|" + "a|" * 2000 + "\n|" + "-|" * 2000 + "\n" + ("|" + "b|" * 2000 + "\n") * 3
NESTED = "\n".join("  " * depth + "- a" for depth in range(600))


FREEZING = {  # the text, what it would be without a bound, the most elements
    "wide": (WIDE, "table", 5),
    "deep": (NESTED, "li " * 25, 100),
    "quotes": ("> " * 600 + "a", "blockquote " * 25, 100),
    "items": ("- a\n" * 5000, "li", 5),
    "formulas": ("$x$ " * 3000, ".tex", 5),
    "emphasis": ("_a" * 20_000, "em", 5),
    "blocks": ("a\n\n" * 5000, ":nth-child(1005)", 2100),
    "code": ("```python\n" + "x = 1\n" * 20_000 + "```", ".hljs-number", 40),
    "formula": ("$" + "a+" * 2000 + "b$", "math", 5),
    "long": ("# a\n" + "word " * 40_000, "p:not(.plain)", 5),
}


def test_what_would_freeze_the_page_is_plain_text(tab: Any, scripted: ScriptedServer) -> None:
    """Nothing of it is left out."""
    tab.goto(scripted.url)
    rendered = tab.evaluate(
        """async (cases) => {
          const { render } = await import("/page/markdown.js");
          const elements = cases.map(() => document.createElement("div"));
          cases.forEach(([text], index) => render(elements[index], text, true));
          await new Promise((resolve) => setTimeout(resolve, 300));
          return cases.map(([_, absent], index) => {
            const count = elements[index].querySelectorAll("*").length;
            return [!elements[index].querySelector(absent), count, elements[index].textContent];
          });
        }""",
        [[text, absent] for text, absent, _ in FREEZING.values()],
    )
    for (name, (text, _, most)), (is_absent, count, shown) in zip(
        FREEZING.items(), rendered, strict=True
    ):
        assert is_absent, name
        assert count <= most, name
        words = re.findall(r"[a-z]", text.replace("python", ""))
        found = re.findall(r"[a-z]", shown.replace("python", ""))
        assert found == words, name


def test_usual_sizes_are_set(tab: Any, scripted: ScriptedServer) -> None:
    """A table of 20 columns and 50 rows, lists in lists, and a thousand lines of code."""
    table = "|" + "a|" * 20 + "\n|" + "-|" * 20 + "\n" + ("|" + "b|" * 20 + "\n") * 50
    nested = "\n".join("  " * depth + "- a" for depth in range(10))
    code = "```python\n" + "x = 1\n" * 1000 + "```"
    tab.goto(scripted.url)
    counts = tab.evaluate(
        """async (text) => {
          const { render } = await import("/page/markdown.js");
          const element = document.createElement("div");
          render(element, text, true);
          const count = (selector) => element.querySelectorAll(selector).length;
          while (!count(".hljs-number")) await new Promise((resolve) => setTimeout(resolve, 20));
          return [count("td"), count("li"), count(".plain")];
        }""",
        f"{table}\n\n{nested}\n\n{code}",
    )
    assert counts == [1000, 10, 0]


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
