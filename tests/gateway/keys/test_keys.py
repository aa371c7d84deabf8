"""API keys, their limits, and HTTPS, as official clients meet them."""

from __future__ import annotations

import logging
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx
import msgspec
import openai
import pytest

from helpers.key_files import FILE, OTHER, SECRET, key_file
from helpers.scripted_server import ScriptedServer
from minisgl.errors import ConfigError
from minisgl.server.command import ready_text
from minisgl_gateway.keys.ring import KeyRing
from minisgl_gateway.shell.client import Chat, ChatError
from minisgl_gateway.tls import tls_context


@pytest.fixture
def ring(tmp_path: Path) -> KeyRing:
    return KeyRing(None, str(key_file(tmp_path, FILE)))


@pytest.fixture
def guarded(ring: KeyRing) -> Iterator[ScriptedServer]:
    with ScriptedServer(keys=ring) as server:
        yield server


def ask(url: str, key: str) -> str | None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
        answer = client.chat.completions.create(
            model="scripted", messages=[{"role": "user", "content": "one two"}]
        )
    return answer.choices[0].message.content


@pytest.mark.parametrize(
    ("key", "says"),
    [
        (None, "this server needs an API key: give one with --api-key KEY"),
        ("x", "does not know the API key"),
    ],
)
def test_a_chat_without_its_key_says_which_flag(
    guarded: ScriptedServer, key: str | None, says: str
) -> None:
    with closing(Chat(guarded.url, api_key=key)) as chat:
        with pytest.raises(ChatError, match=says):
            chat.model()
        with pytest.raises(ChatError, match=says):
            list(chat.ask("one"))


def test_the_printed_commands_begin_with_the_key() -> None:
    said = ready_text("m", "http://127.0.0.1:1", 1.0, needs_key=True)
    assert said.index("  KEY=...") < said.index('"Authorization: Bearer $KEY"')
    assert 'api_key="$KEY"' in said
    assert "KEY" not in ready_text("m", "http://127.0.0.1:1", 1.0)


def test_the_printed_commands_quote_an_ipv6_address() -> None:
    said = ready_text("m", "http://[::1]:1", 1.0)  # to zsh, brackets are a pattern
    assert "curl 'http://[::1]:1/v1/chat/completions' -H" in said
    assert "chat --url 'http://[::1]:1'" in said


def test_a_model_without_a_chat_template_is_shown_with_a_text() -> None:
    said = ready_text("m", "http://127.0.0.1:1", 1.0, needs_key=True, can_chat=False)
    assert "no usable chat template" in said
    assert "one in a browser at http://127.0.0.1:1/, or try in another terminal\n" in said
    assert "/v1/completions' -H 'Content-Type: application/json' -H \"Authorization" in said
    assert "chat/completions" not in said
    assert "minisgl chat" not in said


def test_a_value_that_no_message_can_hold_is_refused_with_a_key(
    guarded: ScriptedServer, ring: KeyRing
) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"x": 2**70}}
    headers = {"x-api-key": SECRET}
    refused = httpx.post(f"{guarded.url}/v1/chat/completions", json=body, headers=headers)
    assert refused.status_code == 400, refused.text
    assert "out of range" in refused.json()["error"]["message"]
    assert not any(key._share.tags for key in ring)


def test_only_requests_with_a_key_pass(
    guarded: ScriptedServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "minisgl")
    assert ask(guarded.url, SECRET) == "one two ."
    for wrong in ("none", SECRET[:-1], SECRET + "x", SECRET.upper()):
        with pytest.raises(
            openai.AuthenticationError, match="does not know the API key"
        ) as refused:
            ask(guarded.url, wrong)
        assert refused.value.code == "invalid_api_key"
        assert SECRET not in refused.value.message
    with httpx.Client(base_url=guarded.url) as http:
        for path in ("/v1/models", "/metrics", "/openapi.json", "/nothing"):
            refusal = http.get(path)
            assert refusal.status_code == 401, path
            assert refusal.headers["www-authenticate"] == "Bearer"
            assert refusal.headers["x-request-id"]
            assert http.get(path, headers={"x-api-key": SECRET}).status_code != 401
        assert http.get("/v1/models", headers={"x-api-key": b"\xff\xfe"}).status_code == 401
        for path in ("/health", "/ready", "/", "/docs"):
            assert http.get(path).status_code == 200
        assert http.get("/v1/models", headers={"Authorization": f"bearer {SECRET}"}).is_success
        assert http.get("/v1/models", headers={"Authorization": f"Basic {SECRET}"}).is_error
        page = http.get("/metrics", headers={"x-api-key": SECRET}).text
    assert 'minisgl_key_requests_total{key="light",result="admitted"} 1.0' in page
    assert 'minisgl_key_tokens_total{key="light",kind="prompt"} 2.0' in page
    assert 'minisgl_key_tokens_total{key="light",kind="output"} 3.0' in page
    assert 'minisgl_errors_total{code="invalid_api_key"}' in page
    for secret in (SECRET, OTHER):
        assert secret not in page
        assert not any(secret in r.getMessage() for r in caplog.records if "minisgl" in r.name)
    sent = msgspec.msgpack.encode(guarded.received)  # all that the engine, which writes profiles,
    assert b"one two" in sent  # could know of a request
    assert not any(text.encode() in sent for text in (SECRET, OTHER, "light", "bearer"))


def test_only_the_whole_key_is_found(ring: KeyRing) -> None:
    """Some of these texts have digests with the same beginning as the keys'."""
    assert not any(ring.find(f"guess-{number}") for number in range(4000))
    assert ring.find(SECRET)


def test_a_header_of_routers_saves_no_request_where_it_means_nothing(
    guarded: ScriptedServer,
) -> None:
    headers = {"x-api-key": SECRET, "x-minisgl-prefix": "16"}
    with httpx.Client(base_url=guarded.url, headers=headers) as http:
        for _ in range(4):  # the limit is 3
            assert http.post("/v1/completions", json={"prompt": "a"}).json()["page_size"] == 16
        statuses = [http.post("/tokenize", json={"prompt": "a"}).status_code for _ in range(4)]
    assert statuses == [200, 200, 200, 429]


def test_a_key_stops_counting_a_request_whose_client_leaves(
    ring: KeyRing, guarded: ScriptedServer
) -> None:
    body = {"prompt": "!forever", "stream": True}
    headers = {"x-api-key": SECRET}
    with httpx.stream("POST", f"{guarded.url}/v1/completions", json=body, headers=headers) as open_:
        lines = open_.iter_lines()  # its end would close the connection
        next(lines)
        (light,) = (key for key in ring if key.name == "light")
        assert light._share.tags
    assert guarded.wait_aborted(1) == [0]
    assert not light._share.tags
    assert not light._share._shares.active
    page = httpx.get(f"{guarded.url}/metrics", headers=headers).text
    assert 'minisgl_requests_total{reason="abort"} 1.0' in page


def test_profiles_and_the_x_ray_need_an_admin(guarded: ScriptedServer) -> None:
    with httpx.Client(base_url=guarded.url) as http:
        for path in ("/start_profile", "/stop_profile"):
            refusal = http.post(path, headers={"x-api-key": SECRET})
            assert (refusal.status_code, refusal.json()["error"]["code"]) == (403, "not_permitted")
        assert http.get("/start_profile", headers={"x-api-key": OTHER}).status_code == 405
        assert http.get("/xray/events", headers={"x-api-key": SECRET}).status_code == 403


def test_only_an_admin_may_set_a_priority_below_0(guarded: ScriptedServer) -> None:
    url = f"{guarded.url}/v1/completions"
    for key, priority, status in ((SECRET, -1, 403), (SECRET, 1, 200), (OTHER, -1, 200)):
        body = {"prompt": "a", "priority": priority}
        answer = httpx.post(url, json=body, headers={"x-api-key": key})
        assert answer.status_code == status, answer.text
        if status == 403:
            assert answer.json()["error"]["code"] == "not_permitted"
            assert "ask for 0 or more" in answer.text
    assert guarded.num_open == 0


def test_a_request_above_the_limit_gets_retry_after(guarded: ScriptedServer) -> None:
    for _ in range(3):
        ask(guarded.url, SECRET)
    with pytest.raises(openai.RateLimitError, match="'light' has used its 3 requests") as refused:
        ask(guarded.url, SECRET)
    assert 1 <= int(refused.value.response.headers["retry-after"]) <= 20
    assert ask(guarded.url, OTHER) == "one two ."
    with httpx.Client(base_url=guarded.url, headers={"x-api-key": SECRET}) as http:
        assert http.get("/v1/models").is_success  # costs nothing
        assert 'key="light",result="refused"} 1.0' in http.get("/metrics").text


def test_a_prompt_of_several_choices_counts_once(ring: KeyRing, guarded: ScriptedServer) -> None:
    body = {"prompt": ["a b", "c"], "n": 2, "max_tokens": 1}
    httpx.post(f"{guarded.url}/v1/completions", json=body, headers={"x-api-key": OTHER})
    admin = next(key for key in ring if key.name == "admin")
    assert (admin.num_prompt_tokens, admin.num_output_tokens) == (3, 6)


# --- HTTPS ---------------------------------------------------------------------------------------


def test_https_with_a_key(certificate: tuple[str, str], ring: KeyRing) -> None:
    with ScriptedServer(keys=ring, tls=tls_context(*certificate)) as server:
        assert server.url.startswith("https://")
        trusting = ssl.create_default_context(cafile=certificate[0])
        with (
            httpx.Client(verify=trusting) as http,
            openai.OpenAI(
                base_url=f"{server.url}/v1", api_key=SECRET, http_client=http, max_retries=0
            ) as client,
        ):
            stream = client.completions.create(model="scripted", prompt="a b", stream=True)
            assert "".join(chunk.choices[0].text for chunk in stream) == "a b ."
        old = ssl.create_default_context(cafile=certificate[0])
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        with httpx.Client(verify=old) as http:
            assert http.get(f"{server.url}/health").is_success
        with pytest.raises(httpx.TransportError):
            httpx.get(server.url.replace("https", "http") + "/health", timeout=5)


def test_a_chat_trusts_the_certificates_of_the_environment(
    certificate: tuple[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with ScriptedServer(tls=tls_context(*certificate)) as server:
        monkeypatch.setenv("SSL_CERT_FILE", certificate[0])
        with closing(Chat(server.url)) as chat:
            assert chat.model == "scripted"
        monkeypatch.delenv("SSL_CERT_FILE")
        with closing(Chat(server.url)) as chat, pytest.raises(ChatError, match="CERTIFICATE"):
            assert chat.model
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "none.pem"))
    for url in (server.url, "http://192.0.2.1"):
        with pytest.raises(ChatError, match="SSL_CERT_FILE or SSL_CERT_DIR has no certificates"):
            Chat(url)
    Chat("http://127.0.0.1:1").close()  # needs none


def test_a_certificate_that_cannot_be_used(certificate: tuple[str, str], tmp_path: Path) -> None:
    certfile, keyfile = certificate
    locked = str(tmp_path / "locked.pem")
    subprocess.run(
        ["openssl", "rsa", "-in", keyfile, "-aes256", "-passout", "pass:secret", "-out", locked],
        check=True,
        capture_output=True,
    )
    for cert, key, says in (
        ("/none", None, "--ssl-certfile /none cannot be used (No such file or directory)"),
        (certfile, None, "cannot be used (the certificate or the key is missing): give a PEM"),
        (certfile, certfile, f"and --ssl-keyfile {certfile} cannot be used ("),
        (certfile, locked, "has a password"),
    ):
        with pytest.raises(ConfigError) as refused:
            tls_context(cert, key)
        assert says in str(refused.value)
