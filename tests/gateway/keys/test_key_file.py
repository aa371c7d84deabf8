"""The file of API keys: what it may hold, that it is read again, limits by a clock."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from helpers.key_files import FILE, OTHER, SECRET, Clock, key_file
from minisgl.errors import ConfigError
from minisgl.server.web.errors import error_response
from minisgl_gateway.keys.limits import RateLimited
from minisgl_gateway.keys.ring import KeyRing


def test_token_limits_can_go_negative_and_refill_evenly(tmp_path: Path) -> None:
    clock = Clock()
    path = key_file(tmp_path, f'[a]\nkey = "{SECRET}"\ntokens_per_minute = 600')
    ring = KeyRing(None, str(path), clock)
    key = ring.find(SECRET)
    assert key
    key.admit()
    key.charge(prompt=300, output=400)
    with pytest.raises(RateLimited) as refused:
        key.admit()
    assert refused.value.retry_after_s == pytest.approx(10.1)
    clock.now += 10
    with pytest.raises(RateLimited):
        key.admit()
    clock.now += 0.2
    key.admit()
    clock.now += 1e6  # a bucket holds no more than a minute's tokens
    key.charge(output=600)
    with pytest.raises(RateLimited):
        key.admit()


def test_the_file_is_read_again_when_it_changes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    path = key_file(tmp_path, FILE)
    ring = KeyRing("given-1,given-2", str(path), clock)
    assert [key.name for key in ring] == ["default", "default-2", "light", "admin"]
    light = ring.find(SECRET)
    assert light
    for _ in range(3):
        light.admit()
    replaced = FILE.replace(OTHER, "sk-new").replace("[admin]", "[boss]")
    (tmp_path / "new").write_text(replaced)
    os.replace(tmp_path / "new", path)
    assert ring.find(OTHER), "not looked at within the second"
    clock.now += 1
    assert ring.find(OTHER) is None
    assert ring.find("sk-new")
    assert ring.find("given-2")
    assert ring.find(SECRET) is light, "what it has used is kept"
    with pytest.raises(RateLimited):
        light.admit()

    path.write_text("[light\nkey = 1")
    clock.now += 1
    assert ring.find(SECRET) is light
    assert "the keys stay as they were" in caplog.text
    path.unlink()
    clock.now += 1
    assert ring.find("sk-new")
    path.write_text(f'[only]\nkey = "{OTHER}"')
    clock.now += 1
    assert ring.find(OTHER)
    assert ring.find(SECRET) is None


def test_a_table_named_default_does_not_replace_the_given_key(tmp_path: Path) -> None:
    ring = KeyRing(OTHER, str(key_file(tmp_path, f'[default]\nkey = "{SECRET}"\n')))
    names = [key.name for text in (SECRET, OTHER) if (key := ring.find(text))]
    assert names == ["default", "default-2"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "has no keys"),
        (f'key = "{SECRET}"', "Expected `object`, got `str`"),
        (f'[a]\nkey = "{SECRET}"\nrequest_per_minute = 3', "unknown field `request_per_minute`"),
        (f'[a]\nkey = "{SECRET}"\nrequests_per_minute = 0', ">= 1"),
        (f'[a]\nkey = "{SECRET} "', "the key of 'a' must be visible ASCII"),
        (f'[a]\nkey = "{SECRET}"\n[b]\nkey = "{SECRET}"', "two names have the same key"),
        ("[a]\n", "missing required field `key`"),
    ],
)
def test_a_wrong_key_file(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        KeyRing(None, str(key_file(tmp_path, text)))
    assert says in str(refused.value)
    assert SECRET not in str(refused.value)


def test_a_pipe_is_read_once(tmp_path: Path) -> None:
    clock, pipe = Clock(), tmp_path / "pipe"
    os.mkfifo(pipe)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(pipe.write_text, FILE)
        ring = KeyRing(None, str(pipe), clock)
    os.utime(pipe, ns=(1, 1))
    clock.now += 1
    assert ring.find(SECRET), "to read it again would wait for another writer"


@pytest.mark.parametrize("flags", [("--api-key", SECRET + " x"), ("--api-key-file", "/none")])
def test_wrong_keys_are_refused_before_any_process_starts(
    launch: Any, flags: tuple[str, str]
) -> None:
    server = launch(*flags)
    assert server.ended(60) == 1
    assert flags[0] in server.output["err"]
    assert "starting the engine" not in server.output["err"]
    assert SECRET not in server.output["err"]


def test_the_time_to_wait_is_whole_seconds_rounded_up() -> None:
    for seconds, said in ((10.1, "11"), (0.2, "1")):
        response = error_response(RateLimited("wait", retry_after_s=seconds), "/v1/messages")
        assert response.headers["retry-after"] == said
