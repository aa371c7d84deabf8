"""Several servers behind one address, on this machine (`minisgl serve --dp N`) or on Ray.

What it is for: it starts servers as child processes, replaces those that end, and runs a router
before them. What it does not know: which server gets a request (`minisgl_gateway.router`). Read in
this order: `child` (one server), `local` (`--dp`), `ray_app` (`serve run
minisgl_gateway.deploy:app`), `scale` (the number of replicas).
"""

from __future__ import annotations

from typing import Any


def app(args: dict[str, Any]) -> Any:
    """Return the Ray Serve application: `serve run minisgl_gateway.deploy:app model=...
    replicas=2`.

    args: see `minisgl_gateway.deploy.options`. Raises ConfigError.
    """
    from minisgl.errors import ConfigError

    try:
        from minisgl_gateway.deploy.ray_app import build
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "ray":
            raise
        raise ConfigError("minisgl_gateway.deploy needs Ray: pip install 'minisgl[ray]'") from None
    return build(args)
