"""What a ready server prints: its address, and what to try next."""

from __future__ import annotations

import os
import sys

from minisgl.utils.files import forget


def say(text: str) -> None:
    """Print to stdout. A reader that is gone, as of `| head`, does not end the server."""
    try:
        print(text, flush=True)
    except OSError:
        forget(sys.stdout)


def ready_text(name: str, url: str, seconds: float) -> str:
    """The server's URL, and three commands to try, which need nothing but this package."""
    python = _interpreter()
    return f"""
Serving {name} on {url} (ready after {seconds:.1f} s; Ctrl-C stops it). In another terminal, try

  curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{{"messages": [{{"role": "user", "content": "What is a radix cache?"}}]}}'

  {python} -m minisgl.shell --url {url}

  {python} - <<'EOF'
  import httpx  # or the official client: openai.OpenAI(base_url="{url}/v1", api_key="none")
  body = {{"messages": [{{"role": "user", "content": "What is 12 + 30?"}}]}}
  answer = httpx.post("{url}/v1/chat/completions", json=body).json()
  print(answer["choices"][0]["message"]["content"])
  EOF

Every endpoint: {url}/docs
"""


def _interpreter() -> str:
    """The command that starts this Python: its path, unless `python` means it."""
    if sys.prefix == sys.base_prefix or os.environ.get("VIRTUAL_ENV") == sys.prefix:
        return "python"
    return min(sys.executable, os.path.relpath(sys.executable), key=len)
