"""Ports and addresses of this host. Must not know what listens on them."""

from __future__ import annotations

import errno
import socket

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
    if given := env.HOST_IP.get():
        return given
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
