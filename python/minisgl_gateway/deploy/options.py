"""The options of `minisgl_gateway.deploy:app`, which include those of `minisgl serve`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from minisgl.core.options import SWITCH, options_of
from minisgl.errors import ConfigError
from minisgl.server.args import ServerArgs
from minisgl_gateway.args import GatewayArgs
from minisgl_gateway.deploy.local import with_share_of_memory

NOT_ON_RAY: Final = frozenset(
    ("host", "port", "dp", "shell", "dry_run", "nnodes", "node_rank", "dist_init_addr", "log_steps",
     "record", "ssl_certfile", "ssl_keyfile", "offline")
)  # fmt: skip
"""Options that Ray sets, or that only a single server can have. Ray Serve's proxies do HTTPS."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeployOptions:
    """The options of a deployment.

    server: the options of each replica. replicas: their least number; max_replicas: their largest.
    wait_s: replicas are added if the expected time in a queue is longer. cpus, gpus: of each
    replica. ingresses: the number of routers. key: the routers' API key, for requests for the
    servers' states.
    """

    server: ServerArgs
    replicas: int
    max_replicas: int
    wait_s: float
    cpus: float
    gpus: float
    ingresses: int
    key: str | None

    @property
    def is_scaled(self) -> bool:
        return self.max_replicas > self.replicas


def deploy_options(given: Mapping[str, Any]) -> DeployOptions:
    """Return the options. given: `args` of a YAML file, or those of `serve run`, which are texts.

    Raises ConfigError.
    """
    rest = dict(given)
    replicas = int(_number(rest, "replicas", 1, least=1))
    max_replicas = int(_number(rest, "max_replicas", replicas, least=replicas))
    wait_s = _number(rest, "wait_s", 1.0, least=0.001)
    cpus = _number(rest, "cpus", 1.0, least=0.001)
    gpus = _number(rest, "gpus", None, least=0)
    ingresses = int(_number(rest, "ingresses", 1, least=1))
    server = _server_args(rest)
    if gpus is None:
        gpus = 0.0 if server.device == "cpu" or server.model is None else float(server.tp)
    if gpus and gpus != server.tp:
        raise ConfigError(f"gpus: a replica with tp {server.tp} has {server.tp} GPUs or none")
    if not gpus:
        server = with_share_of_memory(server, max_replicas)
    key = os.environ.get("MINISGL_ROUTE_KEY")
    if key is None and server.api_key is not None:
        key = server.api_key.partition(",")[0]
    if key is None and server.api_key_file is not None:
        raise ConfigError(
            "api_key_file: put one of its keys with admin rights into $MINISGL_ROUTE_KEY; the "
            "ingress asks the servers for their state with it"
        )
    return DeployOptions(
        server=server, replicas=replicas, max_replicas=max_replicas, wait_s=wait_s, cpus=cpus,
        gpus=gpus, ingresses=ingresses, key=key,
    )  # fmt: skip


def _server_args(given: Mapping[str, Any]) -> ServerArgs:
    known = options_of(GatewayArgs)
    fields = {}
    for name, value in given.items():
        if name in NOT_ON_RAY:
            raise ConfigError(f"{name}: not an option of minisgl_gateway.deploy (docs/replicas.md)")
        if name not in known:
            raise ConfigError(
                f"{name}: minisgl_gateway.deploy has no such option; see minisgl serve --help"
            )
        rule = known[name][1].rule
        if isinstance(value, str) and rule is SWITCH and value in ("true", "false"):
            value = value == "true"
        elif isinstance(value, str) and rule is not SWITCH:
            try:
                value = rule.parse(value)
            except ValueError:
                raise ConfigError(f"{name} must be {rule.words}, got {value!r}") from None
        fields[name] = value
    args = GatewayArgs(**fields)
    if wrong := args.conflict():
        raise ConfigError(wrong)
    return args


def _number(given: dict[str, Any], name: str, default: Any, *, least: float) -> Any:
    """Take the number `name` out of `given`, and return it, or `default` if it is null or absent.

    Raises ConfigError if it is not a number, or below `least`.
    """
    value = given.pop(name, None)
    if value is None:
        return default
    is_whole = name in ("replicas", "max_replicas", "ingresses")
    try:
        number = int(value) if is_whole else float(value)
    except (OverflowError, TypeError, ValueError):
        number = -1
    is_cut = isinstance(value, float) and number != value
    if isinstance(value, bool) or is_cut or not least <= number < float("inf"):
        kind = "a whole number" if is_whole else "a number"
        raise ConfigError(f"{name} must be {kind} of {least:g} or more, got {value!r}")
    return number
