"""The HTTP client of our commands: the URLs that it accepts, and its use of proxies."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from minisgl.errors import ConfigError
from minisgl.utils.http import unusable_proxy

if TYPE_CHECKING:
    import httpx


def server_root(url: str) -> str:
    """Return the URL with a scheme (http:// by default) and without a final /v1.

    Our paths begin with /v1, and the base URLs of OpenAI's clients end with it.
    """
    url = url if "://" in url else f"http://{url}"
    return url.rstrip("/").removesuffix("/v1")


def http_client(url: str, **options: Any) -> httpx.Client:
    """Return a client whose base URL is `url`. It ignores proxy variables for a loopback address.

    options: of httpx.Client. Raises ConfigError if httpx cannot use a proxy variable or the
    certificates that $SSL_CERT_FILE or $SSL_CERT_DIR names.
    """
    import httpx

    try:
        trusted = url.startswith("http:") or httpx.create_ssl_context()
        return httpx.Client(base_url=url, trust_env=not is_loopback(url), verify=trusted, **options)
    except OSError as error:
        raise ConfigError(f"SSL_CERT_FILE or SSL_CERT_DIR has no certificates: {error}") from error
    except (ImportError, ValueError) as error:
        raise unusable_proxy(error) from error


def is_loopback(url: str) -> bool:
    """Return whether the host of `url` is localhost, 127.0.0.0/8, ::1, 0.0.0.0 or ::."""
    try:
        host = urlsplit(url).hostname or ""
        address = None if host == "localhost" else ipaddress.ip_address(host)
    except ValueError:  # another name, or no URL
        return False
    return address is None or address.is_loopback or address.is_unspecified
