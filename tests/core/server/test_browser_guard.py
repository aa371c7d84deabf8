"""Web pages of other sites, and names that lead here, get nothing; all other clients go on."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import pytest

from helpers.key_files import FILE, OTHER, key_file, key_ring
from helpers.scripted_server import MODEL, ScriptedServer
from minisgl.server.web.guards import MAX_TOLD, VIA, Door, door_of

EVIL = "http://evil.example"
FOREIGN: dict[str, dict[str, str]] = {
    "a page's fetch": {"Origin": EVIL, "Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "cors"},
    "a page's form": {"Origin": EVIL, "Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"},
    "a page over plain HTTP": {"Origin": EVIL},
    "a sandboxed frame, a file": {"Origin": "null"},
    "an image": {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"},
    "a frame": {
        "Sec-Fetch-Site": "cross-site",
        "Sec-Fetch-Mode": "navigate",
        "Sec-Fetch-Dest": "iframe",
    },
    "another port": {"Origin": "http://127.0.0.1:3000", "Sec-Fetch-Site": "same-site"},
    "an image of another port": {"Sec-Fetch-Site": "same-site"},
    "an extension": {"Origin": "chrome-extension://abcdef", "Sec-Fetch-Site": "none"},
    "an editor": {"Origin": "vscode-webview://abcdef", "Sec-Fetch-Site": "cross-site"},
    "two origins": {"Origin": f"{EVIL}, null"},
}
REBOUND = [
    *("evil.example", "evil.example:1919", "localhost.evil.example", "127.0.0.1.evil.example"),
    *("evil.example.", "notlocalhost", "127.0.0.1@evil.example", "[::1].evil.example", "a:b:1"),
    *("[evil.example]:80", "evil.example/localhost", "0x7f000001.example", "", ":1919"),
]
OWN = [
    *("localhost", "localhost:9", "LocalHost.", "api.localhost:1", "127.0.0.1", "127.8.9.1:80"),
    *("10.0.0.7:1919", "[::1]:1919", "[fe80::1]", "169.254.1.1"),
]


def routes(server: ScriptedServer) -> list[tuple[str, str]]:
    """All methods and paths of the API, the pages, their files, and paths that do not exist."""
    paths = httpx.get(f"{server.url}/openapi.json").json()["paths"]
    found = [(method.upper(), path) for path, methods in paths.items() for method in methods]
    assert len(found) > 20
    assert ("POST", "/start_profile") in found
    for path in ("/", "/docs", "/page/main.js", "/favicon.ico", "/openapi.json", "/nothing"):
        found += [("GET", path), ("HEAD", path), ("OPTIONS", path), ("POST", path)]
    return found


def assert_refused(answer: httpx.Response, code: str) -> str:
    """Check the status and the form of the error. Returns the message."""
    assert answer.status_code == 403, answer.text
    assert answer.headers["x-request-id"]
    assert "access-control-allow-origin" not in answer.headers
    if answer.request.method == "HEAD":
        return ""
    body, path = answer.json(), answer.request.url.path
    if path.startswith("/api/"):
        assert list(body) == ["error"]
        return str(body["error"])
    assert body["error"]["code"] == code
    if path.startswith("/v1/messages"):
        assert (body["type"], body["error"]["type"]) == ("error", "permission_error")
    return str(body["error"]["message"])


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    ring = key_ring(key_file(tmp_path_factory.mktemp("keys"), FILE))
    with ScriptedServer(keys=ring) as server:
        yield server


def ask(server: ScriptedServer, **headers: str) -> int:
    """Return the status of a completion. `a_b` is the header `a-b`."""
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    body = {"model": MODEL, "prompt": "one"}
    return httpx.post(f"{server.url}/v1/completions", json=body, headers=sent).status_code


@pytest.mark.parametrize("headers", FOREIGN.values(), ids=FOREIGN)
def test_no_route_serves_a_page_of_another_site(
    server: ScriptedServer, http: httpx.Client, headers: dict[str, str]
) -> None:
    num_received = len(server.received)
    for method, path in routes(server):
        answer = http.request(method, path, headers=headers, json={"model": MODEL})
        message = assert_refused(answer, "foreign_page")
        assert method == "HEAD" or "--cors-origin" in message
    assert len(server.received) == num_received


def test_no_route_is_served_under_a_foreign_name(
    server: ScriptedServer, http: httpx.Client
) -> None:
    """To the browser, a page whose name leads here is of the server's own origin."""
    num_received = len(server.received)
    for host in REBOUND:
        own = {"Host": host, "Origin": f"http://{host}", "Sec-Fetch-Site": "same-origin"}
        message = assert_refused(http.get("/metrics", headers={"Host": host}), "unknown_host")
        assert "--allowed-host" in message
        assert_refused(http.post("/api/chat", headers=own, json={"model": MODEL}), "unknown_host")
    for method, path in routes(server):
        answer = http.request(method, path, headers={"Host": "evil.example:1919"})
        assert_refused(answer, "unknown_host")
    assert len(server.received) == num_received


def test_the_forms_that_a_page_sends_without_a_question_are_no_json(http: httpx.Client) -> None:
    """A foreign page can send these types; its Origin is refused, and so are the types alone."""
    body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "one"}]})
    kinds = ("text/plain", "text/plain;application/json", "multipart/form-data; boundary=x")
    kinds += ("application/x-www-form-urlencoded", "text/plain; charset=application/json")
    for kind, path in product(kinds, ("/api/chat", "/api/generate", "/api/show", "/generate")):
        answer = http.post(path, content=body, headers={"Content-Type": kind})
        assert answer.status_code == 415, (path, kind)
        error = answer.json()["error"]
        message = error if path.startswith("/api/") else error["message"]
        assert "add the header 'Content-Type: application/json'" in message
    assert http.post("/api/chat", content=body).status_code == 200, "Ollama's clients may send none"


@pytest.mark.parametrize("host", OWN)
def test_localhost_and_addresses_are_served(server: ScriptedServer, host: str) -> None:
    assert ask(server, host=host) == 200
    assert ask(server, host=host, origin=f"http://{host}".lower()) == 200


def test_a_client_without_a_host_is_served(http: httpx.Client) -> None:
    """A browser always sends it."""
    with socket.create_connection((http.base_url.host, http.base_url.port or 80)) as client:
        client.settimeout(60)
        client.sendall(b"GET /health HTTP/1.1\r\nconnection: close\r\n\r\n")
        answer = b"".join(iter(lambda: client.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 200 OK")


def test_the_servers_own_pages_are_served(server: ScriptedServer, http: httpx.Client) -> None:
    own = server.url
    assert ask(server, origin=own, sec_fetch_site="same-origin", sec_fetch_mode="cors") == 200
    assert ask(server, origin=own) == 200, "a browser before 2023, or a page over plain HTTP"
    for path in ("/", "/docs", "/page/main.js", "/metrics", "/openapi.json"):
        assert http.get(path, headers={"Sec-Fetch-Site": "same-origin"}).status_code == 200
        assert http.get(path, headers={"Sec-Fetch-Site": "none"}).status_code == 200, "typed"


def test_a_link_on_another_site_opens_the_pages_alone(http: httpx.Client) -> None:
    visit = {
        "Sec-Fetch-Site": "cross-site",
        "Sec-Fetch-Mode": "navigate",
        "Sec-Fetch-Dest": "document",
    }
    for path in ("/", "/docs"):
        assert http.get(path, headers=visit).status_code == 200
        assert_refused(http.post(path, headers=visit), "foreign_page")
        assert_refused(http.get(path, headers={**visit, "Origin": EVIL}), "foreign_page")
    for path in ("/metrics", "/xray/events", "/v1/models", "/replica"):
        assert_refused(http.get(path, headers=visit), "foreign_page")


def test_with_keys_any_name_is_served_and_foreign_pages_are_not(keyed: ScriptedServer) -> None:
    """Behind a proxy that speaks HTTPS, its own page has its name; another page has no key, but
    its user may have given it one."""
    name = "chat.example.org"
    assert ask(keyed, host=name, x_api_key=OTHER) == 200
    assert ask(keyed, host=name, origin=f"https://{name}", x_api_key=OTHER) == 200
    assert ask(keyed, host=f"{name}:8443", origin=f"https://{name}:8443", x_api_key=OTHER) == 200
    # The proxy did not pass Host on. The browser knows that the page is the server's own.
    inner = {"host": "127.0.0.1:1919", "origin": f"https://{name}", "x_api_key": OTHER}
    assert ask(keyed, **inner, sec_fetch_site="same-origin") == 200
    assert ask(keyed, **inner) == 403
    assert ask(keyed, host=name, origin=EVIL, x_api_key=OTHER) == 403
    assert ask(keyed, host=name, origin=f"https://{name}:444", x_api_key=OTHER) == 403
    assert ask(keyed, host=name, origin=f"ftp://{name}", x_api_key=OTHER) == 403
    assert ask(keyed, host=name, sec_fetch_site="cross-site", x_api_key=OTHER) == 403
    assert ask(keyed, host=name, origin=f"https://{name}") == 401, "the key is asked for next"


def test_the_names_of_the_flags_are_served(tmp_path: Path) -> None:
    door = door_of("Gpu-Box", None, "host.docker.internal, chat.Example.org")
    with ScriptedServer(door=door) as server:
        for name in ("gpu-box", "host.docker.internal", "CHAT.example.org.", "localhost"):
            assert ask(server, host=f"{name}:1919") == 200
        for name in ("example.org", "a.chat.example.org", "internal"):
            assert ask(server, host=name) == 403
    with ScriptedServer(door=door_of("0.0.0.0", None, "*")) as server:
        assert ask(server, host="any.example") == 200
        assert ask(server, host="any.example", origin=EVIL) == 403
    ring = key_ring(key_file(tmp_path, FILE))
    with ScriptedServer(keys=ring, door=door) as server:
        assert ask(server, host="gpu-box", x_api_key=OTHER) == 200
        assert ask(server, host="evil.example", x_api_key=OTHER) == 403, "no flag is ignored"


def test_the_pages_that_cors_origin_names_are_served() -> None:
    page, editor = "https://page.example", "vscode-webview://abcdef"
    with ScriptedServer(door=door_of("127.0.0.1", f"{page},{editor}", None)) as server:
        for origin in (page, editor):
            headers = {"Origin": origin, "Sec-Fetch-Site": "cross-site"}
            asks = {**headers, "Access-Control-Request-Method": "POST"}
            preflight = httpx.options(f"{server.url}/api/chat", headers=asks)
            assert preflight.status_code == 200
            assert preflight.headers["access-control-allow-origin"] == origin
            models = httpx.get(f"{server.url}/v1/models", headers=headers)
            assert models.headers["access-control-allow-origin"] == origin
            assert models.status_code == 200
        for headers in FOREIGN.values():
            if headers.get("Origin") != editor:
                asks = {**headers, "Access-Control-Request-Method": "POST"}
                refusal = httpx.options(f"{server.url}/api/chat", headers=asks)
                assert_refused(refusal, "foreign_page")
        assert ask(server, host="evil.example", origin=page) == 403
    with ScriptedServer(door=Door(origins=("*",))) as server:
        for headers in FOREIGN.values():
            assert httpx.get(f"{server.url}/v1/models", headers=headers).status_code == 200
        assert ask(server, host="evil.example") == 403


def test_a_router_asks_by_any_name(server: ScriptedServer) -> None:
    """No page can set Via."""
    assert ask(server, host="node5", via=VIA) == 200
    assert ask(server, host="node5", via=f"1.1 front, {VIA}") == 200
    assert ask(server, host="node5", via="1.1 squid") == 403
    assert ask(server, host="node5", via=VIA, origin=EVIL) == 403


def test_refusals_are_counted_and_the_first_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "minisgl.server.web.guards")
    with ScriptedServer() as server:
        for number in range(MAX_TOLD + 5):
            for _ in range(2):
                assert ask(server, host=f"name-{number}") == 403
        page: Any = httpx.get(f"{server.url}/metrics").text
        assert 'minisgl_errors_total{code="unknown_host"} 42.0' in page
    told = [line for line in caplog.messages if line.startswith("refused: ")]
    assert len(told) == len(set(told)) == MAX_TOLD
    assert "'name-0'" in told[0]
    assert "--allowed-host" in told[0]
