"""The Ray Serve application: its replicas are whole servers, and its ingress is a router.

::

    client -> Ray's HTTP proxy -> Ingress (RouterApp) -> HTTP -> server of an Engine's node

Ray places, counts, restarts and upgrades the replicas. Requests do not pass through Ray's handles:
the ingress sends them to the servers, as `minisgl route` does. So APIs, streams, errors and keys
are those of the servers.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any, Final

import msgspec
import ray
from ray import serve

from minisgl.errors import EngineError
from minisgl.server.args import ServerArgs
from minisgl.server.web.guards import Door, door_of
from minisgl.utils.logger import get_logger, setup_logging
from minisgl_gateway.deploy.child import ServerProcess
from minisgl_gateway.deploy.options import DeployOptions, deploy_options
from minisgl_gateway.deploy.scale import ByWait, scale_stats
from minisgl_gateway.router.fleet import Fleet
from minisgl_gateway.router.proxy import RouterApp
from minisgl_gateway.router.replica_state import ReplicaState
from minisgl_gateway.router.upstream import Upstream, bearer

logger = get_logger(__name__)

LOOK_EVERY_S: Final = 0.5
"""The time between two looks at Ray's list of replicas."""

LOOK_S: Final = 5.0

REQUEST_ID: Final = b"x-request-id"

MAX_OPEN: Final = 100_000
"""Ray's limit of requests at an ingress or a replica. Servers refuse requests long before that."""

LOOK_BACK_S: Final = 15.0
UP_DELAY_S: Final = 5.0
DOWN_DELAY_S: Final = 300.0
"""Ray averages waits over `LOOK_BACK_S`, and adds or removes replicas after these delays."""


class Engine:
    """One replica: a server on this node, as a child process. Mutable: it starts and ends."""

    def __init__(self, args: ServerArgs, key: str | None) -> None:
        """Return once the server is ready. Raises StartupFailed."""
        setup_logging("replica", level=args.log_level)
        host = _this_node()
        self._drain_s = args.drain_timeout
        self._server = ServerProcess("the server", replace(args, host=host, port=0))
        self._upstream = Upstream(self._server.wait_ready())
        self._headers = bearer(key)

    def address(self) -> str:
        return self._server.url

    async def check_health(self) -> None:
        """Raises EngineError; Ray then replaces this replica."""
        if not self._server.is_alive:
            raise EngineError("the server has ended")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        _, body = await self._upstream.get("/replica", self._headers)
        return scale_stats(msgspec.json.decode(body, type=ReplicaState))

    async def __del__(self) -> None:  # Ray calls it, and waits for it, before the replica ends
        if hasattr(self, "_server"):
            await asyncio.sleep(LINGER_S)
            self._server.terminate()
            await asyncio.to_thread(self._server.wait_ended, self._drain_s + END_S)


LINGER_S: Final = 5.0
"""How long a server takes requests after Ray has begun to replace it. The new server is ready, but
the ingresses see it only at their next look, and then ask for its state."""

END_S: Final = 10.0
"""The longest wait for a server without open requests."""


class Ingress:
    """The deployment that Ray Serve's proxies send requests to."""

    def __init__(self, engines: Any, key: str | None, door: Door) -> None:
        self._engines, self._key, self._door = engines, key, door

    def __serve_build_asgi_app__(self) -> Any:
        return IngressApp(self._engines, self._key, self._door)


class IngressApp:
    """A router before the replicas in Ray's list. Mutable: the list changes."""

    def __init__(self, engines: Any, key: str | None, door: Door) -> None:
        """engines: the handle of the replicas' deployment."""
        setup_logging("router")
        self._engines = engines
        self._fleet = Fleet([], key)
        self._app = RouterApp(self._fleet).behind(door)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "lifespan":
            scope["request_id"] = dict(scope["headers"]).get(REQUEST_ID, b"").decode("latin-1")
            await self._app(scope, receive, _without_request_id(send))
            return
        await receive()
        watch = asyncio.create_task(self._watch())
        await send({"type": "lifespan.startup.complete"})
        await receive()
        watch.cancel()
        self._fleet.close()
        await send({"type": "lifespan.shutdown.complete"})

    async def _watch(self) -> None:
        while True:
            began = time.monotonic()
            try:
                answers = await self._engines.broadcast("address").results_async(
                    timeout_s=LOOK_S, return_exceptions=True
                )
                # Ray's list lacks a replica that is to end, which serves until it drains.
                serving = {replica.url for replica in self._fleet.up}
                listed = {each for each in answers if isinstance(each, str)}
                await self._fleet.change(serving | listed)
            except Exception as error:  # Ray has many kinds; the replicas stay as they were
                logger.warning("Ray did not return its list of replicas: %r", error)
            await asyncio.sleep(max(LOOK_EVERY_S - (time.monotonic() - began), 0.05))


def _this_node() -> str:
    """Return this node's address in the cluster."""
    own = ray.get_runtime_context().get_node_id()
    return next(str(n["NodeManagerAddress"]) for n in ray.nodes() if n["NodeID"] == own)


def _without_request_id(send: Any) -> Any:
    """Return `send` without the header X-Request-Id, which Ray's proxy adds."""

    async def sent(message: Any) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [(n, v) for n, v in message["headers"] if n != REQUEST_ID]
        await send(message)

    return sent


def build(given: dict[str, Any]) -> Any:
    """Return the application for the options `given`. Raises ConfigError."""
    options = deploy_options(given)
    engines = serve.deployment(**_placement(options))(Engine)
    ingress = serve.deployment(
        num_replicas=options.ingresses,
        max_ongoing_requests=MAX_OPEN,
        graceful_shutdown_timeout_s=options.server.drain_timeout + END_S,
        max_surge_percent=100,
    )(serve.ingress()(Ingress))
    args = options.server
    door = door_of(args.host, args.cors_origin, args.allowed_host)
    return ingress.bind(engines.bind(options.server, options.key), options.key, door)


def _placement(options: DeployOptions) -> dict[str, Any]:
    """Return Ray's options for the replicas. Each replica is one bundle, so it is on one node."""
    resources = {"CPU": options.cpus} | ({"GPU": options.gpus} if options.gpus else {})
    placement: dict[str, Any] = {
        "ray_actor_options": {"num_cpus": options.cpus, "num_gpus": options.gpus},
        "placement_group_bundles": [resources],
        "placement_group_strategy": "STRICT_PACK",
        "max_ongoing_requests": MAX_OPEN,
        "logging_config": {"enable_access_log": False},  # each ingress asks twice a second
        "health_check_period_s": 1.0,
        "graceful_shutdown_timeout_s": options.server.drain_timeout + 2 * END_S,
        "rolling_update_percentage": 1 / options.max_replicas,  # one after the other
    }
    if not options.is_scaled:
        return placement | {"num_replicas": options.replicas}
    policy = {
        "policy_function": f"{ByWait.__module__}:{ByWait.__name__}",
        "policy_kwargs": {"target_s": options.wait_s},
    }
    return placement | {
        "autoscaling_config": {
            "min_replicas": options.replicas,
            "max_replicas": options.max_replicas,
            "look_back_period_s": LOOK_BACK_S,
            "upscale_delay_s": UP_DELAY_S,
            "downscale_delay_s": DOWN_DELAY_S,
            "policy": policy,
        }
    }
