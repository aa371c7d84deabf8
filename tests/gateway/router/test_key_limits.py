"""API keys behind a router: the servers check them, and their limits hold over all servers."""

from __future__ import annotations

import asyncio
import hashlib
from contextlib import ExitStack
from pathlib import Path

import httpx
import msgspec
import numpy as np
import openai
import pytest

from helpers.router_thread import RouterThread
from helpers.routing import complete, state_with
from helpers.scripted_server import MODEL, STATE, ScriptedServer
from helpers.waiting import until
from minisgl_gateway.keys.limits import RateLimited
from minisgl_gateway.keys.ring import KeyRing
from minisgl_gateway.router import metrics
from minisgl_gateway.router.fleet import Fleet
from minisgl_gateway.router.key_limits import KeyLimits
from minisgl_gateway.router.prefix_hashes import prompt_hashes
from minisgl_gateway.router.replica_state import KeyUse, ReplicaState


def test_the_replicas_check_the_clients_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    keys = '[a]\nkey = "client"\nrequests_per_minute = 2\n[router]\nkey = "asks"\nadmin = true\n'
    file.write_text(keys)
    with ExitStack() as stack:
        servers = [stack.enter_context(ScriptedServer(keys=KeyRing(None, file))) for _ in range(2)]
        urls = [server.url for server in servers]
        for key, says in ((None, "give the router one with --api-key"), ("client", "admin rights")):
            with RouterThread(urls, key) as useless:
                assert says in str(useless.fleet.replicas[0].down)
        router = stack.enter_context(RouterThread(urls, key="asks"))
        assert complete(router.url, "one").status_code == 401
        assert httpx.get(f"{router.url}/metrics").status_code == 401
        client = openai.OpenAI(base_url=f"{router.url}/v1", api_key="client", max_retries=0)
        texts = [client.completions.create(model=MODEL, prompt="a b").choices[0].text]
        texts.append(client.completions.create(model=MODEL, prompt="a b").choices[0].text)
        assert texts == ["a b ."] * 2, "asking for a prompt's hashes is not counted as a request"


def test_only_an_admin_sees_the_names_of_the_servers(tmp_path: Path) -> None:
    with ExitStack() as stack:
        router, servers, _ = _limited(stack, tmp_path / "keys.toml", "")
        names = [server.url.removeprefix("http://") for server in servers]
        for key, status in ((None, 401), ("wrong", 401), ("client", 403), ("asks", 200)):
            headers = {"authorization": f"Bearer {key}"} if key else {}
            for path in ("/replicas", "/replica"):
                answer = httpx.get(f"{router.url}{path}", headers=headers)
                assert answer.status_code == status, answer.text
            which = httpx.get(f"{router.url}/xray/events", headers=headers)
            assert which.json()["error"]["code"] == "replica_needed"
            assert "GET /replicas" in which.text
            assert not any(name in which.text for name in names)
            listed = httpx.get(f"{router.url}/replicas", headers=headers)
            assert all((name in listed.text) == (status == 200) for name in names)
    with RouterThread(["http://127.0.0.1:1"], key="asks") as alone:  # no server can check a key
        for path in ("/replicas", "/metrics"):
            answer = httpx.get(f"{alone.url}{path}")
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_replica")


def test_a_prompt_goes_to_its_prefix_in_its_keys_namespace(tmp_path: Path) -> None:
    """The servers' hashes, and those that the router looks up, are of the key's namespace."""
    words = " ".join("x" * (1 + n % 7) for n in range(200))
    ids = np.array([len(word) for word in words.split()], np.int32)
    with ExitStack() as stack:
        router, servers, rings = _limited(stack, tmp_path / "keys.toml", "")
        (client,) = (key for key in rings[0] if key.name == "a")
        headers = {"authorization": "Bearer client"}
        for namespace, goes_to in ((client.namespace(""), 1), (client.namespace("x"), 0), ("", 0)):
            hashes = prompt_hashes(ids, 1, namespace).astype("<u8").tobytes()
            servers[1].state = state_with(queued_tokens=50, hashes=hashes)
            view = router.fleet.replicas[1].view
            until(lambda: view.state and view.state.hashes == hashes and not view.sent)  # noqa: B023  # it is waited for within the turn
            body = {"model": MODEL, "prompt": words, "max_tokens": 1}
            answer = httpx.post(f"{router.url}/v1/completions", json=body, headers=headers)
            assert answer.headers["x-minisgl-replica"] == router.fleet.replicas[goes_to].name


def _limited(
    stack: ExitStack, path: Path, limits: str
) -> tuple[RouterThread, list[ScriptedServer], list[KeyRing]]:
    """A router over two servers with the same key file."""
    path.write_text(f'[a]\nkey = "client"\n{limits}\n[router]\nkey = "asks"\nadmin = true\n')
    rings = [KeyRing(None, str(path)) for _ in range(2)]
    servers = [stack.enter_context(ScriptedServer(keys=ring)) for ring in rings]
    urls = [server.url for server in servers]
    return stack.enter_context(RouterThread(urls, key="asks")), servers, rings


def test_requests_of_a_key_are_limited_over_all_replicas(tmp_path: Path) -> None:
    with ExitStack() as stack:
        router, servers, _ = _limited(stack, tmp_path / "keys.toml", "requests_per_minute = 3")
        client = openai.OpenAI(base_url=f"{router.url}/v1", api_key="client", max_retries=0)
        for index in range(3):
            servers[index % 2].state = state_with(queued_tokens=1000)
            servers[1 - index % 2].state = STATE
            queued = [1000 * (index % 2 == 0), 1000 * (index % 2)]
            views = [each.view for each in router.fleet.replicas]
            until(lambda: [v.state and v.state.queued_tokens for v in views] == queued)  # noqa: B023  # it is waited for within the turn
            client.completions.create(model=MODEL, prompt="a b")
        assert [len(server.received) for server in servers] == [1, 2]
        with pytest.raises(openai.RateLimitError, match="its 3 requests a minute"):
            client.completions.create(model=MODEL, prompt="a b")
        with pytest.raises(openai.RateLimitError) as refused:
            client.completions.create(model=MODEL, prompt="a b")
        assert 15 < float(refused.value.response.headers["retry-after"]) <= 20
        asks = openai.OpenAI(base_url=f"{router.url}/v1", api_key="asks", max_retries=0)
        asks.completions.create(model=MODEL, prompt="a b")  # a key without limits
        page = httpx.get(f"{router.url}/metrics", headers={"x-api-key": "client"}).text
        assert 'minisgl_router_errors_total{code="rate_limit_exceeded"} 2.0' in page


def test_a_limit_that_the_key_file_drops_ends_at_the_router(tmp_path: Path) -> None:
    with ExitStack() as stack:
        path = tmp_path / "keys.toml"
        router, _, _ = _limited(stack, path, "requests_per_minute = 1")
        headers = {"authorization": "Bearer client"}
        body = {"model": MODEL, "prompt": "a b"}

        def status() -> int:
            answer = httpx.post(f"{router.url}/v1/completions", json=body, headers=headers)
            return answer.status_code

        assert [status(), status()] == [200, 429]
        path.write_text(path.read_text().replace("requests_per_minute = 1", ""))
        until(lambda: status() == 200)
        assert [status(), status()] == [200, 200]


def test_tokens_of_a_key_are_limited_over_all_replicas(tmp_path: Path) -> None:
    with ExitStack() as stack:
        router, servers, rings = _limited(stack, tmp_path / "keys.toml", "tokens_per_minute = 20")
        headers = {"authorization": "Bearer client"}
        body = {"model": MODEL, "prompt": "a b c d e f"}
        for server in servers:  # 13 tokens of each, not by the router
            httpx.post(f"{server.url}/v1/completions", json=body, headers=headers)
        assert [next(iter(ring)).use().num_tokens for ring in rings] == [13, 13]
        limits = router.fleet.limits
        until(lambda: sum(key.seen.tokens for key in limits._keys.values()) == 26)
        client = openai.OpenAI(base_url=f"{router.url}/v1", api_key="client", max_retries=0)
        with pytest.raises(openai.RateLimitError, match="its 20 tokens a minute"):
            client.completions.create(model=MODEL, prompt="a")


def test_a_refused_prompt_costs_its_key_no_tokens(tmp_path: Path) -> None:
    patience = httpx.Timeout(60, read=1.0)
    with ExitStack() as stack:
        router, servers, _ = _limited(stack, tmp_path / "keys.toml", "tokens_per_minute = 600")
        http = httpx.Client(
            base_url=router.url, timeout=patience, headers={"authorization": "Bearer client"}
        )
        stack.enter_context(http)
        refused = http.post("/v1/completions", json={"model": MODEL, "prompt": "!refuse b c d"})
        assert refused.status_code == 400
        (key,) = router.fleet.limits._keys.values()
        assert (key.own.requests, key.own.tokens) == (1, 0)
        body = {"model": MODEL, "prompt": "!hang b c d", "stream": True}
        with pytest.raises(httpx.ReadTimeout):  # the client leaves before the first token
            http.post("/v1/completions", json=body)
        until(lambda: any(server.aborted for server in servers))
        until(lambda: sum(each.num_open for each in router.fleet.replicas) == 0)
        assert (key.own.requests, key.own.tokens) == (2, 0)


def test_clients_need_keys_if_all_replicas_have_some() -> None:
    watched = Fleet(["http://127.0.0.1:1", "http://127.0.0.1:2"], "asks")
    found = []
    for replica, keys in zip(watched.replicas, ([], None), strict=True):
        state = msgspec.json.decode(state_with(keys=keys), type=ReplicaState)
        watched._found(replica, state, 0.0)
        found.append(watched.needs_key)
    assert found == [True, False]


@pytest.mark.parametrize("status", [401, 403])
def test_whom_a_replica_refuses_gets_no_metrics(
    status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def page(replica: object, headers: object) -> tuple[int, bytes]:
        return status, b"no"

    monkeypatch.setattr(metrics, "_page", page)
    watched = Fleet(["http://127.0.0.1:1"])
    watched.replicas[0].down = None
    assert asyncio.run(metrics.RouterMetrics(watched).page([])).status_code == status


def use(requests: int, tokens: int) -> KeyUse:
    """What a server reports of the key "client"."""
    digest = hashlib.sha256(b"client").hexdigest()
    return KeyUse(
        name="a", digest=digest, requests_per_minute=5, tokens_per_minute=None,
        num_requests=requests, num_tokens=tokens,
    )  # fmt: skip


def test_a_request_that_no_server_had_hides_none_of_another_router() -> None:
    limits = KeyLimits(clock=lambda: 0.0)
    limits.update("x", [use(0, 0)])
    passed = limits.admit("client")
    assert passed
    passed.send(1)
    passed.take_back(1, is_counted=False)
    limits.update("x", [use(4, 0)])
    with pytest.raises(RateLimited):
        limits.admit("client")


def test_requests_of_other_routers_are_counted_once() -> None:
    now = 0.0
    limits = KeyLimits(clock=lambda: now)
    assert limits.admit("client") is None, "nothing is known of it"
    limits.update("x", [use(40, 9)])  # before this router
    limits.update("y", [])
    for _ in range(3):
        passed = limits.admit("client")
        assert passed
        passed.send(1)
    limits.update("x", [use(42, 9)])  # two of the three
    limits.update("y", [use(2, 9)])  # one of them, and one of another router
    passed = limits.admit("client")  # the fifth
    assert passed
    passed.send(1)
    with pytest.raises(RateLimited, match="its 5 requests a minute"):
        limits.admit("client")
    limits.update("y", [use(3, 9)])
    now = 12.0
    assert limits.admit("client"), "one comes back in 12 s"
    limits.update("y", [use(1, 9)])  # it was started again: another router's again
    now = 24.0
    with pytest.raises(RateLimited):
        limits.admit("client")
