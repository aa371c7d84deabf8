"""A real server with the built-in model: its processes serve, and end in several ways."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from helpers.endless import endless_answer, endless_flags
from helpers.running_server import RunningServer, assert_nothing_left, hangups


@pytest.fixture(scope="module")
def server(pooled: RunningServer) -> RunningServer:
    return pooled


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with server.client() as client:
        yield client


def ask(text: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": "minisgl-builtin", "messages": messages, **fields}


# --- serving -------------------------------------------------------------------------------------


def test_chat_streaming_and_not(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**ask("What is a radix cache?", max_tokens=24))
    assert whole.usage
    assert 0 < whole.usage.completion_tokens <= 24
    chunks = list(
        client.chat.completions.create(
            **ask("What is a radix cache?", max_tokens=24),
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert text == whole.choices[0].message.content  # greedy, and the second hits the cache
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    usage = chunks[-1].usage
    assert usage
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.prompt_tokens_details
    assert usage.prompt_tokens_details.cached_tokens


def test_stop_strings_are_cut_and_length_is_reported(client: openai.OpenAI) -> None:
    prompt = "The quick brown fox"
    free = client.completions.create(
        model="minisgl-builtin", prompt=prompt, max_tokens=32, extra_body={"ignore_eos": True}
    )
    text = free.choices[0].text
    assert free.choices[0].finish_reason == "length"
    stop = text[len(text) // 2 :][:3]
    for stream in (False, True):
        answer = client.completions.create(
            model="minisgl-builtin", prompt=prompt, max_tokens=32, stop=stop, stream=stream
        )
        parts = list(answer) if stream else [answer]
        assert "".join(part.choices[0].text for part in parts) == text[: text.index(stop)]
        assert parts[-1].choices[0].finish_reason == "stop"


def test_prompts_of_every_form_agree(client: openai.OpenAI, server: RunningServer) -> None:
    generated = httpx.post(
        f"{server.url}/generate", json={"text": "One two", "max_tokens": 4}, timeout=60
    ).json()
    assert len(generated["token_ids"]) == generated["usage"]["completion_tokens"]
    both = client.completions.create(
        model="minisgl-builtin", prompt=["One two", "One two"], max_tokens=4
    )
    assert [choice.text for choice in both.choices] == [generated["text"]] * 2


def test_a_small_pool_bounds_the_context(server: RunningServer) -> None:
    [entry] = httpx.get(f"{server.url}/v1/models", timeout=60).json()["data"]
    encoded = httpx.post(f"{server.url}/tokenize", json={"prompt": "a"}, timeout=60).json()
    assert entry["context_length"] == encoded["max_model_len"] == 1024
    body = {"messages": [{"role": "user", "content": "Count."}], "max_tokens": 20_000}
    answer = httpx.post(f"{server.url}/v1/messages", json=body, timeout=60).json()
    assert answer["stop_reason"] in ("end_turn", "model_context_window_exceeded")


def test_an_aborted_stream_gives_its_pages_back(
    client: openai.OpenAI, server: RunningServer
) -> None:
    # Each takes a third of the pool; if one in ten kept its pages, the last could not finish.
    prompt = [100] * 300
    for _ in range(10):
        stream = client.completions.create(
            model="minisgl-builtin", prompt=prompt, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        stream.close()
    answer = client.completions.create(
        model="minisgl-builtin",
        prompt=[101] * 1000,
        max_tokens=20,
        extra_body={"ignore_eos": True},
    )
    assert answer.usage
    assert answer.usage.completion_tokens == 20
    assert httpx.get(f"{server.url}/ready", timeout=60).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("completions", {"prompt": ""}, "empty"),
        ("completions", {"prompt": [100] * 1100, "max_tokens": 1}, "1,?024"),
        ("completions", {"prompt": [100] * 5000, "max_tokens": 1}, "5,?000"),
        ("completions", {"prompt": [100] * 1000, "max_tokens": 500}, "1,?024"),
        ("completions", {"prompt": [2**31 - 1]}, "2,?147,?483,?647"),
        ("completions", {"prompt": "a", "stop_token_ids": [1408]}, "stop_token_ids .* 1407"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_refusals_of_the_workers(
    server: RunningServer, path: str, body: dict[str, Any], says: str, stream: bool
) -> None:
    response = httpx.post(f"{server.url}/v1/{path}", json=body | {"stream": stream}, timeout=60)
    assert response.status_code == 400, response.text
    assert re.search(says, response.json()["error"]["message"]), response.text
    assert httpx.get(f"{server.url}/ready", timeout=60).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("v1/completions", {"prompt": "a" * 5000}, "prompt"),
        (
            "v1/chat/completions",
            {"messages": [{"role": "user", "content": "a" * 5000}]},
            "messages",
        ),
        ("generate", {"text": "a" * 5000}, "text"),
        ("generate", {"input_ids": [100] * 5000}, "input_ids"),
    ],
)
def test_a_refusal_names_the_requests_field(
    server: RunningServer, path: str, body: dict[str, Any], param: str
) -> None:
    response = httpx.post(f"{server.url}/{path}", json=body, timeout=60)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert error["message"].startswith(f"the field {param} has")


def test_ctrl_c_during_imports(tmp_path: Path) -> None:
    (tmp_path / "msgspec.py").write_text("raise KeyboardInterrupt")
    python_path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-m", "minisgl"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": python_path},
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGHUP])
def test_a_terminals_signal_during_the_start(launch: Any, sent: signal.Signals) -> None:
    with hangups(signal.SIG_DFL):
        server = launch("--num-tokenizer", "0")
    server.wait_for("(starting the engine)", "err")
    family = server.family()
    os.killpg(server.process.pid, sent)  # to every process, as a terminal does
    assert server.ended() == 0
    assert_nothing_left(server, family)


# --- ending --------------------------------------------------------------------------------------


def test_sigterm_ends_open_streams_and_all_processes(
    launch: Any, server: RunningServer, endless: Path
) -> None:
    """It runs beside the module's server: two servers on one machine do not meet."""
    other = launch("--num-tokenizer", "2", "--drain-timeout", "0.3", *endless_flags(endless))
    with other.client() as client:
        family = other.family()
        assert len(family) >= 5
        stream = endless_answer(client)
        other.process.terminate()
        with pytest.raises(openai.APIError, match="shutting down") as cut:
            list(stream)
        assert cut.value.code == "draining"
    assert other.ended() == 0
    assert_nothing_left(other, family)
    assert httpx.get(f"{server.url}/ready", timeout=60).status_code == 200


LOOP = "{% for i in range(99999) %}"


def test_nohup_outlives_a_closed_terminal_and_no_worker_outlives_a_killed_server(
    launch: Any, endless: Path, tmp_path: Path
) -> None:
    """One test for one start of a server. It is killed while the template's process is in a loop
    that may take 7 s of a core."""
    folder = tmp_path / "endless"
    shutil.copytree(endless, folder)
    (folder / "chat_template.jinja").write_text(LOOP * 2 + "{% endfor %}" * 2)
    with hangups(signal.SIG_IGN):
        server = launch(*endless_flags(folder))
    with server.client() as client:
        os.killpg(server.process.pid, signal.SIGHUP)
        endless_answer(client).close()
    assert server.process.poll() is None
    with ThreadPoolExecutor(1) as threads:
        url = f"{server.url}/v1/chat/completions"
        body = ask("a" * 12_000_000) | {"model": "endless"}
        post = threads.submit(httpx.post, url, json=body, timeout=150)
        while not (renderer := busy_renderer(server)):
            assert not post.done(), post.result().text
            time.sleep(0.02)
        family = server.family()
        assert renderer in family
        server.process.kill()
        with pytest.raises(httpx.TransportError):
            post.result()
    assert_nothing_left(server, family)


def busy_renderer(server: RunningServer) -> psutil.Process | None:
    """Return a renderer that has computed for 0.5 s, if there is one; its start takes 0.1 s."""
    for process in server.family():
        with contextlib.suppress(psutil.Error):
            if "minisgl.templates.render" in process.cmdline() and process.cpu_times().user > 0.5:
                return process
    return None


REFUSING = """{% if messages[0].content == "Hi" %}{{ raise_exception('roles must alternate') }}
{% endif %}{{ messages[7].content.upper() }}"""


def test_a_broken_template_fails_only_chats_and_a_killed_worker_ends_the_server(
    launch: Any, endless: Path, tmp_path: Path
) -> None:
    """One test for one start of a server. Killed engines: test_ranks.py and test_restart.py. A
    stopped tokenizer: test_hangs.py."""
    folder = tmp_path / "endless"
    shutil.copytree(endless, folder)
    (folder / "chat_template.jinja").write_text(REFUSING)
    server = launch(*endless_flags(folder), "--hang-timeout", "600")
    with server.client() as client:
        for text, says in [("Hi", "roles must alternate"), ("No", "chat template")] * 2:
            with pytest.raises(openai.BadRequestError, match=says):
                client.chat.completions.create(**ask(text) | {"model": "endless"})
        family = server.family()
        stream = endless_answer(client)
        os.kill(server.pid("detokenizer"), signal.SIGKILL)
        with pytest.raises(openai.APIError, match="the detokenizer process was killed by signal 9"):
            list(stream)
    assert server.ended() == 1
    assert "the detokenizer process was killed by signal 9" in server.output["err"]
    assert_nothing_left(server, family)
