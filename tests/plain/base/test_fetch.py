"""base/fetch.py: which URLs are taken, which addresses, and what happens on the way."""

from __future__ import annotations

import io
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from quire.base import fetch
from quire.base.fetch import FetchError, FetchPolicy, check_address, download, parse, upload

LOCAL = FetchPolicy(max_bytes=10_000, timeout_s=10, allowed_hosts=("127.0.0.1",))


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    got: dict[str, Any] = {}

    def do_GET(self) -> None:
        kind, _, rest = self.path[1:].partition("?")
        if kind == "to":
            self.answer(302, b"", Location=rest)
        elif kind == "loop":
            self.answer(302, b"", Location="/loop")
        elif kind == "big":
            self.answer(200, b"x" * int(rest))
        elif kind == "endless":
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            try:
                while True:
                    self.wfile.write(b"1000\r\n" + b"x" * 4096 + b"\r\n")
            except OSError:
                self.close_connection = True
        elif kind == "drip":
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            try:
                for _ in range(1000):
                    self.wfile.write(b"x")
                    time.sleep(0.05)
            except OSError:
                self.close_connection = True
        else:
            self.answer(200 if kind == "file" else 404, b"hello")

    def do_PUT(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        kind, _, rest = self.path[1:].partition("?")
        if kind == "to":
            self.answer(307, b"", Location=rest)
            return
        Handler.got[self.path] = data
        self.answer(403 if kind == "no" else 200, b"")

    def answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def get(url: str, policy: FetchPolicy = LOCAL) -> bytes:
    into = io.BytesIO()
    assert download(url, into, policy) == len(into.getvalue())
    return into.getvalue()


def test_a_file_comes(url: str) -> None:
    assert get(f"{url}/file") == b"hello"
    assert get(f"{url}/to?/file") == b"hello"
    assert get(f"{url}/to?{url}/file") == b"hello"


@pytest.mark.parametrize(
    "path, says",
    [
        ("/none", "HTTP 404"),
        ("/loop", "more than 5 redirects"),
        ("/big?10001", "offers 10001 bytes; the limit is 10000"),
        ("/endless", "more than the limit of 10000 bytes"),
        ("/to?file:///etc/passwd", "only http and https"),
        ("/to?http://localhost/file", "host 'localhost' is refused"),
        ("/to?http://169.254.169.254/latest/meta-data", "169.254.169.254 is not public"),
    ],
)
def test_what_goes_wrong_on_the_way(path: str, says: str, url: str) -> None:
    with pytest.raises(FetchError, match=says):
        get(url + path)


def test_the_largest_file_that_is_allowed(url: str) -> None:
    assert len(get(f"{url}/big?10000")) == 10_000


@pytest.mark.parametrize(
    "text",
    [
        "http://127.0.0.1/x", "http://localhost/x", "http://[::1]/x", "http://[::ffff:127.0.0.1]/x",
        "http://0.0.0.0/x", "http://2130706433/x", "http://0x7f000001/x", "http://0177.0.0.1/x", "http://127.1/x",
        "http://10.0.0.8/x", "http://172.16.3.4/x", "http://192.168.1.1/x", "http://169.254.169.254/x",
        "http://100.64.0.1/x", "http://[fe80::1]/x", "http://[fd00::1]/x",
    ],
)  # fmt: skip
def test_private_addresses_are_refused(text: str) -> None:
    with pytest.raises(FetchError, match=r"not public|cannot be resolved"):
        get(text, FetchPolicy(max_bytes=10))


@pytest.mark.parametrize(
    "text, says",
    [
        ("file:///etc/passwd", "only http and https"),
        ("ftp://host/file", "only http and https"),
        ("gopher://host/", "only http and https"),
        ("//host/file", "only http and https"),
        ("http://", "names no host"),
        ("http://user:secret@host/", "credentials"),
        ("http://good.example\\@127.0.0.1/", "backslash"),
        ("http://good.example@127.0.0.1/", "credentials"),
        ("http://host /x", "space"),
        ("http://host/\r\nX: y", "control character"),
        ("http://h\u00f6st/", "ASCII"),
        ("http://host:99999/", "Port|port"),
        ("http://host:x/", "ort"),
        ("http://ho%00st/", "names no host"),
    ],
)
def test_urls_that_are_refused(text: str, says: str) -> None:
    with pytest.raises(FetchError, match=says) as wrong:
        parse(text)
    assert "secret" not in str(wrong.value)


@pytest.mark.parametrize("text", ["8.8.8.8", "2606:4700:4700::1111"])
def test_public_addresses(text: str) -> None:
    check_address(text)


@pytest.mark.parametrize("text", ["::ffff:10.0.0.1", "64:ff9b::a00:1", "2002:7f00:1::", "ff02::1", "224.0.0.1", "::"])
def test_addresses_in_disguise(text: str) -> None:
    with pytest.raises(FetchError):
        check_address(text)


def test_one_private_address_spoils_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    both = [(2, 1, 6, "", ("8.8.8.8", 80)), (2, 1, 6, "", ("10.0.0.1", 80))]
    monkeypatch.setattr(fetch.socket, "getaddrinfo", lambda *a, **k: both)
    with pytest.raises(FetchError, match=r"10\.0\.0\.1 is not public"):
        get("http://rebinding.example/")


def test_the_connection_goes_to_the_address_that_was_checked(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that answers differently the second time is asked once only."""
    port = int(url.rpartition(":")[2])
    answers = [[(2, 1, 6, "", ("127.0.0.1", port))]]
    real = fetch.socket.getaddrinfo

    def resolve(host: str, *rest: Any, **more: Any) -> Any:
        return answers.pop() if host == "files.example" else real(host, *rest, **more)

    monkeypatch.setattr(fetch.socket, "getaddrinfo", resolve)
    policy = FetchPolicy(max_bytes=100, timeout_s=10, allowed_hosts=("files.example",))
    assert get(f"http://files.example:{port}/file", policy) == b"hello"
    assert answers == []


def test_an_encrypted_address_may_not_lead_to_a_plain_one() -> None:
    class Answer:
        def getheader(self, name: str) -> str:
            return "http://host/x"

    with pytest.raises(FetchError, match="not encrypted"):
        fetch._next(parse("https://host/"), Answer())


def test_a_file_goes(url: str) -> None:
    upload(f"{url}/store?sig=1", io.BytesIO(b"answers"), 7, LOCAL)
    assert Handler.got["/store?sig=1"] == b"answers"
    upload(f"{url}/to?/moved", io.BytesIO(b"again"), 5, LOCAL)
    assert Handler.got["/moved"] == b"again"
    with pytest.raises(FetchError, match="HTTP 403"):
        upload(f"{url}/no", io.BytesIO(b"answers"), 7, LOCAL)
    with pytest.raises(FetchError, match="not public"):
        upload(f"{url}/store", io.BytesIO(b"answers"), 7, FetchPolicy(max_bytes=100))


def test_a_server_that_is_not_there(url: str) -> None:
    with pytest.raises(FetchError, match=r"GET http://127\.0\.0\.1:1: "):
        get("http://127.0.0.1:1/x")


@pytest.mark.parametrize("where", ["resolving", "connecting"])
def test_the_deadline_holds_before_there_is_a_connection(where: str, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = {"resolving": (socket, "getaddrinfo"), "connecting": (socket, "create_connection")}[where]
    plain = getattr(*slow)

    def later(*args: object, **options: object) -> object:
        time.sleep(0.4)
        return plain(*args, **options)

    monkeypatch.setattr(*slow, later)
    began = time.monotonic()
    with pytest.raises(FetchError, match=r"longer than the limit of 0\.2 s"):
        get(f"{url}/drip", replace(LOCAL, deadline_s=0.2))
    assert time.monotonic() - began < 30  # the answer itself drips for 50


@pytest.mark.parametrize("stated", ["\xb2", "9" * 5000, "-1"])
def test_a_length_that_is_not_a_number_is_not_believed(stated: str) -> None:
    class Answer:
        def getheader(self, name: str) -> str:
            return stated

        def read1(self, count: int) -> bytes:
            return b""

    assert fetch._copy(fetch.parse("http://example.com/"), Answer(), io.BytesIO(), LOCAL) == 0  # type: ignore[arg-type]


def test_a_redirect_to_what_is_not_a_url(url: str) -> None:
    with pytest.raises(FetchError, match="which is not a URL"):
        get(f"{url}/to?http://[")
