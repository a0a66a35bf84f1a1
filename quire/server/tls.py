"""TLS: what uvicorn is told, and new certificate files taken up while the server runs (enable_ssl_refresh).

In: paths. Handshakes after a change use the new files; open connections stay. Files that cannot be loaded (half
written, key and certificate that do not match) are reported, and the old ones stay in use until they change again.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from typing import TYPE_CHECKING, Any

from quire.base.log import logger
from quire.schema.errors import ConfigError

if TYPE_CHECKING:
    from quire.config.server import ServerConfig

log = logger(__name__)
POLL_SECONDS = 1.0
_CERTIFICATE, _KEY = b"CERTIFICATE-----", b"PRIVATE KEY-----"  # ends of the lines that begin them
_LONGEST = 1 << 24
_Seen = tuple[tuple[int, int, int], ...]


def settings(options: ServerConfig) -> dict[str, Any]:
    """uvicorn's keywords; empty without TLS. The files are read once, to find a wrong one early."""
    if not options.tls:
        return {}
    _check(options)
    return {
        "ssl_certfile": options.ssl_certfile,
        "ssl_keyfile": options.ssl_keyfile,
        "ssl_ca_certs": options.ssl_ca_certs,
        "ssl_cert_reqs": options.ssl_cert_reqs,
        **({"ssl_ciphers": options.ssl_ciphers} if options.ssl_ciphers else {}),
    }


def _check(options: ServerConfig) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        if options.ssl_ciphers:
            context.set_ciphers(options.ssl_ciphers)
        load_files(context, options)
    except (OSError, ssl.SSLError) as wrong:
        raise ConfigError(f"TLS cannot be set up: {_why(wrong, options)}", param="ssl_certfile") from None


def load_files(context: ssl.SSLContext, options: ServerConfig) -> None:
    assert options.ssl_certfile is not None
    context.load_cert_chain(options.ssl_certfile, options.ssl_keyfile, password=_no_password)
    if options.ssl_ca_certs:
        context.load_verify_locations(options.ssl_ca_certs)


def _no_password() -> str:
    """Instead of a question on the terminal, which would stop a server."""
    raise ssl.SSLError("the private key is encrypted; a server needs one without a password")


def _why(wrong: Exception, options: ServerConfig) -> str:
    """In terms of the files: OpenSSL's own words name none."""
    files = [("ssl_certfile", _CERTIFICATE, "certificate"), ("ssl_keyfile", _KEY, "private key"),
             ("ssl_ca_certs", _CERTIFICATE, "certificate")]  # fmt: skip
    for option, mark, what in files:
        if (path := getattr(options, option)) is None:
            continue
        if not os.path.isfile(path):
            return f"there is no file {path!r}"
        if not _contains(path, mark):
            return f"{option} {path!r} holds no {what} in PEM form"
    if options.ssl_keyfile is None and not _contains(options.ssl_certfile or "", _KEY):
        return f"ssl_certfile {options.ssl_certfile!r} holds no private key: name its file with ssl_keyfile"
    names = [path for option, _, _ in files if (path := getattr(options, option))]
    words = wrong.args[-1] if wrong.args else str(wrong)
    return f"{words} (files: {', '.join(names)})"


def _contains(path: str, mark: bytes) -> bool:
    try:
        with open(path, "rb") as file:
            return mark in file.read(_LONGEST)
    except OSError:  # gone since, or not readable: what failed says so
        return True


async def refresh(context: ssl.SSLContext, options: ServerConfig) -> None:
    """Runs beside the server until it is cancelled."""
    seen = _look(options)
    while True:
        await asyncio.sleep(POLL_SECONDS)
        current = _look(options)
        if current == seen:
            continue
        seen = current
        try:
            load_files(context, options)
        except (OSError, ssl.SSLError) as wrong:
            log.error("New certificate files cannot be used, the old ones stay: %s", _why(wrong, options))
        else:
            log.info("New certificate files are in use")


def _look(options: ServerConfig) -> _Seen:
    seen = []
    for name in (options.ssl_certfile, options.ssl_keyfile, options.ssl_ca_certs):
        try:
            about = os.stat(name) if name else None
        except OSError:
            about = None
        seen.append((about.st_mtime_ns, about.st_size, about.st_ino) if about else (0, 0, 0))
    return tuple(seen)
