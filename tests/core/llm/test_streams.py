"""`LLM.stream`, `AsyncLLM`, threads of one `LLM`, choices, and what `import minisgl` imports."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from minisgl import LLM, AsyncLLM, Delta, RequestOutput, SamplingParams
from minisgl.core import Accepted, Failed, Token
from minisgl.errors import ConfigError, EngineError, InvalidRequest, RequestError
from minisgl.llm.session import Session
from minisgl.message import ExitMsg, UserMsg
from minisgl.tokenizer import Detokenizer

GREEDY = SamplingParams(temperature=0.0, max_tokens=40)
LONG = SamplingParams(temperature=0.0, max_tokens=1500, ignore_eos=True)
ASK = [{"role": "user", "content": "What is 12 + 30?"}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(progress=False, num_pages=512) as llm:
        yield llm


@pytest.fixture(scope="module")
def async_llm() -> Iterator[AsyncLLM]:
    llm = AsyncLLM(progress=False, num_pages=512)
    yield llm
    asyncio.run(llm.aclose())


def joined(parts: list[Delta | RequestOutput]) -> RequestOutput:
    """Check that the deltas make the output, which is last."""
    *deltas, output = parts
    assert isinstance(output, RequestOutput)
    assert all(isinstance(delta, Delta) for delta in deltas)
    assert "".join(delta.text for delta in deltas) == output.text
    assert [id for delta in deltas for id in delta.token_ids] == output.token_ids
    if output.logprobs is not None:
        logprobs = [one for delta in deltas for one in getattr(delta, "logprobs", None) or []]
        assert logprobs == output.logprobs
    return output


def test_import_minisgl_imports_nothing() -> None:
    script = (
        "import sys; before = set(sys.modules); import minisgl; "
        "new = set(sys.modules) - before - set(sys.stdlib_module_names); "
        "print(sorted(name for name in new if name.split('.')[0] not in sys.stdlib_module_names))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "['minisgl', 'minisgl.version']\n"
    with pytest.raises(ImportError, match="no_such_name"):
        from minisgl import no_such_name  # noqa: F401 - there is no such name


def test_a_stream_is_deltas_then_the_output_of_generate(llm: LLM) -> None:
    (expected,) = llm.chat(ASK, GREEDY)
    output = joined(list(llm.stream(ASK, GREEDY)))
    assert (output.text, output.token_ids) == (expected.text, expected.token_ids)
    sampling = SamplingParams(temperature=0.0, max_tokens=9, logprobs=True, top_logprobs=2)
    ids = llm.tokenizer.encode("count")
    (expected,) = llm.generate([ids], sampling)
    output = joined(list(llm.stream(ids, sampling)))
    assert (output.text, output.logprobs) == (expected.text, expected.logprobs)
    assert len(list(llm.stream("one two", sampling))) > 4  # not all at once
    (expected,) = llm.chat(tuple(ASK), GREEDY)
    assert joined(list(llm.stream(tuple(ASK), GREEDY))).text == expected.text


def test_wrong_streams_are_refused(llm: LLM) -> None:
    for prompt in (["a", "b"], [ASK, ASK], 5):
        with pytest.raises(InvalidRequest):
            llm.stream(prompt)
    with pytest.raises(InvalidRequest, match="enable_thinking is for chat templates"):
        llm.stream("a", chat_template_kwargs={"enable_thinking": False})
    wrong: Any = 5
    with pytest.raises(InvalidRequest, match="chat_template_kwargs is for chat templates"):
        llm.stream("a", chat_template_kwargs=wrong)
    with pytest.raises(RequestError, match="the prompt has"):
        list(llm.stream("b " * 5000))


def test_leaving_a_stream_ends_its_request(llm: LLM) -> None:
    for part in llm.stream("Once", LONG):
        assert isinstance(part, Delta)
        break
    del part
    gc.collect()
    wait_idle(llm)
    stream = llm.stream("Once", LONG)
    next(stream)
    stream.close()
    assert list(stream) == []
    wait_idle(llm)
    scheduler = llm._engine.scheduler
    assert len(scheduler.requests.running) == 0


def wait_idle(llm: LLM) -> None:
    deadline = time.monotonic() + 60
    while any(thread.name == "llm" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def num_calls(llm: LLM) -> int:
    """Return the number of open calls, with those that the loop has not taken."""
    with llm._session.lock:
        return len({*llm._session._calls.values(), *llm._session._outgoing})


def test_threads_run_as_one_batch(llm: LLM) -> None:
    """Four calls at once share steps: they take fewer than the sum of what each takes."""
    steps, num_expected = 0, 1
    launch = llm._engine.engine.launch

    def counted(plan: object) -> object:
        nonlocal steps
        steps += 1
        while steps == 1 and num_calls(llm) < num_expected:
            time.sleep(0.001)
        return launch(plan)

    llm._engine.engine.launch = counted
    sampling = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    (alone,) = llm.generate("Tell me", sampling)
    steps, num_expected = 0, 5  # the first step waits for all
    outputs: list[RequestOutput] = []
    threads = [
        threading.Thread(target=lambda: outputs.extend(llm.generate("Tell me", sampling)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    parts = list(llm.stream("Tell me", sampling))
    for thread in threads:
        thread.join()
    llm._engine.engine.launch = launch
    assert [output.token_ids for output in outputs] == [alone.token_ids] * 4
    assert joined(parts).token_ids == alone.token_ids
    assert 200 <= steps < 220


def test_a_refused_call_of_one_thread_leaves_the_others(llm: LLM) -> None:
    outputs: list[RequestOutput] = []
    sampling = SamplingParams(temperature=0.0, max_tokens=250, ignore_eos=True)
    thread = threading.Thread(target=lambda: outputs.extend(llm.generate("Tell me", sampling)))
    thread.start()
    for _ in range(2):
        with pytest.raises(RequestError, match="prompt 1"):
            llm.generate(["a", "b " * 5000])
    thread.join()
    assert outputs[0].num_output_tokens == 250


def test_close_ends_open_calls() -> None:
    llm = LLM(progress=False, num_pages=256)
    launch = llm._engine.engine.launch
    num_steps = 0

    def held(plan: object) -> object:
        """From the 50th step on, wait for the end."""
        nonlocal num_steps
        num_steps += 1
        while num_steps >= 50 and not llm._session._is_closed:
            time.sleep(0.001)
        return launch(plan)

    llm._engine.engine.launch = held
    stream = llm.stream("Once", LONG)
    next(stream)
    failures: list[Exception] = []

    def work() -> None:
        try:
            llm.generate("Once", LONG)
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    while num_calls(llm) < 2:
        time.sleep(0.001)
    llm.close()
    thread.join(60)
    with pytest.raises(ConfigError, match="closed"):
        list(stream)
    assert [type(error) for error in failures] == [ConfigError]


def test_close_ends_the_thread_of_grammars() -> None:
    """Also while it compiles, although who closes has the lock that its last word needs."""

    def threads() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == "grammar"]

    before = threads()
    llm = LLM(progress=False, num_pages=64)
    llm.generate("a", SamplingParams(structured_outputs={"regex": "ab"}))
    (mine,) = set(threads()) - set(before)
    began, may_end = threading.Event(), threading.Event()
    llm._engine._grammars._thread.submit(None, lambda: (began.set(), may_end.wait()))
    began.wait(60)
    llm.close()
    assert mine.is_alive()
    may_end.set()
    mine.join(60)
    assert not mine.is_alive()


def test_an_error_of_the_loop_reaches_every_call() -> None:
    llm = LLM(progress=False, num_pages=256)
    launch = llm._engine.engine.launch
    num_steps = 0

    def broken(plan: object) -> object:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 50:
            raise RuntimeError("the device is gone")
        return launch(plan)

    llm._engine.engine.launch = broken
    stream = llm.stream("Once", LONG)
    next(stream)
    with pytest.raises(RuntimeError, match="the device is gone"):
        list(stream)
    with pytest.raises(ConfigError, match="closed"):
        llm.generate("a")


def test_an_engine_that_an_error_broke_may_not_close(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As CUDA's, which raises the error again. The call ends all the same."""
    monkeypatch.setattr(threading, "excepthook", lambda hook: raised.append(hook.exc_value))
    raised: list[BaseException | None] = []
    llm = LLM(progress=False, num_pages=256)
    close = llm._engine.engine.close

    def broken(*_: object) -> None:
        raise RuntimeError("the device is gone")

    llm._engine.engine.launch = llm._engine.engine.close = broken
    failures: list[BaseException] = []

    def generate() -> None:
        try:
            llm.generate("Once", LONG)
        except RuntimeError as error:
            failures.append(error)

    caller = threading.Thread(target=generate, daemon=True)
    caller.start()
    caller.join(20)
    assert [str(error) for error in failures] == ["the device is gone"]
    assert [str(error) for error in raised] == ["the device is gone"], "it is told"
    close()


def test_an_interrupt_ends_one_call(llm: LLM) -> None:
    """The calls of other threads go on, and no call is left in the loop."""

    class Interrupt(BaseException):  # KeyboardInterrupt would end pytest, if it came twice
        pass

    class Interrupting(threading.Condition):
        def wait(self, timeout: float | None = None) -> bool:
            if threading.current_thread() is threading.main_thread() and not interrupted:
                interrupted.append(True)
                raise Interrupt
            return super().wait(timeout)

    interrupted: list[bool] = []
    outputs: list[RequestOutput] = []
    sampling = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    changed, llm._session.changed = llm._session.changed, Interrupting(llm._session.lock)
    thread = threading.Thread(target=lambda: outputs.extend(llm.generate("Tell me", sampling)))
    thread.start()
    with pytest.raises(Interrupt):
        llm.generate("a", LONG)
    thread.join()
    wait_idle(llm)
    assert outputs[0].num_output_tokens == 100
    assert not llm._engine.scheduler.requests.running
    llm._session.changed = changed


def test_a_second_interrupt_closes_an_engine_at_rest() -> None:
    """It comes when the loop has just ended the call."""
    llm = LLM(progress=False, num_pages=64)
    waits = iter((KeyboardInterrupt, KeyboardInterrupt))

    def wait(call: object) -> None:
        wait_idle(llm)
        raise next(waits)

    llm._session._wait = wait
    with pytest.raises(KeyboardInterrupt):
        llm.generate("a", GREEDY)
    assert not hasattr(llm._engine.engine, "model")  # its memory is released
    llm.close()


@pytest.mark.parametrize("starts", [True, False])
def test_a_call_whose_thread_fails_to_start_leaves_nothing_open(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, starts: bool
) -> None:
    """`Thread.start` raises if there can be no thread, and may be interrupted while it waits for
    the new one."""

    class Failing(threading.Thread):
        def start(self) -> None:
            if starts:
                super().start()
            raise KeyboardInterrupt if starts else RuntimeError("can't start new thread")

    wait_idle(llm)
    requests = llm._engine.scheduler.requests
    num_finished = requests.stats.num_finished
    with monkeypatch.context() as patch:
        patch.setattr(threading, "Thread", Failing)
        with pytest.raises(KeyboardInterrupt if starts else RuntimeError):
            llm.generate("a", GREEDY)
    wait_idle(llm)
    assert not requests.by_uid
    assert requests.stats.num_finished == num_finished
    assert not llm._session._is_running  # else `close` would wait for ever
    assert llm.generate("a", GREEDY)[0].num_output_tokens


def test_an_interrupt_while_a_call_is_submitted_leaves_nothing_open(llm: LLM) -> None:
    class Interrupting(threading.Condition):
        def notify_all(self) -> None:
            if threading.current_thread() is threading.main_thread() and not interrupted:
                interrupted.append(True)
                raise KeyboardInterrupt
            super().notify_all()

    changed = llm._session.changed
    for ask in (lambda: llm.generate("a", LONG), lambda: llm.stream("a", LONG)):
        wait_idle(llm)
        interrupted: list[bool] = []
        llm._session.changed = Interrupting(llm._session.lock)
        with pytest.raises(KeyboardInterrupt):
            ask()
        gc.collect()  # the traceback had the stream
        wait_idle(llm)
        llm._session.changed = changed
        assert not llm._session._calls
        assert not llm._engine.scheduler.requests.by_uid


def test_an_interrupt_cannot_leave_the_lock_taken(llm: LLM) -> None:
    """Ctrl-C may come in Python code that takes or releases a lock: that of a condition."""

    class Entered(threading.Condition):
        def __enter__(self) -> bool:
            raise AssertionError("Ctrl-C may come here")

    wait_idle(llm)
    changed, llm._session.changed = llm._session.changed, Entered(llm._session.lock)
    assert llm.generate("a", GREEDY)[0].token_ids == joined(list(llm.stream("a", GREEDY))).token_ids
    llm.stream("a", LONG).close()
    wait_idle(llm)
    llm._session.changed = changed


def test_choices(llm: LLM) -> None:
    hot = SamplingParams(temperature=1.5, max_tokens=8, seed=7, ignore_eos=True)
    choices = llm.generate(["Once", "Twice"], hot, n=3)
    assert len(choices) == 6
    assert len({tuple(choice.token_ids) for choice in choices[:3]}) == 3
    third = SamplingParams(temperature=1.5, max_tokens=8, seed=9, ignore_eos=True)
    assert llm.generate("Twice", third)[0].token_ids == choices[5].token_ids
    with pytest.raises(InvalidRequest, match="n must be 1 to 128, got 0"):
        llm.generate("Once", n=0)
    with pytest.raises(RequestError, match=r"^the prompt"):
        llm.generate("b " * 5000, n=2)


def test_prompts_may_come_from_generators(llm: LLM) -> None:
    outputs = llm.generate((str(number) for number in range(3)), GREEDY)
    assert [o.text for o in outputs] == [o.text for o in llm.generate(["0", "1", "2"], GREEDY)]
    assert len(llm.chat((ASK for _ in range(2)), GREEDY)) == 2


def test_async_requests_run_as_one_batch(async_llm: AsyncLLM) -> None:
    async def answer(number: int) -> RequestOutput:
        messages = [{"role": "user", "content": f"What is {number} + 10?"}]
        return joined([part async for part in async_llm.chat(messages, GREEDY)])

    async def main() -> list[RequestOutput]:
        return await asyncio.gather(*(answer(number) for number in range(20, 28)))

    for number, output in enumerate(asyncio.run(main()), 20):
        assert str(number + 10) in output.text
    assert len(asyncio.run(main())) == 8  # in another event loop


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        *((wrong, "messages must be a list like") for wrong in (None, 5, "Hi", {**ASK[0]}, [5, 6])),
        ([], "a stream has one prompt, got 0"),
        ([[]], "messages must hold at least one message"),
        ([ASK, ASK], "a stream has one prompt, got 2"),
    ],
)
def test_async_chats_take_one_conversation(
    messages: Any, message: str, async_llm: AsyncLLM
) -> None:
    """A message alone and ids were once taken as prompts."""

    async def main() -> None:
        async for _ in async_llm.chat(messages, GREEDY):
            pass

    with pytest.raises(InvalidRequest, match=message):
        asyncio.run(main())


def test_event_loops_that_have_ended_are_not_kept(async_llm: AsyncLLM) -> None:
    async def ask() -> str:
        return joined([part async for part in async_llm.generate("Hi", GREEDY)]).text

    assert asyncio.run(ask()) == asyncio.run(ask())
    assert len(async_llm._wakers) == 1


def test_event_loops_of_other_threads_may_begin_meanwhile(async_llm: AsyncLLM) -> None:
    class Other:
        def is_closed(self) -> bool:
            wakers[Other()] = None  # as another thread, between two loops
            return True

    async def read() -> list[Any]:
        return [part async for part in async_llm.generate("a", SamplingParams(max_tokens=1))]

    wakers: dict[Any, Any] = async_llm._wakers
    wakers[Other()] = None
    assert asyncio.run(read())
    wakers.clear()


def test_cancelling_ends_the_request(async_llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = async_llm._llm._engine.engine
    launch, may_go_on = engine.launch, threading.Event()

    def held(plan: object) -> object:
        assert may_go_on.wait(60)
        return launch(plan)

    async def main() -> None:
        async for _ in async_llm.generate("Once", LONG):
            break
        monkeypatch.setattr(engine, "launch", held)
        stream = async_llm.generate("Once", LONG)
        task = asyncio.create_task(_read(stream))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        may_go_on.set()
        await stream.aclose()

    asyncio.run(main())
    wait_idle(async_llm._llm)
    with pytest.raises(RequestError, match="the prompt has"):
        asyncio.run(_read(async_llm.generate("b " * 5000)))


async def _read(stream: object) -> None:
    async for _ in stream:
        pass


class FailsBehindAToken:
    """An engine in which the step behind each request's first token fails."""

    context = 10

    def run(self, session: Session) -> None:
        while not isinstance((messages := session.take(0.0))[-1], ExitMsg):
            for message in messages:
                if isinstance(message, UserMsg):
                    uid = message.uid
                    session.send([Accepted(uid=uid, num_prompt_tokens=1, sampling=GREEDY)])
                    session.send([Token(uid=uid, id=1)])
                    session.send([Failed.of(uid, EngineError("the step failed"))])

    def close(self) -> None: ...


def test_a_request_that_the_detokenizer_and_the_scheduler_fail_fails_once() -> None:
    """The step that fails was launched before the scheduler knew that the text had failed."""
    tokenizer: Any = SimpleNamespace(stream=lambda **_: None)  # so the first token raises
    session = Session(FailsBehindAToken(), Detokenizer(tokenizer))
    for _ in range(2):  # the first did not close the session
        message = UserMsg(uid=0, ids=b"", sampling=GREEDY)
        call = session.call([message], lambda *_: None, 1)
        session.complete(call)
        assert "has no attribute 'feed'" in str(call.error)
