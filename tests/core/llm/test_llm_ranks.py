"""`LLM(tp=2)` on a CPU: the tokens of one rank, from processes that are its own."""

from __future__ import annotations

import gc
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from minisgl.errors import ConfigError, PromptTooLong, StartupFailed, WorkerDied
from minisgl.llm import LLM, SamplingParams
from minisgl.llm.session import Session
from minisgl.message import AbortMsg, SchedulerMsg

OPTIONS: dict[str, Any] = {"dtype": "float32", "num_pages": 96, "progress": False}
STEM = "One rank counts pages and the other counts them too. " * 4
PROMPTS = [f"{STEM}What is {a} + {a}?" for a in range(12, 15)] + ["Hi", "The quick brown fox"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=16)


def ranks() -> list[psutil.Process]:
    """Of all LLMs of this test's process."""
    return [
        child
        for child in psutil.Process().children()
        if "multiprocessing.spawn" in " ".join(child.cmdline()) or "engine-" in child.name()
    ]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINISGL_CHECK_PLANS", "1")
        llm = LLM(tp=2, max_prefill_length=32, **OPTIONS)
    with llm:
        yield llm


@pytest.fixture(scope="module")
def alone() -> Iterator[LLM]:
    """One rank."""
    with LLM(max_prefill_length=32, **OPTIONS) as alone:
        yield alone


def in_generate(llm: LLM, act: Callable[[], None]) -> None:
    """Act in a thread once this thread waits for the answer of a call, which the loop has."""

    def work() -> None:
        while not llm._session._calls or Session._wait.__code__ not in (
            frame.f_code for frame, _ in traceback.walk_stack(sys._current_frames()[this])
        ):
            time.sleep(0.01)
        act()

    this = threading.get_ident()
    threading.Thread(target=work, daemon=True).start()


def rank_process(llm: LLM, rank: int) -> psutil.Process:
    return psutil.Process(llm._engine._workers.processes[rank].process.pid)


@pytest.mark.needs("minisgl_zoo")
def test_the_embeddings_of_one_rank(llm: LLM, alone: LLM) -> None:
    expected = alone.embed(PROMPTS, pooling="mean")
    assert np.abs(llm.embed(PROMPTS, pooling="mean") - expected).max() < 1e-5


def test_the_tokens_of_one_rank(llm: LLM, alone: LLM) -> None:
    expected = alone.generate(PROMPTS, GREEDY)
    outputs = llm.generate(PROMPTS, GREEDY)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]
    assert [output.text for output in outputs] == [output.text for output in expected]
    (again,) = llm.generate(PROMPTS[0], GREEDY)
    assert again.token_ids == expected[0].token_ids
    assert again.num_cached_tokens > 0


def test_draws_of_many_rows_are_those_of_one_rank(llm: LLM, alone: LLM) -> None:
    """Each rank samples a half of eight rows, whose settings differ."""
    settings = [
        SamplingParams(temperature=0.5 + row / 8, top_p=1 - row / 20, top_k=row * 3, seed=row,
                       max_tokens=12, ignore_eos=True)
        for row in range(7)
    ]  # fmt: skip
    settings.append(SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
    prompts = [f"{row} and" for row in range(8)]
    expected = alone.generate(prompts, settings)
    outputs = llm.generate(prompts, settings)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]


@pytest.mark.needs("minisgl_zoo")
def test_grammars_and_penalties_are_the_same_on_each_rank(llm: LLM, alone: LLM) -> None:
    forms: list[dict[str, Any]] = [
        {"json": {"type": "array", "items": {"type": "integer", "maximum": 99}, "maxItems": 4}},
        {"regex": r"[a-z]{2,9}!"},
    ]
    settings = [SamplingParams(seed=1, max_tokens=24, structured_outputs=form) for form in forms]
    penalties: Any = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "bad_words": ("the",)}
    settings.append(SamplingParams(seed=2, max_tokens=24, **penalties))
    settings.append(SamplingParams(seed=3, max_tokens=24, structured_outputs=forms[0], **penalties))
    settings.append(GREEDY)
    expected = alone.generate(PROMPTS, settings)
    outputs = llm.generate(PROMPTS, settings)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]
    assert re.fullmatch("[a-z]{2,9}!", outputs[1].text)


def test_a_refused_prompt_fails_only_its_call(llm: LLM) -> None:
    with pytest.raises(PromptTooLong, match=r"prompt 1: .* 5000 tokens.*num_pages") as raised:
        llm.generate([[5] * 10, [5] * 5000], GREEDY)
    assert (raised.value.limit, raised.value.got) == (96 * 16, 5000)
    assert llm.generate("Hi", GREEDY)[0].text


def test_ctrl_c_leaves_the_ranks_usable(llm: LLM) -> None:
    rank = rank_process(llm, 1)
    rank.suspend()  # no step ends

    def act() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        rank.resume()

    in_generate(llm, act)
    with pytest.raises(KeyboardInterrupt):
        llm.generate("a", SamplingParams(max_tokens=1400, ignore_eos=True))
    assert llm.generate("Hi", GREEDY)[0].text


def test_a_second_ctrl_c_does_not_wait_for_a_stuck_rank() -> None:
    before = ranks()
    llm = LLM(tp=2, **OPTIONS)
    mine = [process for process in ranks() if process not in before]
    rank_process(llm, 1).suspend()

    def act() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        while not any(call.error for call in list(llm._session._calls.values())):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    in_generate(llm, act)
    with pytest.raises(KeyboardInterrupt):
        llm.generate("a", SamplingParams(max_tokens=1400, ignore_eos=True))
    _, alive = psutil.wait_procs(mine, timeout=60)
    assert not alive
    with pytest.raises(ConfigError, match="closed"):
        llm.generate("a")


def test_a_second_ctrl_c_while_the_first_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(**OPTIONS)
    put = llm._session._put

    def interrupted(messages: Sequence[SchedulerMsg]) -> None:
        put(messages)
        if any(isinstance(message, AbortMsg) for message in messages):
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(llm._session, "_put", interrupted)
    in_generate(llm, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        llm.generate("a", SamplingParams(max_tokens=1400, ignore_eos=True))
    with pytest.raises(ConfigError, match="closed"):
        llm.generate("a")


def test_a_killed_rank_raises_an_error_soon() -> None:
    before = ranks()
    llm = LLM(tp=2, **OPTIONS)
    mine = [process for process in ranks() if process not in before]
    assert len(mine) == 2
    victim = rank_process(llm, 0)  # killed rank 1: server/test_ranks.py
    victim.suspend()  # no step ends

    def act() -> None:
        victim.kill()

    in_generate(llm, act)
    with pytest.raises(WorkerDied, match="the engine-0 process was killed by signal 9"):
        llm.generate("a", SamplingParams(max_tokens=1400, ignore_eos=True))
    with pytest.raises(ConfigError, match="closed"):
        llm.generate("a")
    _, alive = psutil.wait_procs(mine, timeout=60)
    assert not alive


def test_ranks_end_when_the_llm_has_no_references() -> None:
    before = ranks()
    llm = LLM(tp=2, **OPTIONS)
    mine = [process for process in ranks() if process not in before]
    folder = llm._engine._workers.endpoints.folder
    assert folder.exists()
    del llm
    gc.collect()
    _, alive = psutil.wait_procs(mine, timeout=60)
    assert not alive
    assert not folder.exists()


@pytest.mark.needs("minisgl_gateway")
def test_settings_that_cannot_work_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    before = ranks()
    with pytest.raises(ConfigError, match="tp must be a whole number from 1 to 1024, got 0"):
        LLM(tp=0, **OPTIONS)
    with pytest.raises(ConfigError, match="'none such'"):
        LLM(tp=2, **(OPTIONS | {"dtype": "none such"}))
    with pytest.raises(ConfigError, match=r"tp=5 needs a query head for each rank, .* has 4"):
        LLM(tp=5, **OPTIONS)
    with pytest.raises(ConfigError, match="ep splits experts over ranks, and"):
        LLM(tp=2, ep=True, **OPTIONS)
    with monkeypatch.context() as patch:
        patch.setattr("minisgl_gateway.early.num_gpus", lambda: 2)
        with pytest.raises(ConfigError, match="3 ranks on this machine need a GPU each, but torch"):
            LLM(tp=3, **OPTIONS)
    with pytest.raises(StartupFailed, match=r"engine could not start: num_pages=") as raised:
        LLM(tp=2, **(OPTIONS | {"num_pages": 10**9}))
    assert str(raised.value).count("num_pages") == 1  # both ranks said it
    assert ranks() == before


def test_a_daemonic_process_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of `multiprocessing.Pool` are."""
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)
    with pytest.raises(ConfigError, match=r"LLM\(tp=2\) starts 2 processes, which a daemonic proc"):
        LLM(tp=2, **OPTIONS)


SCRIPT = """
from minisgl.llm import LLM, SamplingParams
from minisgl.llm.session import Session
from minisgl.message import AbortMsg, SchedulerMsg
import os
print("once", flush=True)
llm = LLM(tp=2, dtype="float32", num_pages=64, progress=False)
out = llm.generate("The quick brown fox", SamplingParams(temperature=0.0, max_tokens=8))
print(len(out[0].token_ids) > 0, flush=True)
"""


def test_a_fork_that_closes_it_leaves_it_to_its_parent(llm: LLM) -> None:
    child = os.fork()
    if child == 0:
        try:
            llm._engine.close()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert len(ranks()) == 2
    assert llm.generate("The quick", SamplingParams(max_tokens=2))[0].num_output_tokens == 2


def test_a_script_needs_no_guard_and_no_close(sockets: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=150,
        env={**os.environ, "TMPDIR": str(sockets)},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["once", "True"]
    assert done.stderr == ""
    assert list(sockets.iterdir()) == []
