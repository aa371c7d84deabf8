"""OpenAI's `prediction`: from the request's field to the drafter, and the figures in the answer."""

from __future__ import annotations

import httpx
import pytest

from helpers.running_server import RunningServer
from helpers.scheduling import make
from minisgl.builtin import model_path
from minisgl.core import SamplingParams
from minisgl.message import ChatPrompt, UserMsg, ids_from_bytes, ids_to_bytes
from minisgl.tokenizer import PromptEncoder, load_tokenizer
from minisgl_zoo.drafts.history import History

ASKED = [{"role": "user", "content": "What is 12 + 30?"}]


@pytest.mark.parametrize("is_split", [False, True])
def test_a_prediction_comes_to_the_request_as_ids(is_split: bool) -> None:
    tokenizer = load_tokenizer(model_path())
    encoder = PromptEncoder(tokenizer=tokenizer, folder=model_path())
    text = "The sum is forty-two."
    encoded = encoder.encode(ChatPrompt(messages=ASKED, is_split=is_split, prediction=text))
    message = encoder.request(encoded, SamplingParams(max_tokens=4), "")
    assert tokenizer.decode(ids_from_bytes(message.prediction).tolist()) == text
    scheduler = make(vocab_size=tokenizer.vocab_size, max_seq_len=10_000, num_pages=1000)
    scheduler.add(message)
    (req,) = scheduler.requests.by_uid.values()
    drafter = History(req, scheduler.requests)
    ids = req.prediction.tolist()
    for token in ids[:3]:
        drafter.add(token)
    assert list(drafter.next(2)) == ids[3:5]


def test_ids_beyond_the_vocabulary_are_left_out() -> None:
    scheduler = make(vocab_size=100)
    message = UserMsg(
        uid=0,
        ids=ids_to_bytes([1, 2]),
        sampling=SamplingParams(),
        prediction=ids_to_bytes([5, 100, 99, 7000]),
    )
    scheduler.add(message)
    assert scheduler.requests.by_uid[0].prediction.tolist() == [5, 99]


@pytest.mark.parametrize(
    "content",
    [
        "The answer is 42.",
        [{"type": "text", "text": "The answer"}, {"type": "text", "text": " is 42."}],
    ],
)
def test_an_answer_is_the_same_with_a_prediction(builtin: RunningServer, content: object) -> None:
    body = {"messages": ASKED, "temperature": 0, "max_tokens": 40}
    with httpx.Client(base_url=builtin.url, timeout=60) as http:
        plain = http.post("/v1/chat/completions", json=body).json()
        prediction = {"type": "content", "content": content}
        answer = http.post("/v1/chat/completions", json=body | {"prediction": prediction}).json()
    assert answer["choices"][0]["message"] == plain["choices"][0]["message"]
    details, timings = answer["usage"]["completion_tokens_details"], answer["timings"]
    drafted = timings["num_drafted"]
    assert 0 <= timings["num_accepted"] <= drafted
    counts = ("accepted_prediction_tokens", "rejected_prediction_tokens")
    assert sum(details.get(name, 0) for name in counts) == drafted


def test_a_prediction_that_is_too_long_is_refused_by_its_own_name(builtin: RunningServer) -> None:
    """It is not encoded first, so 15 MiB hold up nobody."""
    prediction = {"type": "content", "content": "a" * (15 << 20)}
    answer = httpx.post(
        f"{builtin.url}/v1/chat/completions",
        json={"messages": ASKED, "prediction": prediction},
        timeout=60,
    )
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "prediction")
    assert "prediction has 15,728,640 characters, and may have 32,768" in error["message"]


@pytest.mark.parametrize("wrong", ["text", {"type": "content"}, {"type": "other", "content": "a"}])
def test_a_wrong_prediction_is_refused(builtin: RunningServer, wrong: object) -> None:
    answer = httpx.post(
        f"{builtin.url}/v1/chat/completions", json={"messages": ASKED, "prediction": wrong}
    )
    assert answer.status_code == 400
    assert "prediction" in answer.json()["error"]["message"]
