"""Tries `minisgl_gateway.deploy` on a Ray of this machine: clients, cost, kills, upgrades, scaling.

    python scripts/try_ray.py [--replicas N] [--streams N] [--only PHASE ...] [--json FILE]

Needs `pip install "minisgl[ray]" openai anthropic ollama`. 1. doors: official clients, stored
responses, a client that leaves, metrics, health, the X-ray. 2. cost: see `ray_cost`. 3. kill: a
server is killed under streams. 4. upgrade: the application is deployed again with another option,
under a steady load. No request may fail then. 5. autoscale: a queue adds a replica.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import psutil
import ray
from ray import serve

import try_clients
from minisgl_bench.report import write_json
from minisgl_gateway.deploy import app, ray_app
from own_server import free_port
from ray_cost import cost
from try_replicas import END_S, QUESTION, START_S, Clients

PHASES = ("doors", "cost", "kill", "upgrade", "autoscale")


def deploy(replicas: int, port: int, **changed: Any) -> Any:
    names = f"{try_clients.MODEL},m"
    options = {"replicas": replicas, "num_pages": 2048, "served_model_name": names, **changed}
    serve.run(app(options), name="model")
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        health = httpx.get(f"{url}/health", timeout=END_S, trust_env=False)
        if health.status_code == 200 and health.json()["up"] == replicas:
            return SimpleNamespace(url=url, port=port)
        time.sleep(0.2)
    raise TimeoutError(f"the replicas were not up within {START_S:g} s")


def addresses(ingress: Any) -> list[str]:
    page = httpx.get(f"{ingress.url}/metrics", timeout=END_S, trust_env=False).text
    lines = [line for line in page.splitlines() if line.startswith("minisgl_replica_up{")]
    return [line.split('"')[1] for line in lines]


def doors(ingress: Any) -> dict[str, Any]:
    """Official clients, a stored response, a client that leaves, metrics, health, the X-ray."""
    result: dict[str, Any] = {}
    for package in ("openai", "anthropic", "ollama"):
        for what, case in try_clients.CASES[package].items():
            case(ingress.url)
            result.setdefault(package, []).append(what)
    client = openai.OpenAI(base_url=f"{ingress.url}/v1", api_key="none", max_retries=0)
    stored, holders = [], []
    for _ in range(6):
        raw = client.responses.with_raw_response.create(model="m", input=QUESTION)
        holders.append(raw.headers["x-minisgl-replica"])
        stored.append(raw.parse().id)
    found = [client.responses.retrieve(each).id for each in stored]
    for each in stored:
        client.responses.create(model="m", input="And then?", previous_response_id=each)
    result["stored"] = {"found": found == stored, "replicas": len(set(holders))}
    with httpx.Client(base_url=ingress.url, timeout=END_S, trust_env=False) as http:
        body = {"model": "m", "prompt": QUESTION, "max_tokens": 1500, "stream": True}
        with http.stream("POST", "/v1/completions", json=body | {"ignore_eos": True}) as stream:
            stream.raise_for_status()
            lines = stream.iter_lines()  # without a name it ends here, and the stream with it
            next(lines)
            while not _num_open(http.get("/metrics").text):
                time.sleep(0.02)
        left = time.monotonic()
        while _num_open(http.get("/metrics").text):
            assert time.monotonic() - left < END_S
        result["left_request_ends_s"] = round(time.monotonic() - left, 2)
        result["health"] = http.get("/health").json()
        names = addresses(ingress)
        page = http.get("/metrics").text
        label = 'minisgl_requests_open{replica="%s"}'
        result["metrics_of_each"] = all(label % name in page for name in names)
        for name in names:
            with http.stream("GET", "/xray/events", params={"replica": name}) as stream:
                data = next(line for line in stream.iter_lines() if line.startswith("data: "))
                assert json.loads(data[6:])
        result["xray_of_each"] = len(names)
    return result


def _num_open(page: str) -> int:
    """Return the number of requests that are open at all servers."""
    lines = [line for line in page.splitlines() if line.startswith("minisgl_requests_open{")]
    return sum(int(float(line.split()[-1])) for line in lines)


def autoscale(port: int) -> dict[str, Any]:
    """A queue adds a replica, and its end takes it away again."""
    ray_app.UP_DELAY_S, ray_app.DOWN_DELAY_S, ray_app.LOOK_BACK_S = 1.0, 5.0, 5.0
    ingress = deploy(1, port, max_replicas=2, wait_s=0.5, max_running_requests=2, num_pages=4096)
    clients = Clients(ingress)
    seconds: dict[str, Any] = {}
    began = time.monotonic()
    with clients.keep_asking(12, max_tokens=300):
        _wait_for(ingress, 2)
        seconds["two_after_s"] = round(time.monotonic() - began, 1)
    began = time.monotonic()
    _wait_for(ingress, 1)
    seconds["one_after_s"] = round(time.monotonic() - began, 1)
    return {**seconds, "ends": dict(clients.ends), "errors": sorted(set(clients.errors))[:3]}


def _wait_for(ingress: Any, num: int) -> None:
    deadline = time.monotonic() + 2 * START_S
    while (health := httpx.get(f"{ingress.url}/health", timeout=END_S).json()).get("up") != num:
        if time.monotonic() > deadline:
            raise TimeoutError(f"there are {health}, not {num} replicas")
        time.sleep(0.5)


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
    clients = Clients(ingress)
    with clients.keep_asking(num_clients, max_tokens=40):
        before = set(addresses(ingress))
        began = time.monotonic()
        deploy(replicas, ingress.port, max_queued_requests=1000)
        while before & set(addresses(ingress)) or not _all_up(ingress):
            if time.monotonic() - began > START_S:
                raise TimeoutError("the replicas were not replaced")
            time.sleep(0.2)
        seconds = time.monotonic() - began
        time.sleep(2)
    return {
        "ends": dict(clients.ends), "errors": sorted(set(clients.errors))[:3],
        "seconds": round(seconds, 1),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--replicas", type=int, default=2, help="servers")
    parser.add_argument(
        "--streams", type=int, default=32, help="streams that are open when a server is killed"
    )
    parser.add_argument("--rounds", type=int, default=6, help="rounds, to measure the cost")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results")
    parser.add_argument(
        "--requests", type=int, default=8, help="requests of a batch, to measure the cost"
    )
    parser.add_argument(
        "--only", nargs="+", default=PHASES, choices=PHASES, help="phases (default: all)"
    )
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
            ("doors", lambda: doors(ingress)),
            ("cost", lambda: cost(ingress.url, addresses(ingress)[0], args.rounds, args.requests)),
            ("kill", lambda: kill(ingress, args.replicas, args.streams)),
            ("upgrade", lambda: upgrade(ingress, args.replicas)),
            ("autoscale", lambda: autoscale(port)),
        ):
            if name not in args.only:
                continue
            result[name] = run()
            print(name, json.dumps(result[name]), flush=True)
    finally:
        serve.shutdown()
        ray.shutdown()
        if args.json:
            write_json(args.json, result)
    failed = set()
    if killed := result.get("kill"):
        ends = Counter(killed["ends"])
        failures = ends["error before"] + ends["error within"]
        failed |= {"kill"} if killed["without_an_end"] else set()
        failed |= {"kill"} if failures > killed["at_the_victim"] else set()
    for name in ("upgrade", "autoscale"):
        failed |= {name} if set(result.get(name, {}).get("ends", {})) - {"whole"} else set()
    print("failed:", ", ".join(sorted(failed)) or "nothing")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
