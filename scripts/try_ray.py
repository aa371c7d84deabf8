"""Tries `minisgl.deploy` on a Ray of this machine: what the ingress costs, and what survives.

    python scripts/try_ray.py [--replicas N] [--streams N] [--rounds N] [--json FILE]

Needs `pip install "minisgl[ray]" openai`. 1. cost: what a request and its tokens take through the
ingress beyond what they take at the server, beside the same for an empty application that streams
as much. 2. kill: a server is killed under streams. 3. upgrade: the application is deployed again
with another option, under a steady load. No request may fail then.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import statistics
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import ray
import uvicorn
from ray import serve
from starlette.applications import Starlette
from starlette.responses import StreamingResponse
from starlette.routing import Route

from minisgl.deploy import app
from try_replicas import END_S, QUESTION, START_S, Clients, free_port

CHUNK = b"data: " + b"x" * 250 + b"\n\n"
PAUSE_S = 0.001
TOKENS = (8, 136)


def empty_app() -> Starlette:
    """As many pieces as are asked for, with a pause between them."""

    async def pieces(count: int) -> Any:
        for _ in range(count):
            yield CHUNK
            await asyncio.sleep(PAUSE_S)

    async def answer(request: Any) -> StreamingResponse:
        body = await request.json()
        return StreamingResponse(pieces(body["max_tokens"]), media_type="text/event-stream")

    return Starlette(routes=[Route("/empty", answer, methods=["POST"])])


class Empty:
    def __serve_build_asgi_app__(self) -> Any:
        return empty_app()


def deploy(replicas: int, port: int, **changed: Any) -> Any:
    options = {"replicas": replicas, "num_pages": 2048, "served_model_name": "m", **changed}
    serve.run(app(options), name="model")
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        health = httpx.get(f"{url}/health", timeout=END_S, trust_env=False)
        if health.status_code == 200 and health.json()["up"] == replicas:
            return SimpleNamespace(url=url, port=port)
        time.sleep(0.2)
    raise TimeoutError(f"the replicas were not up within {START_S:g} s")


def cost(ingress: Any, rounds: int) -> dict[str, Any]:
    """Medians in ms: what Ray and the router add to a request, and to each of its tokens."""
    listening = socket.create_server(("127.0.0.1", 0))
    bare = uvicorn.Server(uvicorn.Config(empty_app(), log_level="error"))
    thread = threading.Thread(target=bare.run, args=([listening],))
    thread.start()
    serve.run(
        serve.deployment(max_ongoing_requests=100)(serve.ingress()(Empty)).bind(),
        name="empty", route_prefix="/bare",
    )  # fmt: skip
    urls = {
        "server": f"http://{addresses(ingress)[0]}/v1/completions",
        "ingress": f"{ingress.url}/v1/completions",
        "empty": f"http://127.0.0.1:{listening.getsockname()[1]}/empty",
        "empty_on_ray": f"{ingress.url}/bare/empty",
    }
    times: dict[tuple[str, int], list[float]] = {}
    body = {"model": "m", "prompt": QUESTION, "temperature": 0, "stream": True, "ignore_eos": True}
    with httpx.Client(trust_env=False, timeout=END_S) as client:
        for _ in range(rounds):
            for num in TOKENS:
                for name, url in urls.items():
                    began = time.perf_counter()
                    with client.stream("POST", url, json=body | {"max_tokens": num}) as stream:
                        stream.raise_for_status()
                        for _piece in stream.iter_raw():
                            pass
                    times.setdefault((name, num), []).append(time.perf_counter() - began)
    bare.should_exit = True
    thread.join()
    serve.delete("empty")
    ms = {key: statistics.median(each) * 1e3 for key, each in times.items()}
    few, many = TOKENS
    added = {
        name: [ms[on_ray, num] - ms[alone, num] for num in TOKENS]
        for name, alone, on_ray in (
            ("ingress", "server", "ingress"),
            ("empty", "empty", "empty_on_ray"),
        )
    }
    result: dict[str, Any] = {
        f"{name}_{num}_tokens_ms": round(value, 3) for (name, num), value in ms.items()
    }
    for name, (small, large) in added.items():
        token = (large - small) / (many - few)
        result[f"{name}_adds_ms"] = {
            "request": round(small - few * token, 3),
            "token": round(token, 4),
        }
    return result


def addresses(ingress: Any) -> list[str]:
    page = httpx.get(f"{ingress.url}/metrics", timeout=END_S, trust_env=False).text
    lines = [line for line in page.splitlines() if line.startswith("minisgl_replica_up{")]
    return [line.split('"')[1] for line in lines]


def kill(ingress: Any, replicas: int, num_streams: int) -> dict[str, Any]:
    clients = Clients(ingress)
    clients.start(num_streams, 400)
    while clients.num_begun < num_streams // 2:
        time.sleep(0.01)
    victim = addresses(ingress)[0]
    port = int(victim.rpartition(":")[2])
    page = httpx.get(f"{ingress.url}/metrics", timeout=END_S, trust_env=False).text
    open_ = page.partition(f'minisgl_replica_requests_open{{replica="{victim}"}} ')[2].split()[0]
    connections = psutil.net_connections("tcp")
    pid = next(c.pid for c in connections if c.laddr.port == port and c.status == "LISTEN")
    psutil.Process(pid).kill()
    began = time.monotonic()
    num_hanging = clients.join()
    while victim in (names := addresses(ingress)) or len(names) < replicas or not _all_up(ingress):
        if time.monotonic() - began > START_S:
            raise TimeoutError("the replica was not replaced")
        time.sleep(0.1)
    return {
        "streams": num_streams, "at_the_victim": int(float(open_)), "without_an_end": num_hanging,
        "ends": dict(clients.ends), "errors": sorted(set(clients.errors))[:3],
        "whole_again_s": round(time.monotonic() - began, 1),
    }  # fmt: skip


def _all_up(ingress: Any) -> bool:
    health = httpx.get(f"{ingress.url}/health", timeout=END_S, trust_env=False).json()
    return bool(health.get("up") == health.get("replicas"))


def upgrade(ingress: Any, replicas: int, num_clients: int = 4) -> dict[str, Any]:
    clients, ended = Clients(ingress), threading.Event()

    def ask_on(index: int) -> None:
        while not ended.is_set():
            clients.ask(index, 40)

    threads = [threading.Thread(target=ask_on, args=(index,)) for index in range(num_clients)]
    for thread in threads:
        thread.start()
    before = set(addresses(ingress))
    began = time.monotonic()
    try:
        deploy(replicas, ingress.port, max_queued_requests=1000)
        while before & set(addresses(ingress)) or not _all_up(ingress):
            if time.monotonic() - began > START_S:
                raise TimeoutError("the replicas were not replaced")
            time.sleep(0.2)
        seconds = time.monotonic() - began
        time.sleep(2)
    finally:
        ended.set()
        for thread in threads:
            thread.join(END_S)
    return {
        "ends": dict(clients.ends), "errors": sorted(set(clients.errors))[:3],
        "seconds": round(seconds, 1),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--replicas", type=int, default=2, help="servers")
    parser.add_argument("--streams", type=int, default=32, help="open when a server is killed")
    parser.add_argument("--rounds", type=int, default=30, help="of the cost")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results")
    args = parser.parse_args()
    ray.init(
        address="local", num_cpus=16, include_dashboard=False, _node_ip_address="127.0.0.1",
        object_store_memory=200 * 2**20, log_to_driver=False,
    )  # fmt: skip
    port = free_port()
    result: dict[str, Any] = {"replicas": args.replicas, "ray": ray.__version__}
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        began = time.monotonic()
        ingress = deploy(args.replicas, port)
        result["start_s"] = round(time.monotonic() - began, 1)
        for name, run in (
            ("cost", lambda: cost(ingress, args.rounds)),
            ("kill", lambda: kill(ingress, args.replicas, args.streams)),
            ("upgrade", lambda: upgrade(ingress, args.replicas)),
        ):
            result[name] = run()
            print(name, json.dumps(result[name]), flush=True)
    finally:
        serve.shutdown()
        ray.shutdown()
        if args.json:
            args.json.write_text(json.dumps(result, indent=1) + "\n")
    killed, ends = result["kill"], Counter(result["kill"]["ends"])
    failures = ends["error before"] + ends["error within"]
    is_good = not killed["without_an_end"] and failures <= killed["at_the_victim"]
    return int(not (is_good and set(result["upgrade"]["ends"]) == {"whole"}))


if __name__ == "__main__":
    sys.exit(main())
