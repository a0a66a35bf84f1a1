"""Files over http(s) from addresses that may be foreign: one URL parser, checked addresses, bounded sizes.

A URL is read once, here. Its host is resolved once, every address it has must be public (or the host must be on the
list of those allowed), and the connection goes to the very address that was checked; Host and TLS keep the name. Each
redirect goes through the same checks. In: a URL and a FetchPolicy. Out: bytes in a file, or FetchError, which says why.
Must not know: what the file holds. Proxies of the environment are not used.
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, NamedTuple
from urllib.parse import urljoin, urlsplit

from quire.base.log import logger
from quire.base.progress import progress

log = logger(__name__)
_PIECE = 1 << 20
_REDIRECTS = (301, 302, 303, 307, 308)
_SAME_METHOD = (307, 308)


class FetchError(Exception):
    """The URL is refused, or the exchange failed."""


@dataclass(frozen=True)
class FetchPolicy:
    max_bytes: int
    timeout_s: float = 60.0  # for each wait, not for the whole
    allowed_hosts: tuple[str, ...] = ()  # may lie in a private network; others must be public
    max_redirects: int = 5
    only_allowed: bool = False  # hosts that are not among them are refused, public or not
    quiet: bool = False  # no progress bar
    deadline_s: float | None = None  # for the whole exchange, redirects included, however slowly bytes arrive


class ParsedUrl(NamedTuple):
    """A URL, taken apart."""

    tls: bool
    host: str
    port: int
    path: str  # with the query

    def __str__(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.host}:{self.port}"


def is_url(text: str) -> bool:
    return "://" in text


def parse(url: str) -> ParsedUrl:
    """http(s) only, no credentials, nothing that two parsers could read differently."""
    shown = url[:200]
    if any(character <= " " or character in "\\\x7f" for character in url) or not url.isascii():
        raise FetchError(f"URL {shown!r} holds a space, a control character, a backslash or a letter outside ASCII")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as wrong:
        raise FetchError(f"URL {shown!r}: {wrong}") from None
    if parts.scheme not in ("http", "https"):
        raise FetchError(f"URL {shown!r}: only http and https are allowed, got {parts.scheme!r}")
    if "@" in parts.netloc:
        raise FetchError(f"URL {parts.scheme}://…: credentials in a URL are not allowed")
    if not parts.hostname or "%" in parts.netloc:
        raise FetchError(f"URL {shown!r} names no host")
    tls = parts.scheme == "https"
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return ParsedUrl(tls, parts.hostname, port or (443 if tls else 80), path)


def check_address(text: str) -> None:
    """Only addresses of the public internet; an IPv4 address dressed as IPv6 is looked at as what it is."""
    address = ipaddress.ip_address(text.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour or (address.teredo[1] if address.teredo else None)
        if inner is None and address in _NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None and not _public(inner):
            raise FetchError(f"address {text} is not public")
    if not _public(address):
        raise FetchError(f"address {text} is not public")


_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


def _public(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    return address.is_global and not address.is_multicast and not address.is_reserved


def resolve(target: ParsedUrl, policy: FetchPolicy) -> tuple[str, int]:
    """One address of the host, all of which were checked."""
    if policy.only_allowed and target.host not in policy.allowed_hosts:
        raise FetchError(
            f"host {target.host!r} is not one of those allowed: {', '.join(policy.allowed_hosts) or 'none'}"
        )
    try:
        resolved = socket.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as wrong:
        raise FetchError(f"host {target.host!r} cannot be resolved: {wrong}") from None
    addresses = [str(entry[4][0]) for entry in resolved]
    if target.host not in policy.allowed_hosts:
        for address in addresses:
            try:
                check_address(address)
            except FetchError as wrong:
                raise FetchError(
                    f"host {target.host!r} is refused: {wrong}; allow the host by name to use it"
                ) from None
    return addresses[0], target.port


def check(url: str, policy: FetchPolicy) -> None:
    """Refuse a URL before there is anything to send to it."""
    resolve(parse(url), policy)


class _Pinned(http.client.HTTPConnection):
    """Connects to the checked address; TLS is made for the name."""

    def __init__(self, target: ParsedUrl, policy: FetchPolicy) -> None:
        super().__init__(target.host, target.port, timeout=policy.timeout_s)
        self._address = resolve(target, policy)
        self._tls = ssl.create_default_context() if target.tls else None
        self._open: socket.socket | None = None  # `sock` is forgotten while an answer is still read from it
        self._is_cut = False

    def connect(self) -> None:
        self.sock = self._open = socket.create_connection(self._address, self.timeout)
        self._check_cut()
        if self._tls is not None:
            secured = self._tls.wrap_socket(self.sock, server_hostname=self.host, do_handshake_on_connect=False)
            self.sock = self._open = secured  # before the handshake, so that a deadline can end it
            self._check_cut()
            secured.do_handshake()

    def cut(self) -> None:
        """End what is being sent or received, from another thread: the socket's own shutdown, not that of TLS."""
        self._is_cut = True  # first: a socket that is opened only now is looked at by who opens it
        if self._open is not None:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(self._open, socket.SHUT_RDWR)

    def _check_cut(self) -> None:
        if self._is_cut:
            raise TimeoutError("the time was over before there was a connection")


def download(url: str, into: IO[bytes], policy: FetchPolicy) -> int:
    """The file at a URL; the number of its bytes."""
    target = parse(url)
    end = None if policy.deadline_s is None else time.monotonic() + policy.deadline_s
    for _ in range(policy.max_redirects + 1):
        with _ask(target, "GET", policy, end=end) as answer:
            if answer.status in _REDIRECTS:
                target = _next(target, answer)
                continue
            _check_status(target, "GET", answer)
            return _copy(target, answer, into, policy)
    if not policy.max_redirects:
        raise FetchError(f"the server redirects to {target}, and redirects are not followed")
    raise FetchError(f"more than {policy.max_redirects} redirects, the last to {target}")


def upload(url: str, file: IO[bytes], size: int, policy: FetchPolicy) -> None:
    """PUT a file, as presigned URLs of object stores take it."""
    target = parse(url)
    for _ in range(policy.max_redirects + 1):
        file.seek(0)
        with _ask(target, "PUT", policy, file, size) as answer:
            if answer.status in _SAME_METHOD:
                target = _next(target, answer)
                continue
            _check_status(target, "PUT", answer)
            return
    raise FetchError(f"more than {policy.max_redirects} redirects, the last to {target}")


@contextmanager
def _ask(
    target: ParsedUrl,
    method: str,
    policy: FetchPolicy,
    body: IO[bytes] | None = None,
    size: int = 0,
    end: float | None = None,
) -> Iterator[http.client.HTTPResponse]:
    """`end`: the monotonic time at which the connection is cut."""
    connection = _Pinned(target, policy)
    _check_deadline(target, policy, end)
    timer = None if end is None else threading.Timer(max(0.0, end - time.monotonic()), connection.cut)
    if timer is not None:
        timer.daemon = True
        timer.start()
    headers = {"Accept-Encoding": "identity", "User-Agent": "quire"}
    if body is not None:
        headers |= {"Content-Length": str(size), "Content-Type": "application/octet-stream"}
    try:
        connection.request(method, target.path, body, headers)
        yield connection.getresponse()
        _check_deadline(target, policy, end)  # a cut connection may look like a complete answer
    except (OSError, http.client.HTTPException) as wrong:
        _check_deadline(target, policy, end)
        raise FetchError(f"{method} {target}: {wrong or type(wrong).__name__}") from None
    finally:
        if timer is not None:
            timer.cancel()
        connection.close()


def _check_deadline(target: ParsedUrl, policy: FetchPolicy, end: float | None) -> None:
    if end is not None and time.monotonic() >= end:
        raise FetchError(f"{target} took longer than the limit of {policy.deadline_s:g} s") from None


def _next(target: ParsedUrl, answer: http.client.HTTPResponse) -> ParsedUrl:
    place = answer.getheader("location") or ""
    base = f"{target}{target.path}"
    try:
        redirect = parse(urljoin(base, place))
    except ValueError:
        raise FetchError(f"{target} redirects to {place!r:.100}, which is not a URL") from None
    if target.tls and not redirect.tls:
        raise FetchError(f"{target} redirects to {redirect}, which is not encrypted")
    return redirect


def _check_status(target: ParsedUrl, method: str, answer: http.client.HTTPResponse) -> None:
    if not 200 <= answer.status < 300:
        raise FetchError(f"{method} {target}: HTTP {answer.status} {answer.reason}")


def _copy(target: ParsedUrl, answer: http.client.HTTPResponse, into: IO[bytes], policy: FetchPolicy) -> int:
    stated = answer.getheader("content-length") or ""
    size = int(stated) if stated.isascii() and stated.isdigit() and len(stated) < 20 else None
    if size is not None and size > policy.max_bytes:
        raise FetchError(f"{target} offers {size} bytes; the limit is {policy.max_bytes}")
    total = 0
    with progress(log, f"Fetching from {target.host}", size, shown=not policy.quiet) as advance:
        while piece := answer.read1(_PIECE):
            total += len(piece)
            if total > policy.max_bytes:
                raise FetchError(f"{target} sends more than the limit of {policy.max_bytes} bytes")
            into.write(piece)
            advance(len(piece))
    if size is not None and total < size:
        raise FetchError(f"{target} ended after {total} of {size} bytes")
    return total
