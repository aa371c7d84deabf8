"""What a server prints when it is ready: how to try it."""

from __future__ import annotations

import os
import sys

from minisgl.message.pooling import OnlyTask
from minisgl.utils.http import goes_through_proxy


def ready_text(url: str, *, needs_key: bool, can_chat: bool, only_task: OnlyTask = "") -> str:
    """Return what follows "Serving MODEL on URL": commands to try it, which need only this
    distribution.

    The commands work in any folder, in zsh with an IPv6 address, and with proxy variables set.
    needs_key: they use $KEY, which the user sets. can_chat: the model has a chat template; without
    one they complete a text. only_task: of a model that writes no text.
    """
    has_proxy = goes_through_proxy(url)
    curl, options = ("curl --noproxy '*'", ", trust_env=False") if has_proxy else ("curl", "")
    header = python_header = chat_key = first = ""
    client_key = "none"
    if needs_key:
        first = "\n  KEY=...   # one of this server's keys\n"
        client_key = "$KEY"
        header = ' -H "Authorization: Bearer $KEY"'
        chat_key = ' --api-key "$KEY"'
        python_header = ', headers={"Authorization": "Bearer $KEY"}'
    start = f"{curl} '{url}/v1/%s' -H 'Content-Type: application/json'{header}"
    if not can_chat:
        says = f"""has no usable chat template, so it completes texts and refuses chats. Write
one in a browser at {url}/, or try in another terminal"""
        path, body = "completions", '{"prompt": "A radix cache is", "max_tokens": 30}'
        if only_task:
            does, path = "embeds texts and writes none", only_task
            body = '{"input": ["A radix cache", "A prefix tree"]}'
            if only_task == "rerank":
                does = "scores pairs of texts"
                body = '{"query": "What is a trie?", "documents": ["A prefix tree.", "A heap."]}'
            says = f"is an encoder: it {does}. Try in another terminal"
        return f"""The model
{says}
{first}
  {start % path} \\
    -d '{body}'

Every endpoint: {url}/docs
"""
    end = "EOF" if needs_key else "'EOF'"  # the shell fills in $KEY
    python = "python" if os.environ.get("VIRTUAL_ENV") == sys.prefix else sys.executable
    return f"""Chat with it in a
browser at {url}/, or try in another terminal
{first}
  {start % "chat/completions"} \\
    -d '{{"messages": [{{"role": "user", "content": "What is a radix cache?"}}]}}'

  {python} -m minisgl chat --url '{url}'{chat_key}

  {python} - <<{end}
  import httpx  # or the official client: openai.OpenAI(base_url="{url}/v1", api_key="{client_key}")
  body = {{"messages": [{{"role": "user", "content": "What is 12 + 30?"}}]}}
  answer = httpx.post("{url}/v1/chat/completions", json=body{options}{python_header}).json()
  print(answer["choices"][0]["message"]["content"])
  EOF

Every endpoint: {url}/docs
"""
