"""The proxies of this environment, for the programs that use them."""

from __future__ import annotations

from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from minisgl.errors import ConfigError


def unusable_proxy(error: Exception) -> ConfigError:
    """Return the error for a proxy variable that httpx cannot use. error: what httpx raised."""
    return ConfigError(
        f"a proxy variable of the environment cannot be used ({error}); for a SOCKS proxy run "
        "pip install 'httpx[socks]', or unset ALL_PROXY, HTTPS_PROXY and HTTP_PROXY"
    )


def goes_through_proxy(url: str) -> bool:
    """Return whether other programs of this environment, such as curl, send requests for this
    http:// URL to a proxy."""
    host = urlsplit(url).hostname or ""
    return bool(getproxies().keys() & {"http", "all"}) and not proxy_bypass(host)
