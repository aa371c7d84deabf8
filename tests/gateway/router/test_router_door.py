"""The router's own door: web pages of other sites, names, and the names of its servers."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from helpers.key_files import FILE, OTHER, key_file
from helpers.router_thread import RouterThread
from helpers.routing import Setup, complete
from helpers.scripted_server import MODEL, ScriptedServer
from helpers.waiting import until
from minisgl.server.web.guards import Door, door_of
from minisgl_gateway.keys.ring import KeyRing
from minisgl_gateway.router.serve import route

EVIL = {"Origin": "http://evil.example", "Sec-Fetch-Site": "cross-site"}
PATHS = ("/v1/models", "/metrics", "/health", "/replicas", "/replica", "/", "/xray/events", "/none")


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        (EVIL, "foreign_page"),
        ({"Origin": "null"}, "foreign_page"),
        ({"Sec-Fetch-Site": "cross-site"}, "foreign_page"),
        ({"Host": "evil.example"}, "unknown_host"),
    ],
)
def test_the_router_refuses_foreign_pages_and_names(
    two: Setup, headers: dict[str, str], code: str
) -> None:
    for path in PATHS:
        answer = httpx.get(f"{two.url}{path}", headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, code)
    for path in ("/start_profile", "/v1/completions"):
        answer = httpx.post(f"{two.url}{path}", headers=headers, json={"prompt": "one"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, code)
    ollama = httpx.post(f"{two.url}/api/chat", headers=headers, json={"model": MODEL})
    assert list(ollama.json()) == ["error"]
    assert not any(server.received for server in two.servers)


def test_its_own_pages_use_the_servers_through_it(two: Setup) -> None:
    """A server has another origin than the page, and the router has checked the page's."""
    own = {"Origin": two.url, "Sec-Fetch-Site": "same-origin"}
    body = {"model": MODEL, "prompt": "one"}
    for headers in (own, {"Origin": two.url}):
        answer = httpx.post(f"{two.url}/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
    link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    page = httpx.get(two.url, headers={**link, "Sec-Fetch-Dest": "document"})
    assert page.status_code == 200


def test_pages_that_cors_origin_names_use_the_servers_through_it() -> None:
    page = "https://page.example"
    with (
        ScriptedServer() as server,
        RouterThread([server.url], door=Door(origins=(page,))) as router,
    ):
        headers = {"Origin": page, "Sec-Fetch-Site": "cross-site"}
        asks = {**headers, "Access-Control-Request-Method": "POST"}
        preflight = httpx.options(f"{router.url}/v1/completions", headers=asks)
        assert preflight.headers["access-control-allow-origin"] == page
        body = {"model": MODEL, "prompt": "one"}
        answer = httpx.post(f"{router.url}/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == page
        assert httpx.get(f"{router.url}/v1/models", headers=EVIL).status_code == 403


def test_servers_without_keys_may_be_addressed_by_name() -> None:
    with ExitStack() as stack:
        servers = [stack.enter_context(ScriptedServer()) for _ in range(2)]
        router = RouterThread([server.url for server in servers])
        for number, replica in enumerate(router.fleet.replicas):
            replica.upstream.name = f"node{number}:1919"  # what it sends as Host
        stack.enter_context(router)
        assert len(router.fleet.up) == 2, [each.down for each in router.fleet.replicas]
        assert complete(router.url, "one").status_code == 200
        assert "minisgl_requests_open" in httpx.get(f"{router.url}/metrics").text
        direct = httpx.get(f"{servers[0].url}/v1/models", headers={"Host": "node0:1919"})
        assert direct.status_code == 403


def test_with_keys_any_name_of_the_router_is_served(tmp_path: Path) -> None:
    path = str(key_file(tmp_path, FILE))
    name, key = {"Host": "chat.example.org"}, {"x-api-key": OTHER}
    with (
        ScriptedServer(keys=KeyRing(None, path)) as server,
        RouterThread([server.url], key=OTHER) as router,
    ):
        models = f"{router.url}/v1/models"
        assert httpx.get(models, headers={**name, **key}).status_code == 200
        assert httpx.get(f"{router.url}/health", headers=name).status_code == 200
        own = {**name, **key, "Origin": "https://chat.example.org"}
        assert httpx.get(models, headers=own).status_code == 200
        assert httpx.get(models, headers={**name, **key, **EVIL}).status_code == 403
    with ScriptedServer() as server:
        with RouterThread([server.url], key=OTHER) as router:
            until(lambda: not router.fleet.needs_key)
            assert httpx.get(f"{router.url}/health", headers=name).status_code == 403
        with RouterThread([server.url], door=door_of("", None, "chat.example.org")) as router:
            assert httpx.get(f"{router.url}/health", headers=name).status_code == 200


@pytest.mark.parametrize("flags", ["--allowed-host a:1", "--cors-origin a"])
def test_wrong_flags_of_the_door_are_refused(
    flags: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        route(["--replica", "http://127.0.0.1:1", *flags.split()], 0.0)
    assert f"{flags.split()[0]}: must be" in capsys.readouterr().err
