"""The vendors' official clients for Node against a real server; each answer as Python's clients
have it. Skips where Node or the packages of `node/package.json` are not installed."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import anthropic
import jsonschema
import pytest

from helpers.running_server import RunningServer
from minisgl.server.model import BUILTIN_NAME as MODEL

FOLDER = Path(__file__).parent / "node"
NODE = shutil.which("node")
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"enum": [1, 2]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
QUESTION: Any = [{"role": "user", "content": "What is 12 + 30?"}]


def received(script: str, package: str, builtin: RunningServer) -> dict[str, Any]:
    """Return the script's output. Fails if the client does."""
    if NODE is None:
        pytest.skip("node is not installed (apt-get install nodejs npm)")
    if not (FOLDER / "node_modules" / package).is_dir():
        pytest.skip(f"{package} is not installed (npm install --prefix tests/gateway/doors/node)")
    command = [str(NODE), str(FOLDER / script), builtin.url, MODEL]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert ended.returncode == 0, ended.stderr
    answers: dict[str, Any] = json.loads(ended.stdout)
    return answers


def test_openai(builtin: RunningServer) -> None:
    node = received("openai.mjs", "openai", builtin)
    with builtin.client() as client:
        asked: Any = {"model": MODEL, "messages": QUESTION, "max_tokens": 40}
        whole = client.chat.completions.create(**asked, temperature=0, logprobs=True)
        assert node["text"] == whole.choices[0].message.content
        tokens = whole.choices[0].logprobs
        assert tokens
        assert node["logprobs"] == [token.logprob for token in tokens.content or ()]
        three = client.chat.completions.create(**asked, n=3, seed=7, temperature=1)
        assert node["choices"] == [choice.message.content for choice in three.choices]
        line = client.completions.create(
            model=MODEL, prompt="12 + 30 =", max_tokens=5, temperature=0
        )
        assert node["completion"] == line.choices[0].text
    assert node["call"]["name"] == "weather"
    for value in (node["parsed"], node["call"]["arguments"], node["responded"]):
        jsonschema.validate(value, SCHEMA)
    assert node["answered"]
    assert node["response"] == node["text"]
    assert node["next"]
    assert {"response.created", "response.output_text.delta", "response.completed"} <= {
        *node["kinds"]
    }


def test_anthropic(builtin: RunningServer) -> None:
    node = received("anthropic.mjs", "@anthropic-ai/sdk", builtin)
    with anthropic.Anthropic(base_url=builtin.url, api_key="none", max_retries=0) as client:
        asked: Any = {"model": MODEL, "messages": QUESTION, "system": "Be brief."}
        whole = client.messages.create(**asked, max_tokens=40, extra_body={"temperature": 0})
        assert whole.content[0].type == "text"
        assert node["text"] == whole.content[0].text
        assert node["counted"] == client.messages.count_tokens(**asked).input_tokens
    assert node["call"]["name"] == "weather"
    jsonschema.validate(node["call"]["input"], SCHEMA)
    assert node["answered"]
