"""A server of two ranks over gloo: it has one rank's tokens, and ends when one rank dies.

The oracle is the engine alone, in this process. Every plan of the ranks is compared.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from helpers.running_server import RunningServer, assert_nothing_left
from minisgl.llm import LLM, SamplingParams

MODEL = "minisgl-builtin"
FLAGS = ("--tp", "2", "--dtype", "float32", "--num-pages", "64", "--max-prefill-length", "32")
FLAGS += ("--hang-timeout", "600")
STEM = "One rank counts pages and the other counts them too. " * 4
PROMPTS = [f"{STEM}What is {a} + {a}?" for a in range(12, 16)] + ["Hi", "The quick brown fox"]
NUM_TOKENS = 12


@pytest.fixture(scope="module")
def alone() -> list[str]:
    """Return the answer of one rank."""
    with LLM(dtype="float32", num_pages=64, max_prefill_length=32, progress=False) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
        return [output.text for output in llm.generate(PROMPTS, params)]


def wait_until_not_ready(client: openai.OpenAI) -> None:
    """Ask until the answer is an error, which is raised; a tenth of --hang-timeout at most."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        client.get("/../ready", cast_to=object)


def check_metrics(server: RunningServer) -> None:
    deadline = time.monotonic() + 60  # a rank reports once a second, and when it is idle
    while True:
        page = httpx.get(f"{server.url}/metrics").text.splitlines()
        pairs = (line.rsplit(" ", 1) for line in page if line and line[0] != "#")
        samples = {name: float(value) for name, value in pairs}
        steps = [samples.get(f'minisgl_steps_total{{rank="{rank}"}}') for rank in range(2)]
        if steps[0] is not None and steps[0] == steps[1]:
            break
        assert time.monotonic() < deadline, steps
        time.sleep(0.1)
    for rank in range(2):
        assert samples[f'minisgl_peak_memory_bytes{{rank="{rank}"}}'] > 50e6  # Python and torch
        assert samples[f'minisgl_step_seconds_total{{part="wait",rank="{rank}"}}'] > 0
    assert samples['minisgl_output_tokens_total{rank="0"}'] >= NUM_TOKENS * len(PROMPTS)
    assert 'minisgl_output_tokens_total{rank="1"}' not in samples


def check_a_rank_that_cannot_write(client: openai.OpenAI, folder: Path) -> None:
    client.post("/../start_profile", cast_to=object)
    now = time.time()
    for second in range(60):  # folders where torch of rank 1 would write
        name = time.strftime("%Y%m%d-%H%M%S", time.localtime(now + second))
        for number in ("", "-2"):
            (folder / f"{name}{number}-rank1.json.tmp").mkdir()
    with pytest.raises(openai.InternalServerError) as caught:
        client.post("/../stop_profile", cast_to=object)
    told = re.search(
        r"rank 1 failed: cannot write the trace \S+-rank1.json: torch could not .*; "
        r"rank 0 wrote (\S+-rank0.json)",
        str(caught.value),
    )
    assert told, caught.value
    assert json.loads(Path(told[1]).read_text())["traceEvents"]
    with pytest.raises(openai.ConflictError, match="no profile is running"):
        client.post("/../stop_profile", cast_to=object)


def complete(client: openai.OpenAI, prompt: Any, **fields: Any) -> Any:
    settings = {"temperature": 0.0, "max_tokens": NUM_TOKENS, "extra_body": {"ignore_eos": True}}
    return client.completions.create(model=MODEL, prompt=prompt, **(settings | fields))


def test_a_rank_that_is_killed_during_the_start() -> None:
    with RunningServer(*FLAGS) as server:
        server.wait_for("(starting )", "err")
        # A child that is stopped before it runs its own program holds up its parent for ever.
        while len(workers := [p for p in server.family()[1:] if "-c" in p.cmdline()]) < 3:
            time.sleep(0.01)
        helper, engine_0, engine_1, *_ = sorted(workers, key=lambda p: p.create_time())
        engine_1.suspend()  # it still imports; engine-0 will wait for it
        server.wait_for("(the tokenizer-0) is ready", "err")
        engine_1.kill()
        assert server.ended() == 1
        *_, last = server.output["err"].splitlines()
        assert "E [server] the engine-1 process was killed by signal 9, as the system" in last
        assert "engine-0" not in server.output["err"]
        assert_nothing_left(server, [helper, engine_0])


def test_ranks_serve_as_one_and_end_together(alone: list[str], launch: Any, tmp_path: Path) -> None:
    """One test for one start of a server. Without overlap: test_nodes.py. Rank 0 is killed in
    test_llm_ranks.py."""
    of_torch = str(tmp_path / "torch")  # its profiler makes this folder, else beside the sockets
    env = {"MINISGL_CHECK_PLANS": "1", "TORCHINDUCTOR_CACHE_DIR": of_torch}
    server = launch(*FLAGS, "--profile-dir", str(tmp_path), **env)
    with server.client() as client:
        # Together: chunked prefill, prefix hits, decodes beside chunks.
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            answers = list(pool.map(lambda prompt: complete(client, prompt), PROMPTS))
        assert [answer.choices[0].text for answer in answers] == alone
        again = complete(client, PROMPTS[0])
        assert again.choices[0].text == alone[0]
        assert again.usage.prompt_tokens_details.cached_tokens >= 16

        stop = alone[-1][len(alone[-1]) // 2 :][:4]
        cut = complete(client, PROMPTS[-1], stop=stop)
        assert cut.choices[0].text == alone[-1][: alone[-1].index(stop)]

        # Idle, nothing else would tell that one does nothing.
        os.kill(server.pid("engine-1"), signal.SIGSTOP)
        with pytest.raises(openai.APIStatusError, match="has given no sign of life for"):
            wait_until_not_ready(client)
        assert client.get("/../health", cast_to=object) == {"status": "ok"}
        os.kill(server.pid("engine-1"), signal.SIGCONT)
        assert client.get("/../ready", cast_to=object) == {"status": "ready"}

        # Each rank reports its own work; requests are reported once.
        assert client.post("/../start_profile", cast_to=object) == {"status": "profiling"}
        complete(client, PROMPTS[1])
        stopped: Any = client.post("/../stop_profile", cast_to=object)
        assert [Path(trace).stem[-5:] for trace in stopped["traces"]] == ["rank0", "rank1"]
        assert all(Path(trace).exists() for trace in stopped["traces"])
        check_a_rank_that_cannot_write(client, tmp_path)
        check_metrics(server)

        for _ in range(2):
            stream = complete(client, PROMPTS[0], stream=True, max_tokens=700)
            next(iter(stream))
            stream.close()
        # Would not fit beside one that was not aborted.
        ids = [100 + index % 50 for index in range(950)]
        assert complete(client, ids).usage.completion_tokens == NUM_TOKENS

        os.kill(server.pid("detokenizer"), signal.SIGSTOP)  # no answer goes on
        with ThreadPoolExecutor(2) as pool:
            asked = [pool.submit(complete, client, p, max_tokens=700) for p in PROMPTS[:2]]
            server.wait_open(2)
            family = server.family()
            os.kill(server.pid("engine-1"), signal.SIGKILL)
            for answer in asked:
                with pytest.raises(openai.APIError, match="engine-1 process was killed by"):
                    answer.result()
        assert server.ended() == 1
        assert "the engine-1 process was killed by signal 9" in server.output["err"]
    assert_nothing_left(server, family)
