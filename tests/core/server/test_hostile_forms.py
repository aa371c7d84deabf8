"""Hostile schemas, texts and templates end in a 400, and running streams keep their text.

`pytest -s` prints the time of each refusal and the worst gap of a stream beside it.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from helpers.running_server import RunningServer
from minisgl.server.model import BUILTIN_NAME as MODEL

NUM_STREAMS = 3
NUM_HEAVY = 8


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


def patterns(*texts: str) -> dict[str, Any]:
    return {"json": {"allOf": [{"type": "string", "pattern": text} for text in texts]}}


HOSTILE: dict[str, dict[str, Any]] = {
    "400 levels": {"json": nested(400)},
    "1,000 levels as text": {"json": '{"items":' * 1000 + "{}" + "}" * 1000},
    "patterns to intersect": patterns(*(f".*{c}.*{c}.*" for c in "abcdefghijklmnop")),
    "exponential regexes": patterns(*(f"^(a|b)*a(a|b){{{n}}}$" for n in range(5, 60))),
    "a large multipleOf": {"json": {"type": "integer", "multipleOf": 999_983}},
    "a wide grammar": {"grammar": "start: " + '("a"|"b")* ' * 8000},
}


def said(client: openai.OpenAI, number: int, times: list[float]) -> str:
    chunks = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": f"Count from {number}."}],
        temperature=0,
        max_tokens=200,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    text = ""
    for chunk in chunks:
        times.append(time.monotonic())
        text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
    return text


def test_streams_go_on_beside_hostile_schemas(builtin: RunningServer) -> None:
    stop = threading.Event()
    properties = dict.fromkeys((f"property_{i}" for i in range(500_000)), True)
    large: dict[str, dict[str, Any]] = {
        "10 MB of one text": {"json": {"enum": ["x" * 10_000_000]}},
        "10 MB of properties": {"json": {"type": "object", "properties": properties}},
    }
    bodies = {
        name: json.dumps({"prompt": "a", "structured_outputs": option}).encode()
        for name, option in (large | HOSTILE).items()
    }
    texts: list[list[str]] = [[] for _ in range(NUM_STREAMS)]
    times: list[list[float]] = [[] for _ in range(NUM_STREAMS)]

    def stream(number: int) -> None:
        with builtin.client() as client:
            while not stop.is_set():
                times[number].append(float("nan"))  # no gap between two streams
                texts[number].append(said(client, number, times[number]))

    try:
        with builtin.client() as client:
            alone = [said(client, number, []) for number in range(NUM_STREAMS)]
        threads = [threading.Thread(target=stream, args=(n,)) for n in range(NUM_STREAMS)]
        for thread in threads:
            thread.start()
        builtin.wait_open(NUM_STREAMS)
        with httpx.Client(base_url=builtin.url, timeout=60) as http:
            for name, body in bodies.items():
                start = time.monotonic()
                answer = http.post("/v1/completions", content=body, headers=JSON)
                end = time.monotonic()
                assert answer.status_code == 400, (name, answer.text)
                assert answer.json()["error"]["param"].startswith("structured_outputs"), name
                worst = max(gap(each, start, end) for each in times)
                print(f"{name}: {end - start:.2f} s, worst gap {worst:.2f} s")
            stop.set()
            for thread in threads:
                thread.join()
            assert http.get("/health").status_code == 200
        for number, expected in enumerate(alone):
            assert texts[number]
            assert set(texts[number]) == {expected}
    finally:
        stop.set()


JSON = {"content-type": "application/json"}


def gap(times: list[float], start: float, end: float) -> float:
    """The longest time between two tokens that has a part in [start, end], in seconds."""
    pairs = itertools.pairwise(times)
    return max((b - a for a, b in pairs if b > start and a < end), default=0.0)


TEXT = "<" * (15 * 2**20)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": TEXT}),
        ("/tokenize", {"prompt": TEXT, "add_special_tokens": False}),
        ("/tokenize", {"messages": [{"role": "user", "content": TEXT}]}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": TEXT}]}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "a"}],
                                       "system": TEXT}),
        ("/detokenize", {"tokens": [1] * 1_000_000}),
    ],
    ids=["text", "plain", "chat", "count_tokens", "system", "ids"],
)  # fmt: skip
def test_the_largest_bodies_are_refused_with_the_numbers(
    builtin: RunningServer, path: str, body: dict[str, Any]
) -> None:
    """15 MiB were a turn of 6 to 41 s in the tokenizer, and the server ended: its worker hung."""
    with httpx.Client(base_url=builtin.url, timeout=150) as http:
        answer = http.post(path, json={"model": MODEL, **body})
        assert answer.status_code == 400, answer.text
        assert "at most 65,536 are encoded or decoded in one request" in answer.text
        assert http.get("/ready").status_code == 200


def test_texts_that_wait_have_a_bound(builtin: RunningServer) -> None:
    """Of five at once at least two are tokenized; those above 32 MiB get a 429."""
    body = json.dumps({"prompt": TEXT}).encode()
    with (
        httpx.Client(base_url=builtin.url, timeout=150) as http,
        ThreadPoolExecutor(5) as threads,
    ):
        answers = list(
            threads.map(lambda _: http.post("/tokenize", content=body, headers=JSON), range(5))
        )
        assert sum(answer.status_code == 400 for answer in answers) >= 2
        for answer in answers:
            if answer.status_code != 400:
                assert answer.status_code == 429
                assert "of your texts wait" in answer.text
        assert http.post("/tokenize", json={"prompt": "a"}).status_code == 200


def test_another_keys_grammars_wait_for_one_of_many(launch: Any, tmp_path: Path) -> None:
    """The heavy key's eight take 0.3 s of a core each; the light key's request is the next."""
    keys = tmp_path / "keys.toml"
    keys.write_text('[heavy]\nkey = "heavy"\n[light]\nkey = "light"\n')
    keys.chmod(0o600)
    server = launch("--api-key-file", str(keys))
    hostile = json.dumps({"prompt": "a", "structured_outputs": HOSTILE["patterns to intersect"]})
    done: list[int] = []
    with (
        httpx.Client(
            base_url=server.url, timeout=150, limits=httpx.Limits(max_connections=20)
        ) as http,
        ThreadPoolExecutor(12) as threads,
    ):

        def refused(number: int) -> None:
            answer = http.post("/v1/completions", content=hostile, headers=JSON | bearer("heavy"))
            assert answer.status_code == 400
            done.append(number)

        heavy = [threads.submit(refused, number) for number in range(NUM_HEAVY)]
        while not done:
            time.sleep(0.01)
        for option in ({}, {"structured_outputs": {"regex": "a+"}}):
            body = {"prompt": "a", "max_tokens": 2, **option}
            http.post("/v1/completions", json=body, headers=bearer("light")).raise_for_status()
        assert len(done) < NUM_HEAVY, "the light key waited for all"
        for future in heavy:
            future.result()


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}
