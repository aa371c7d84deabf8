"""The rows of this package (`minisgl.plugins`)."""

from __future__ import annotations

from typing import Final

from minisgl.plugins import Row

ROWS: Final = [
    Row(
        "commands", "pull", "minisgl_gateway.downloads:pull",
        about="MODEL  download a model: ORG/REPO, or ORG/REPO:Q4_K_M for a GGUF file",
    ),
    Row(
        "commands", "list", "minisgl_gateway.downloads:show",
        about="  show the models that are downloaded",
    ),
    Row("commands", "rm", "minisgl_gateway.downloads:remove", about="MODEL  remove one of them"),
    Row(
        "commands", "route", "minisgl_gateway.router.serve:route",
        about="--replica URL ...  one address for several servers: requests go by prefix and load",
    ),
    Row("servers", "replicas", "minisgl_gateway.deploy.local:serve_replicas"),
]  # fmt: skip
