"""Let Codex's and Claude Code's command lines do a turn with a tool call, and print a table.

    npm install @openai/codex @anthropic-ai/claude-code
    node node_modules/@anthropic-ai/claude-code/install.cjs
    python scripts/try_agents.py node_modules/.bin > table.md

The server is real from HTTP to text, chat template and tool parser included; in the engine's place
stands a script, which asks for a shell command first, and repeats its output when it has that. The
agents see 127.0.0.1 only. It is no part of CI; the table is in docs/clients.md.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from helpers.scripted_server import MODEL, ScriptedServer
from minisgl.builtin import model_path
from minisgl.core import Accepted, Event, Failed, Finished, Token
from minisgl.message import ChatPrompt, TokenizeMsg
from minisgl.message.frontend import UserReply
from minisgl.tokenizer import Detokenizer, PromptEncoder, load_tokenizer

SECRET: Final = "pelargonium"
"""What is in the file that the agent is to read: only a tool call can find it."""
TASK: Final = "Read note.txt with a shell command and tell me the word in it."
COMMAND: Final = "cat note.txt"
SHELLS: Final = ("exec_command", "shell_command", "shell", "Bash")


class ScriptedModel:
    """Mutable: the names of the tools that an agent has offered, and of those that were called."""

    def __init__(self) -> None:
        self._tokenizer = load_tokenizer(model_path())
        self._encoder = PromptEncoder(tokenizer=self._tokenizer, folder=model_path())
        self._detokenizer = Detokenizer(self._tokenizer)
        self.offered: set[str] = set()
        self.called: list[str] = []

    def answer(self, message: TokenizeMsg, resumed: threading.Event) -> Iterator[UserReply]:
        """Encode the prompt, and answer it a token at a time."""
        request = self._encoder.tokenize(message)
        if isinstance(request, Failed):
            yield request
            return
        uid, num_prompt = message.uid, len(request.ids) // 4
        ids = self._tokenizer.encode(self._text(message), add_special_tokens=False)
        events: list[Event] = [
            Accepted(
                uid=uid, num_prompt_tokens=num_prompt, sampling=message.sampling, form=request.form
            ),
            *(Token(uid=uid, id=id) for id in ids),
            Finished(
                uid=uid, reason="stop", num_prompt_tokens=num_prompt, num_output_tokens=len(ids)
            ),
        ]
        for event in events:
            yield from self._detokenizer.handle([event])[0]

    def _text(self, message: TokenizeMsg) -> str:
        prompt = message.prompt
        assert isinstance(prompt, ChatPrompt), "agents send chats"
        results = [turn for turn in prompt.messages if turn["role"] == "tool"]
        if results:
            return f"The tool says: {results[-1]['content']}"
        tools = {tool["function"]["name"]: tool["function"] for tool in prompt.tools}
        self.offered |= tools.keys()
        name = next((name for name in SHELLS if name in tools), None)
        if name is None:
            return "A title"
        self.called.append(name)
        call = {"name": name, "arguments": _arguments(tools[name])}
        return f"I read the file.\n<tool_call>\n{json.dumps(call)}\n</tool_call>"


def _arguments(function: dict[str, Any]) -> dict[str, Any]:
    properties = function["parameters"]["properties"]
    field = "cmd" if "cmd" in properties else "command"
    is_list = properties[field].get("type") == "array"
    arguments: dict[str, Any] = {field: COMMAND.split() if is_list else COMMAND}
    if "description" in function["parameters"].get("required", ()):
        arguments["description"] = "Read the note"
    return arguments


def codex(programs: Path, url: str, home: Path) -> list[str]:
    provider = f'{{name="minisgl", base_url="{url}/v1", wire_api="responses"}}'
    return [
        str(programs / "codex"),
        *("exec", "--skip-git-repo-check", "--sandbox", "danger-full-access", "-m", MODEL),
        *("-c", "model_provider=minisgl", "-c", f"model_providers.minisgl={provider}"),
        TASK,
    ]


def claude(programs: Path, url: str, home: Path) -> list[str]:
    return [
        str(programs / "claude"),
        *("-p", TASK, "--model", MODEL, "--allowedTools", "Bash(cat:*)"),
    ]


def try_agent(name: str, programs: Path) -> str:
    """Returns what went wrong, or the called tool and how many were offered."""
    model = ScriptedModel()
    with (
        tempfile.TemporaryDirectory() as folder,
        ScriptedServer(answer=model.answer) as server,
    ):
        work, home = Path(folder, "work"), Path(folder, "home")
        work.mkdir()
        home.mkdir()
        (work / "note.txt").write_text(f"{SECRET}\n")
        make = codex if name == "codex" else claude
        done = subprocess.run(
            make(programs, server.url, home),
            cwd=work,
            env={
                "PATH": os.environ["PATH"],
                "HOME": str(home),
                "CODEX_HOME": str(home),
                "ANTHROPIC_BASE_URL": server.url,
                "ANTHROPIC_API_KEY": "none",
                "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
                "NO_PROXY": "127.0.0.1",
            },
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )
    if done.returncode or SECRET not in done.stdout:
        return f"exit {done.returncode}: {(done.stdout + done.stderr)[-1500:]}"
    return f"ok: called {', '.join(model.called)}, of {len(model.offered)} tools"


def main() -> None:
    programs = Path(sys.argv[1]).resolve()
    names = sys.argv[2:] or ["codex", "claude"]
    print("| agent | result |\n|---|---|")
    for name in names:
        version = subprocess.run(
            [programs / name, "--version"], capture_output=True, text=True, check=True
        ).stdout.strip()
        print(f"| {version} | {try_agent(name, programs)} |")


if __name__ == "__main__":
    main()
