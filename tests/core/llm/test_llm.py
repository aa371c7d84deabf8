"""`LLM` with the built-in model: answers, refusals, and that no request is left."""

from __future__ import annotations

import os
import pickle
import signal
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
import torch

from minisgl.errors import (
    ConfigError,
    InvalidRequest,
    InvalidSampling,
    PromptTooLong,
    RequestError,
)
from minisgl.llm import LLM, SamplingParams
from minisgl.llm.engines import OwnEngine

GREEDY = SamplingParams(temperature=0.0, max_tokens=40)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(progress=False) as llm:
        yield llm


def ask(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


def test_chat_answers(llm: LLM) -> None:
    (output,) = llm.chat(ask("What is 12 + 30?"), GREEDY)
    assert "42" in output.text
    assert output.finish_reason == "stop"
    assert output.num_output_tokens == len(output.token_ids)


def test_template_variables_are_one_dictionary(llm: LLM) -> None:
    """A misspelt or misplaced option is not taken for a variable."""
    with pytest.raises(TypeError, match="max_tokens"):
        llm.chat(ask("Hi"), max_tokens=3)
    params = SamplingParams(temperature=0.0, max_tokens=4)
    whole, bare = (
        llm.chat(ask("Hi"), params, chat_template_kwargs={"add_generation_prompt": wanted})[0]
        for wanted in (True, False)
    )
    assert whole.num_prompt_tokens > bare.num_prompt_tokens


def test_a_batch_keeps_its_order(llm: LLM) -> None:
    sums = [(3, 4), (20, 31), (50, 8), (11, 11), (40, 25)]
    outputs = llm.chat([ask(f"What is {a} + {b}?") for a, b in sums], GREEDY)
    for (a, b), output in zip(sums, outputs, strict=True):
        assert str(a + b) in output.text


def test_text_and_ids_are_the_same_prompt(llm: LLM) -> None:
    by_text, by_text_in_list = llm.generate("count"), llm.generate(["count"])
    assert by_text[0].token_ids == by_text_in_list[0].token_ids
    ids = [10, 11, 12]
    assert llm.generate(ids)[0].token_ids == llm.generate([ids, ids])[1].token_ids


@pytest.mark.parametrize(("args", "fields"), [((), {"n": 2}), ((0.5,), {})])
def test_params_that_do_not_exist_are_refused(args: Any, fields: Any) -> None:
    with pytest.raises(
        InvalidSampling, match=r"has no field for .*the fields are temperature, "
    ) as e:
        SamplingParams(*args, **fields)
    assert ("n is an argument of generate, chat and stream" in str(e.value)) == bool(fields)
    assert msgspec.structs.replace(GREEDY, top_k=3).top_k == 3
    assert pickle.loads(pickle.dumps(GREEDY)) == GREEDY


def test_a_sigint_handler_outside_python_stays(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(signum: int, handler: Any) -> None:
        raise AssertionError("what is there could not be put back")

    monkeypatch.setattr("signal.getsignal", lambda signum: None)
    monkeypatch.setattr("signal.signal", refuse)
    (output,) = llm.generate("Once", SamplingParams(max_tokens=3, ignore_eos=True))
    assert len(output.token_ids) == 3


def test_options_may_be_numpys_numbers(llm: LLM) -> None:
    options: dict[str, Any] = {
        "page_size": np.int64(16),
        "num_pages": np.uint8(50),
        "max_running_requests": np.int32(4),
        "max_seq_len": np.uint8(100),
        "max_prefill_length": np.uint8(32),
        "tp": np.int64(1),
    }
    params = SamplingParams(temperature=0, max_tokens=5)
    (expected,) = llm.generate("Once upon a time " * 5, params)
    with LLM(**options, device="cpu") as other:
        (output,) = other.generate("Once upon a time " * 5, params)
    assert output.token_ids == expected.token_ids
    with pytest.raises(ConfigError, match="no memory is left for the KV cache"):
        LLM(memory_ratio=np.float32(1e-6))


def test_params_may_be_numpys_numbers(llm: LLM) -> None:
    plain = SamplingParams(
        temperature=0.75, top_p=0.5, top_k=5, seed=-5, max_tokens=6, stop_token_ids=(3,)
    )
    numpys = SamplingParams(
        temperature=np.float32(0.75),
        top_p=np.float16(0.5),
        top_k=np.int32(5),
        seed=np.int64(-5),
        max_tokens=np.int64(6),
        stop_token_ids=[np.uint8(3)],
    )
    assert numpys == plain
    assert msgspec.msgpack.encode(numpys) == msgspec.msgpack.encode(plain)
    (expected,), (output,) = llm.generate("Once", plain), llm.generate("Once", numpys)
    assert output.token_ids == expected.token_ids


def test_ids_may_come_as_arrays(llm: LLM) -> None:
    ids = [10, 11, 12]
    (expected,) = llm.generate(ids, GREEDY)
    prompts: list[Any] = [np.array(ids), list(np.array(ids)), [np.array(ids)], np.array([ids])]
    for prompt in [*prompts, torch.tensor(ids)]:
        assert llm.generate(prompt, GREEDY)[0].token_ids == expected.token_ids


def test_arguments_of_a_wrong_type_are_refused(llm: LLM) -> None:
    wrong: Any
    for wrong in (None, 5, [None], [1.5], [[1, "a"]], np.array(3), b"a", [b"a"], [True]):
        with pytest.raises(InvalidRequest, match="a prompt is a text or a list of token ids"):
            llm.generate(wrong)
    for wrong in ({"max_tokens": 3}, [{"max_tokens": 3}], 5, "x"):
        with pytest.raises(InvalidRequest, match="must be SamplingParams"):
            llm.generate("a", wrong)
    for wrong in ("hi", ["hi"], None, 5, ask("hi")[0], [5], [ask("hi"), 5]):
        with pytest.raises(InvalidRequest, match="messages must be a list like"):
            llm.chat(wrong)


def test_params_for_each(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=n, ignore_eos=True, seed=1) for n in (1, 7)]
    assert [output.num_output_tokens for output in llm.generate(["a", "b"], params)] == [1, 7]
    with pytest.raises(InvalidRequest, match="as many sampling_params as prompts, 2, or"):
        llm.generate(["a", "b"], params[:1])


def test_stop_string(llm: LLM) -> None:
    (output,) = llm.chat(
        ask("Count from 3 to 9."), SamplingParams(temperature=0.0, max_tokens=60, stop=("6",))
    )
    assert output.stop_match == "6"
    assert output.finish_reason == "stop"
    assert "5" in output.text
    assert "6" not in output.text


def test_a_stop_string_ends_the_computation(llm: LLM) -> None:
    assert isinstance(llm._engine, OwnEngine)
    stats = llm._engine.scheduler.stats
    before = stats.num_output_tokens
    stopped = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True, stop=("6",))
    (output,) = llm.chat(ask("Count from 3 to 9."), stopped)
    llm.generate("a", SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
    num_late = stats.num_output_tokens - before - output.num_output_tokens - 20
    assert 0 <= num_late <= 2, "with overlap, the stop is seen late"


def test_a_refused_prompt_ends_the_others(llm: LLM) -> None:
    assert isinstance(llm._engine, OwnEngine)
    stats = llm._engine.scheduler.stats
    before = stats.num_output_tokens
    long = SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True)
    with pytest.raises(PromptTooLong, match="prompt 1: the prompt has 5000 tokens") as raised:
        llm.generate([[5], [5] * 5000], long)
    assert raised.value.got == 5000
    with pytest.raises(RequestError, match="prompt 1: the prompt has 5000 tokens"):
        llm.generate([[5], [5] * 5000], long, n=2)  # not a number of requests
    assert stats.num_output_tokens - before <= 6


def test_top_logprobs_and_truncated_prompts(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=4, logprobs=True, top_logprobs=2)
    prompt = list(range(100, 140))
    (asked,) = llm.generate(prompt, params)
    assert asked.top_logprobs is not None
    for token, logprob, top in zip(
        asked.token_ids, asked.logprobs or [], asked.top_logprobs, strict=True
    ):
        assert len(top) == 2
        assert max(top, key=lambda id: top[id]) == token
        assert top[token] == pytest.approx(logprob, abs=1e-5)
    cut = SamplingParams(temperature=0.0, max_tokens=4, truncate_prompt_tokens=7)
    (truncated,) = llm.generate(prompt, cut)
    (short,) = llm.generate(prompt[-7:], SamplingParams(temperature=0.0, max_tokens=4))
    assert truncated.num_prompt_tokens == 7
    assert truncated.token_ids == short.token_ids
    with pytest.raises(InvalidSampling, match="needs logprobs"):
        SamplingParams(top_logprobs=1)
    with pytest.raises(InvalidSampling, match="from 0 to 20"):
        SamplingParams(logprobs=True, top_logprobs=21)


def test_only_requests_that_ask_have_logprobs(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=20, logprobs=True)
    asked, plain = llm.chat([ask("What is 12 + 30?")] * 2, [params, GREEDY])
    assert asked.logprobs is not None
    assert len(asked.logprobs) == len(asked.token_ids)
    assert all(value <= 0 for value in asked.logprobs)
    assert max(asked.logprobs) > -0.1  # a greedy answer of a model that knows it
    assert plain.logprobs is None
    assert asked.token_ids == plain.token_ids[:20]


def test_only_calls_with_one_cache_salt_share_a_prefix(llm: LLM) -> None:
    prompt = "Tenants share no cache. " * 8
    salts = ["alice", "bob", "", "alice"]
    outputs = [llm.generate(prompt, GREEDY, cache_salt=salt)[0] for salt in salts]
    assert [output.num_cached_tokens > 0 for output in outputs] == [False, False, False, True]
    assert len({output.text for output in outputs}) == 1
    with pytest.raises(InvalidRequest, match="at most 256 characters"):
        llm.generate(prompt, GREEDY, cache_salt="x" * 257)
    with pytest.raises(InvalidRequest, match="cache_salt must be a string"):
        llm.generate(prompt, GREEDY, cache_salt="\ud800")  # no rank could get it


def test_the_second_turn_is_cached(llm: LLM) -> None:
    turns = ask("What is a radix cache?")
    (first,) = llm.chat(turns, GREEDY)
    turns += [{"role": "assistant", "content": first.text}, *ask("Thanks!")]
    (second,) = llm.chat(turns, GREEDY)
    assert second.num_cached_tokens >= first.num_prompt_tokens // 16 * 16


def test_a_refusal_names_the_prompt_and_leaves_no_request(llm: LLM) -> None:
    with pytest.raises(RequestError, match=r"prompt 1: the prompt has \d+ tokens"):
        llm.generate(["a", "b " * 5000])
    for prompts in (["a", ""], ["a", [-1]], [[1], "\ud800", "c"]):
        with pytest.raises(RequestError, match=r"^prompt 1: "):
            llm.generate(prompts, n=3)
    with pytest.raises(RequestError, match=r"^prompt 1: messages\[0\].content is missing"):
        llm.chat([ask("hi"), [{"role": "user"}]])
    assert (
        llm.generate("a", SamplingParams(max_tokens=2, ignore_eos=True))[0].num_output_tokens == 2
    )


@pytest.mark.parametrize("prompt", ["", [], [1, "x"], [-1], [10**9]])
def test_bad_prompts(llm: LLM, prompt: object) -> None:
    with pytest.raises(InvalidRequest):
        llm.generate([prompt])


def test_threads_wait_for_each_other(llm: LLM) -> None:
    texts: dict[int, str] = {}

    def work(a: int) -> None:
        texts[a] = llm.chat(ask(f"What is {a} + 10?"), GREEDY)[0].text

    threads = [threading.Thread(target=work, args=(a,)) for a in range(20, 24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(str(a + 10) in texts[a] for a in range(20, 24))


def test_without_a_terminal_there_is_no_bar(capfd: pytest.CaptureFixture[str]) -> None:
    with LLM(num_pages=64) as llm:
        llm.generate("a", GREEDY)
    assert capfd.readouterr().err == ""


def test_calls_of_a_closed_llm_are_refused() -> None:
    llm = LLM(progress=False, num_pages=64)
    llm.close()
    llm.close()
    with pytest.raises(ConfigError, match="closed"):
        llm.generate("a")


@pytest.fixture
def handled() -> Iterator[None]:
    """The handler of SIGUSR1 is as before after the test."""
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.usefixtures("handled")
def test_a_signal_handler_may_close_it() -> None:
    llm = LLM(progress=False, num_pages=64)
    launch = llm._engine.engine.launch
    num_steps = 0

    def signalled(plan: object) -> object:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 5:
            os.kill(os.getpid(), signal.SIGUSR1)
        return launch(plan)

    llm._engine.engine.launch = signalled
    signal.signal(signal.SIGUSR1, lambda *_: llm.close())
    with pytest.raises(ConfigError, match="closed while it computed"):
        llm.generate("a", SamplingParams(max_tokens=200, ignore_eos=True))
    assert not hasattr(llm._engine.engine, "model")  # its memory is released
    with pytest.raises(ConfigError, match="closed"):
        llm.generate("a")


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_fork_is_refused(llm: LLM) -> None:
    llm.generate("a", GREEDY)
    stream = llm.stream("a", GREEDY)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            del stream
            llm.generate("a", GREEDY)
        except ConfigError as error:
            llm.close()
            code = 0 if "forked process" in str(error) else 2
        finally:
            os._exit(code)
    process = psutil.Process(child)
    try:
        assert process.wait(timeout=60) == 0
    except psutil.TimeoutExpired:
        process.kill()
        raise
    assert list(stream)[-1].finish_reason == "stop"


def test_an_error_inside_the_loop_closes_it() -> None:
    llm = LLM(progress=False, num_pages=64)

    def launch(plan: object) -> None:
        raise RuntimeError("the device is gone")

    llm._engine.engine.launch = launch
    with pytest.raises(RuntimeError, match="the device is gone"):
        llm.generate("a")
    with pytest.raises(ConfigError, match="closed"):
        llm.generate("a")
