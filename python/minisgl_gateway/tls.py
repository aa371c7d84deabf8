"""The certificate of a server, checked before the model is loaded."""

from __future__ import annotations

import errno
import ssl

from minisgl.errors import ConfigError


def tls_context(certfile: str | None, keyfile: str | None) -> ssl.SSLContext | None:
    """Return the TLS settings of a server: TLS 1.2 or newer. Without a certificate None, which is
    HTTP. Raises ConfigError."""
    if certfile is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    flags = f"--ssl-certfile {certfile}" + (f" and --ssl-keyfile {keyfile}" if keyfile else "")
    try:
        context.load_cert_chain(certfile, keyfile, password=_no_password)
    except OSError as error:  # or an SSLError
        reason = error.reason if isinstance(error, ssl.SSLError) else error.strerror
        raise ConfigError(
            f"{flags} cannot be used ({reason or 'the certificate or the key is missing'}): give a "
            "PEM certificate and its private key without a password"
        ) from None
    return context


def _no_password() -> str:
    raise OSError(errno.EACCES, "the private key has a password")
