"""Ports and addresses of this host. Must not know what listens on them."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
import stat

from quire.base import env


def free_port(first: int | None = None) -> int:
    """A TCP port nobody listens on now. Counts up from `first` (or QUIRE_PORT), else the system chooses."""
    first = env.PORT.get() if first is None else first
    if first is None:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.bind(("", 0))
            return int(probe.getsockname()[1])
    for port in range(first, 65536):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            try:
                probe.bind(("", port))
            except OSError as taken:
                if taken.errno not in (errno.EADDRINUSE, errno.EACCES):
                    raise
                continue
            return port
    raise OSError(errno.EADDRINUSE, f"no free port between {first} and 65535")


def host_ip() -> str:
    """The address by which other hosts reach this one; the loopback address when there is no network."""
    if configured := env.HOST_IP.get():
        return configured
    # Connecting a datagram socket sends nothing: it only asks which interface would be used.
    for family, outside in ((socket.AF_INET, ("192.0.2.1", 9)), (socket.AF_INET6, ("2001:db8::1", 9))):
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(outside)
            except OSError:
                continue
            return str(probe.getsockname()[0])
    return "127.0.0.1"


def join_host_port(host: str, port: int) -> str:
    """'host:port', with the brackets an IPv6 address needs."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(address: str) -> bool:
    """Whether only this host can reach what is bound to this address."""
    parsed = ipaddress.ip_address(address)
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return (mapped or parsed).is_loopback


def open_listener(host: str | None, port: int) -> socket.socket:
    """A TCP socket bound to host and port, not listening yet: connections are refused until it does."""
    if not host:
        host = ""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host, port))
    except BaseException:
        made.close()
        raise
    return made


def open_unix_listener(path: str) -> socket.socket:
    """A unix socket that only this user may use (mode 0600). Takes the place of one that nobody listens on."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise FileExistsError(errno.EEXIST, f"{path!r} is not a socket")
        if _answers(path):
            raise OSError(errno.EADDRINUSE, f"another process is listening on {path!r}")
        os.unlink(path)
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)  # from its first moment
    try:
        made.bind(path)
    except BaseException:
        made.close()
        raise
    finally:
        os.umask(before)
    return made


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return False
        except OSError:
            return True
    return True
