"""Actions of tests on the page at `/`, in a tab of Playwright's."""

from __future__ import annotations

import time
from typing import Any

DONE = "article.answer[aria-busy=false]"


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


def ask(tab: Any, text: str) -> None:
    tab.fill("#question", text)
    tab.press("#question", "Enter")


def until(tab: Any, condition: str, wait_s: float = 60) -> None:
    """Wait until a condition of the page holds. Playwright's own wait_for_function needs eval,
    which the page's policy forbids."""
    deadline = time.monotonic() + wait_s
    while not tab.evaluate(condition):
        assert time.monotonic() < deadline, condition
        time.sleep(0.02)


def answers(tab: Any) -> list[str]:
    return [text.strip() for text in tab.locator(".answer .markdown").all_text_contents()]


def wait_answers(tab: Any, count: int) -> None:
    until(tab, f"document.querySelectorAll('{DONE}').length === {count}")
