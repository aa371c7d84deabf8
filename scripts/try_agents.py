"""Let agents' command lines do a turn with a tool call, and print a table.

    npm install @openai/codex @anthropic-ai/claude-code opencode-ai @qwen-code/qwen-code
    node node_modules/@anthropic-ai/claude-code/install.cjs
    python scripts/try_agents.py node_modules/.bin > table.md

The server is real from HTTP to text, with chat template and tool parser. A script replaces the
engine: it asks for a shell command first, then for a patch if there is a tool for it, and repeats
the command's output. Each agent is tried with an unknown name of a model and with a known one, for
which it sends more. The agents see 127.0.0.1 only. CI does not run it; the table is in
docs/clients.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from helpers.scripted_server import ScriptedServer
from minisgl.builtin import model_path
from minisgl.core import Accepted, Event, Failed, Finished, Token
from minisgl.errors import RequestError
from minisgl.message import ChatPrompt, TokenizeMsg
from minisgl.message.frontend import UserReply
from minisgl.tokenizer import Detokenizer, PromptEncoder, load_tokenizer
from minisgl.tokenizer.worker import user_msg

SECRET: Final = "pelargonium"
"""The content of the file that the agent is to read: only a tool call can find it."""
TASK: Final = "Read note.txt with a shell command and tell me the word in it."
COMMAND: Final = "cat note.txt"
PATCH: Final = "*** Begin Patch\n*** Add File: copy.txt\n+patched\n*** End Patch\n"
TIMEOUT_S: Final = 300.0  # a turn took 20 s, and more than 120 s at a load of 39 on two cores
SHELLS: Final = ("exec_command", "shell_command", "shell", "Bash", "bash", "run_shell_command")


class ScriptedModel:
    """Answers an agent. Mutable: the names of the offered tools, and of the called ones."""

    def __init__(self) -> None:
        self._tokenizer = load_tokenizer(model_path())
        self._encoder = PromptEncoder(tokenizer=self._tokenizer, folder=model_path())
        self._detokenizer = Detokenizer(self._tokenizer)
        self.offered: set[str] = set()
        self.called: list[str] = []

    def answer(self, message: TokenizeMsg, resumed: threading.Event) -> Iterator[UserReply]:
        """Encode the prompt, and answer it a token at a time."""
        try:
            encoded = self._encoder.encode(message.prompt, message.context_length)
            request = user_msg(self._encoder, encoded, message)
        except RequestError as error:
            yield Failed.of(message.uid, error)
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
        tools = {tool["function"]["name"]: tool["function"] for tool in prompt.tools}
        self.offered |= tools.keys()
        name = next((name for name in SHELLS if name in tools), None)
        if not results and name:
            return self._call(name, _arguments(tools[name]))
        if len(results) == 1 and "apply_patch" in tools:
            return self._call("apply_patch", {"input": PATCH})
        return f"The tool says: {results[0]['content']}" if results else "A title"

    def _call(self, name: str, arguments: dict[str, Any]) -> str:
        self.called.append(name)
        call = {"name": name, "arguments": arguments}
        return f"I read the file.\n<tool_call>\n{json.dumps(call)}\n</tool_call>"


def _arguments(function: dict[str, Any]) -> dict[str, Any]:
    properties = function["parameters"]["properties"]
    field = "cmd" if "cmd" in properties else "command"
    is_list = properties[field].get("type") == "array"
    arguments: dict[str, Any] = {field: COMMAND.split() if is_list else COMMAND}
    if "description" in function["parameters"].get("required", ()):
        arguments["description"] = "Read the note"
    return arguments


Command = Callable[[Path, str, str], list[str]]


def codex(programs: Path, url: str, model: str) -> list[str]:
    provider = f'{{name="minisgl", base_url="{url}/v1", wire_api="responses"}}'
    return [
        str(programs / "codex"),
        *("exec", "--skip-git-repo-check", "--sandbox", "danger-full-access", "-m", model),
        *("-c", "model_provider=minisgl", "-c", f"model_providers.minisgl={provider}"),
        TASK,
    ]


def claude(programs: Path, url: str, model: str) -> list[str]:
    return [
        str(programs / "claude"),
        *("-p", TASK, "--model", model, "--effort", "low", "--allowedTools", "Bash(cat:*)"),
    ]


def opencode(programs: Path, url: str, model: str) -> list[str]:
    """opencode, whose configuration is in the environment."""
    return [str(programs / "opencode"), "run", "-m", f"minisgl/{model}", TASK]


def opencode_config(url: str, model: str) -> str:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{url}/v1"},
        "models": {model: {"limit": {"context": 200_000, "output": 8000}}},
    }
    return json.dumps({"provider": {"minisgl": provider}})


def qwen(programs: Path, url: str, model: str) -> list[str]:
    return [str(programs / "qwen"), "-p", TASK, "--yolo"]


AGENTS: Final[dict[str, tuple[Command, tuple[str, ...]]]] = {
    "codex": (codex, ("my-model", "gpt-5.5")),
    "claude": (claude, ("my-model", "claude-sonnet-4-5", "claude-opus-4-6")),
    "opencode": (opencode, ("my-model",)),
    "qwen": (qwen, ("my-model",)),
}
"""An agent's command line, and the names of the model that it is tried with."""


def try_agent(command: Command, programs: Path, name: str) -> str:
    """Return the error, or the called tools and the number of offered ones."""
    model = ScriptedModel()
    with (
        tempfile.TemporaryDirectory() as folder,
        ScriptedServer(answer=model.answer, names=(name,)) as server,
    ):
        work, home = Path(folder, "work"), Path(folder, "home")
        work.mkdir()
        home.mkdir()
        (work / "note.txt").write_text(f"{SECRET}\n")
        done = subprocess.run(
            command(programs, server.url, name),
            cwd=work,
            env={
                "PATH": os.environ["PATH"],
                "HOME": str(home),
                "CODEX_HOME": str(home),
                "ANTHROPIC_BASE_URL": server.url,
                "ANTHROPIC_API_KEY": "none",
                "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
                "OPENAI_BASE_URL": f"{server.url}/v1",
                "OPENAI_API_KEY": "none",
                "OPENAI_MODEL": name,
                "OPENCODE_CONFIG_CONTENT": opencode_config(server.url, name),
                "NO_PROXY": "127.0.0.1",
            },
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        is_patched = (work / "copy.txt").exists()
    has_all = SECRET in done.stdout and is_patched == ("apply_patch" in model.called)
    if done.returncode or not has_all:
        return f"exit {done.returncode}: {(done.stdout + done.stderr)[-1500:]}"
    return f"ok: called {', '.join(model.called)}, of {len(model.offered)} tools"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "programs", type=Path, help="the folder of the agents, as node_modules/.bin"
    )
    known = f"default: {' '.join(AGENTS)}"
    parser.add_argument("agents", nargs="*", choices=[*AGENTS, []], metavar="AGENT", help=known)
    args = parser.parse_args()
    programs = args.programs.resolve()
    print("| agent | model | result |\n|---|---|---|")
    for agent in args.agents or AGENTS:
        command, names = AGENTS[agent]
        version = subprocess.run(
            [programs / agent, "--version"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for name in names:
            print(f"| {agent}: {version} | `{name}` | {try_agent(command, programs, name)} |")


if __name__ == "__main__":
    main()
