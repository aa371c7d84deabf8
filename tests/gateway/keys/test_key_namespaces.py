"""One API key learns nothing of another's prompts: an attack, and what keys may share."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from helpers.key_files import key_file
from helpers.running_server import RunningServer
from helpers.scripted_server import MODEL, ScriptedServer
from minisgl_gateway.keys.ring import KeyRing
from minisgl_gateway.router.replica_state import ReplicaState

FILE = """
[alice]
key = "k-alice"
[mallory]
key = "k-mallory"
[ann]
key = "k-ann"
group = "alice"
[bob]
key = "k-bob"
group = "alice"
[one]
key = "k-one"
share_cache = true
[two]
key = "k-two"
share_cache = true
[boss]
key = "k-boss"
admin = true
"""
SECRET = [300 + position * 7 % 200 for position in range(100)]


def digest(*parts: str) -> str:
    """A namespace, as a reader of the source would guess it."""
    return hashlib.sha256(json.dumps(parts, separators=(",", ":")).encode()).hexdigest()


SALTS = [
    *(None, "alice", "key", "key:alice", '["key","alice"]', '["key","alice",""]', "\0", "all"),
    *(digest("key", "alice", ""), digest("alice", ""), digest("key", "alice"), digest("alice")),
    *(digest("group", "alice", ""), '","', "alice\0", '"]', "]"),
]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    path = key_file(tmp_path_factory.mktemp("keys"), FILE)
    with RunningServer("--api-key-file", str(path), "--page-size", "8") as server:
        assert server.url
        yield server


def asked(server: RunningServer, key: str, ids: list[int], **more: Any) -> tuple[int | None, int]:
    """Return where the prompt differs from the closest cached one, and the cached tokens."""
    body = {"input_ids": ids, "max_tokens": 1, **more}
    headers = {"x-api-key": f"k-{key}"}
    answer = httpx.post(f"{server.url}/generate", json=body, headers=headers).json()
    timings, usage = answer["timings"], answer["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == timings["num_cached_tokens"]
    return timings["prefix_differs_at"], timings["num_cached_tokens"]


def test_no_token_of_another_keys_prompt_is_recovered(served: RunningServer) -> None:
    """The attacker has 60 tokens of the prompt and tries the next one, under each salt."""
    asked(served, "alice", SECRET)
    asked(served, "ann", SECRET, cache_salt="alice")
    known = SECRET[:60]
    assert asked(served, "alice", [*known, 9, 9]) == (60, 56), "her own prompts she may compare"
    for salt in SALTS:
        probe = asked(served, "mallory", [*known, 9, 9], cache_salt=salt)
        assert probe == (None, 0), f"the salt {salt!r} shows a prompt of another key"
    for token in (SECRET[60], 8):  # both go on where the probe before ended
        assert asked(served, "mallory", [*known, token]) == (None, 56)
    headers = {"x-api-key": "k-mallory"}
    for path in ("/replica", "/xray/events"):
        refusal = httpx.get(f"{served.url}{path}", headers=headers)
        assert (refusal.status_code, refusal.json()["error"]["code"]) == (403, "not_permitted")
        assert "hashes" not in refusal.text


def test_keys_share_prefixes_only_as_the_file_says(served: RunningServer) -> None:
    ids = SECRET[::-1]
    longer = [*ids, 1]
    assert asked(served, "ann", ids) == (None, 0)
    assert asked(served, "bob", longer) == (None, 96), "a group is one namespace"
    assert asked(served, "one", ids) == (None, 0)
    assert asked(served, "two", longer) == (None, 96), "so are the keys with share_cache"
    assert asked(served, "alice", ids)[1] == 0, "a key is not the group of its name"
    assert asked(served, "boss", ids) == (None, 0), "nor does an admin share"
    assert asked(served, "bob", ids, cache_salt="x") == (None, 0)
    assert asked(served, "ann", longer, cache_salt="x") == (None, 96), "salts work within a group"
    assert asked(served, "two", ids, cache_salt="x") == (None, 0)


def test_no_two_keys_and_salts_have_one_namespace(tmp_path: Path) -> None:
    names = ("alice", "mallory", "all", "group", "key")
    text = '[open]\nkey = "o"\nshare_cache = true\n'
    for name in names:
        text += f'["{name}"]\nkey = "k-{name}"\n[in-{name}]\nkey = "g-{name}"\ngroup = "{name}"\n'
    ring = KeyRing(None, str(key_file(tmp_path, text)))
    first = {key.namespace("") for key in ring}
    assert len(first) == 2 * len(names) + 1
    salts = {salt for salt in SALTS if salt} | first
    found = [key.namespace(salt) for key in ring for salt in salts]
    assert len({*found, *first}) == len(found) + len(first)
    assert digest("key", "alice", "") in first & salts, "one of the salts is such a namespace"


def test_a_stored_answer_is_its_keys_own(tmp_path: Path) -> None:
    with ScriptedServer(keys=KeyRing(None, str(key_file(tmp_path, FILE)))) as server:

        def http(key: str) -> httpx.Client:
            return httpx.Client(base_url=server.url, headers={"x-api-key": f"k-{key}"})

        with http("ann") as ann, http("bob") as bob:
            begun = ann.post("/v1/responses", json={"model": MODEL, "input": "PIN 7391"}).json()
            path = f"/v1/responses/{begun['id']}"
            item = begun["output"][0]["id"]
            assert bob.get(path).status_code == 404
            assert bob.delete(path).status_code == 404
            for more in (
                {"input": "say it", "previous_response_id": begun["id"]},
                {"input": [{"type": "item_reference", "id": item}]},
            ):
                refusal = bob.post("/v1/responses", json={"model": MODEL, **more})
                assert refusal.status_code == 400
                assert "7391" not in refusal.text
            assert ann.get(path).json()["id"] == begun["id"]


def test_the_state_is_for_admins_if_there_are_keys(tmp_path: Path) -> None:
    with ScriptedServer(keys=KeyRing(None, str(key_file(tmp_path, FILE)))) as server:
        for key, status in (("mallory", 403), ("boss", 200), ("none", 401)):
            answer = httpx.get(f"{server.url}/replica", headers={"x-api-key": f"k-{key}"})
            assert answer.status_code == status
        assert msgspec.json.decode(
            httpx.get(f"{server.url}/replica", headers={"x-api-key": "k-boss"}).content,
            type=ReplicaState,
        ).keys == []  # fmt: skip
    with ScriptedServer() as server:
        state = msgspec.json.decode(httpx.get(f"{server.url}/replica").content, type=ReplicaState)
        assert state.keys is None
