"""Prints a ready server's address, with commands to try."""

from __future__ import annotations

import os
import sys

from minisgl.utils.files import forget
from minisgl.utils.http import goes_through_proxy


def say(text: str) -> None:
    """Print to stdout. The server goes on if the reader has left, as with `| head`."""
    try:
        print(text, flush=True)
    except OSError:
        forget(sys.stdout)


def ready_text(
    name: str, url: str, seconds: float, *, needs_key: bool = False, can_chat: bool = True
) -> str:
    """Return the server's URL with commands to try it, which need only this package.

    The commands work in any folder, and with proxy variables set. seconds: the time of the start.
    needs_key: the commands use $KEY, which the user sets. can_chat: the model has a chat template;
    without one the command completes a text.
    """
    has_proxy = goes_through_proxy(url)
    curl = "curl --noproxy '*'" if has_proxy else "curl"
    options = ", trust_env=False" if has_proxy else ""
    header = python_header = chat_key = first = ""
    client_key = "none"
    if needs_key:
        first = "\n  KEY=...   # one of this server's keys\n"
        client_key = "$KEY"
        header = ' -H "Authorization: Bearer $KEY"'
        chat_key = ' --api-key "$KEY"'
        python_header = ', headers={"Authorization": "Bearer $KEY"}'
    start = f"{curl} {url}/v1/%s -H 'Content-Type: application/json'{header}"
    if not can_chat:
        return f"""
Serving {name} on {url} (ready after {seconds:.1f} s; Ctrl-C stops it). The model
has no usable chat template, so it completes texts and refuses chats. Try in another terminal
{first}
  {start % "completions"} \\
    -d '{{"prompt": "A radix cache is", "max_tokens": 30}}'

Every endpoint: {url}/docs
"""
    end = "EOF" if needs_key else "'EOF'"  # the shell fills in $KEY
    python = "python" if os.environ.get("VIRTUAL_ENV") == sys.prefix else sys.executable
    return f"""
Serving {name} on {url} (ready after {seconds:.1f} s; Ctrl-C stops it). Chat with it in a
browser at {url}/, or try in another terminal
{first}
  {start % "chat/completions"} \\
    -d '{{"messages": [{{"role": "user", "content": "What is a radix cache?"}}]}}'

  {python} -m minisgl chat --url {url}{chat_key}

  {python} - <<{end}
  import httpx  # or the official client: openai.OpenAI(base_url="{url}/v1", api_key="{client_key}")
  body = {{"messages": [{{"role": "user", "content": "What is 12 + 30?"}}]}}
  answer = httpx.post("{url}/v1/chat/completions", json=body{options}{python_header}).json()
  print(answer["choices"][0]["message"]["content"])
  EOF

Every endpoint: {url}/docs
"""
