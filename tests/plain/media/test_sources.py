"""Where media may come from, and what is refused: traversal, links, private addresses, redirects, endless answers."""

from __future__ import annotations

import base64
import http.server
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from quire.base import env
from quire.media.sources import MediaSources, read_data_url
from quire.schema.errors import InputError

PIXEL = b"\x89PNG not really"


class Handler(http.server.BaseHTTPRequestHandler):
    secret: ClassVar[list[str]] = []
    place: ClassVar[str] = ""  # of redirects; "": the secret of this server

    def do_GET(self) -> None:
        if self.path == "/redirect":
            self.send_response(302)
            self.send_header("Location", self.place or f"http://127.0.0.1:{self.server.server_address[1]}/secret")
            self.end_headers()
            return
        if self.path == "/secret":
            self.secret.append(self.path)
        if self.path == "/slow-head":
            for _ in range(2000):
                self.wfile.write(b"X")
                time.sleep(0.05)
            return
        self.send_response(200)
        if self.path == "/lies":
            self.send_header("Content-Length", str(1 << 40))
        self.end_headers()
        try:
            if self.path == "/endless":
                while True:
                    self.wfile.write(b"\0" * 65536)
            elif self.path == "/drip":
                for _ in range(2000):
                    self.wfile.write(b"\0")
                    time.sleep(0.05)
            else:
                self.wfile.write(PIXEL)
        except OSError:
            pass

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("QUIRE_IMAGE_FETCH_TIMEOUT", "0.6")
    monkeypatch.setenv("QUIRE_MAX_MEDIA_BYTES", "1000000")
    env.forget_all()
    yield
    monkeypatch.undo()
    env.forget_all()


OPEN = MediaSources(domains=("127.0.0.1",))  # the operator named the host, so it may be private


def test_an_allowed_host_is_fetched(port: int) -> None:
    assert OPEN.read(f"http://127.0.0.1:{port}/x.png", "image") == PIXEL


@pytest.mark.parametrize(
    "url",
    ["http://127.0.0.1/x", "http://localhost/x", "http://[::1]/x", "http://10.0.0.1/x", "http://192.168.1.1/x",
     "http://172.16.0.9/x", "http://169.254.169.254/latest/meta-data", "http://[fe80::1]/x", "http://0.0.0.0/x",
     "http://[::ffff:127.0.0.1]/x", "http://2130706433/x", "http://0x7f000001/x", "http://[64:ff9b::7f00:1]/x",
     "http://127.1/x", "http://[::]/x", "http://[fd00::1]/x", "http://[2002:7f00:1::]/x", "http://[ff02::1]/x",
     "http://100.64.0.1/x", "http://198.18.0.1/x", "http://224.0.0.1/x", "http://240.0.0.1/x", "https://10.1.2.3/x"],
)  # fmt: skip
def test_private_addresses_are_refused(url: str) -> None:
    with pytest.raises(InputError, match=r"not public|resolved"):
        MediaSources().read(url, "image")


def test_the_address_that_was_checked_is_connected_to(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that is public when it is checked and private when it is connected to: it is resolved once."""
    answers = iter([[(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("93.184.216.34", port))]])
    connected: list[str] = []

    def resolve(*args: object, **kwargs: object) -> object:
        return next(answers, [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))])

    def connect(address: tuple[str, int], timeout: float) -> socket.socket:
        connected.append(address[0])
        raise OSError("no network here")

    monkeypatch.setattr("quire.base.fetch.socket.getaddrinfo", resolve)
    monkeypatch.setattr("quire.base.fetch.socket.create_connection", connect)
    with pytest.raises(InputError, match="no network here"):
        MediaSources().read("http://rebinding.example/x", "image")
    assert connected == ["93.184.216.34"]


def test_only_listed_domains(port: int) -> None:
    with pytest.raises(InputError, match=r"'127.0.0.1' is not one of those allowed: example.org"):
        MediaSources(domains=("example.org",)).read(f"http://127.0.0.1:{port}/x", "image")
    with pytest.raises(InputError, match="credentials"):
        OPEN.read(f"http://example.org@127.0.0.1:{port}/x", "image")


def test_redirects_are_not_followed_unless_allowed(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    Handler.secret.clear()
    Handler.place = ""
    with pytest.raises(InputError, match="redirects are not followed"):
        OPEN.read(f"http://127.0.0.1:{port}/redirect", "image")
    assert not Handler.secret
    monkeypatch.setenv("VLLM_MEDIA_URL_ALLOW_REDIRECTS", "1")
    env.forget_all()
    try:
        assert OPEN.read(f"http://127.0.0.1:{port}/redirect", "image") == PIXEL
        assert Handler.secret
        Handler.secret.clear()
        with pytest.raises(InputError, match="not one of those allowed"):  # the host is not on the list by this name
            MediaSources(domains=("localhost",)).read(f"http://localhost:{port}/redirect", "image")
        assert not Handler.secret
    finally:
        monkeypatch.undo()
        env.forget_all()


NAMES = {"public.example": "93.184.216.34", "inside.example": "10.1.2.3", "turns.example": "93.184.216.34"}


@pytest.fixture
def internet(port: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names resolve as NAMES says, `turns.example` only once; a public address is the server here. The addresses that
    were connected to. Redirects are followed."""
    connected: list[str] = []
    asked: list[str] = []
    resolve, connect = socket.getaddrinfo, socket.create_connection

    def look_up(host: str, *args: object, **kwargs: object) -> object:
        turned = host == "turns.example" and host in asked
        asked.append(host)
        return resolve("127.0.0.1" if turned else NAMES.get(host, host), *args, **kwargs)  # type: ignore[arg-type]

    def open_to(address: tuple[str, int], timeout: float) -> socket.socket:
        connected.append(address[0])
        return connect(("127.0.0.1", port) if address[0] == "93.184.216.34" else address, timeout)

    monkeypatch.setattr("quire.base.fetch.socket.getaddrinfo", look_up)
    monkeypatch.setattr("quire.base.fetch.socket.create_connection", open_to)
    monkeypatch.setenv("QUIRE_MEDIA_URL_ALLOW_REDIRECTS", "1")
    env.forget_all()
    yield connected
    monkeypatch.undo()
    env.forget_all()


@pytest.mark.parametrize(
    "place",
    ["http://127.0.0.1:{port}/secret", "//localhost:{port}/secret", "http://inside.example:{port}/secret",
     "http://[::ffff:127.0.0.1]:{port}/secret", "http://169.254.169.254/latest", "http://turns.example:{port}/secret"],
)  # fmt: skip
def test_a_public_host_that_redirects_into_a_private_network(place: str, port: int, internet: list[str]) -> None:
    """The last of them is the host itself, whose name leads elsewhere when it is asked for again."""
    Handler.secret.clear()
    Handler.place = place.format(port=port)
    assert MediaSources().read(f"http://public.example:{port}/x", "image") == PIXEL
    host = "turns.example" if "turns" in place else "public.example"
    with pytest.raises(InputError, match=r"is refused: address .* is not public"):
        MediaSources().read(f"http://{host}:{port}/redirect", "image")
    assert set(internet) == {"93.184.216.34"} and not Handler.secret


def test_a_host_that_redirects_to_itself_for_ever(port: int, internet: list[str]) -> None:
    Handler.place = f"http://public.example:{port}/redirect"
    with pytest.raises(InputError, match="more than 5 redirects"):
        MediaSources().read(f"http://public.example:{port}/redirect", "image")
    assert len(internet) == 6


def test_a_host_with_a_private_address_among_others(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, port)) for one in ("93.184.216.34", "127.0.0.1")]
    monkeypatch.setattr("quire.base.fetch.socket.getaddrinfo", lambda *args, **kwargs: found)
    monkeypatch.setattr("quire.base.fetch.socket.create_connection", None)
    with pytest.raises(InputError, match=r"address 127\.0\.0\.1 is not public"):
        MediaSources().read(f"http://both.example:{port}/x", "image")


@pytest.mark.parametrize(("path", "why"), [("/endless", "limit of 1000000 bytes|0.6 s"), ("/lies", "offers|ended"),
                                           ("/drip", "0.6 s"), ("/slow-head", "0.6 s")])  # fmt: skip
def test_an_answer_that_never_ends(port: int, path: str, why: str, limits: None) -> None:
    began = time.monotonic()
    with pytest.raises(InputError, match=why):
        OPEN.read(f"http://127.0.0.1:{port}{path}", "image")
    assert time.monotonic() - began < 60


def test_files_lie_below_one_folder(tmp_path: Path, limits: None) -> None:
    inside, outside = tmp_path / "media", tmp_path / "outside"
    (inside / "deep").mkdir(parents=True)
    outside.mkdir()
    (inside / "deep" / "a b.png").write_bytes(PIXEL)
    (outside / "secret").write_bytes(b"secret")
    (tmp_path / "media-not").mkdir()
    (tmp_path / "media-not" / "x").write_bytes(b"secret")
    os.symlink(outside / "secret", inside / "link")
    os.symlink(outside, inside / "folder")
    os.mkfifo(inside / "pipe")
    (inside / "large").write_bytes(b"\0" * 1_000_001)
    sources = MediaSources(local_path=str(inside))
    assert sources.read(f"file://{inside}/deep/a%20b.png", "image") == PIXEL
    for path in (
        "../outside/secret",
        "%2e%2e/outside/secret",
        "link",
        "folder/secret",
        "../media-not/x",
        "deep/../../x",
    ):
        with pytest.raises(InputError, match="outside the folder"):
            sources.read(f"file://{inside}/{path}", "image")
    for url in ("file:///etc/passwd", f"file://localhost{outside}/secret"):
        with pytest.raises(InputError, match="outside the folder"):
            sources.read(url, "image")
    with pytest.raises(InputError, match="names the host"):
        sources.read("file://evil.example/etc/passwd", "image")
    with pytest.raises(InputError, match="not a regular file"):
        sources.read(f"file://{inside}/pipe", "image")
    with pytest.raises(InputError, match="1000001 bytes"):
        sources.read(f"file://{inside}/large", "image")
    with pytest.raises(InputError, match=r"null|outside"):
        sources.read(f"file://{inside}/a%00b", "image")
    with pytest.raises(InputError, match="--allowed-local-media-path"):
        MediaSources().read(f"file://{inside}/deep/a%20b.png", "image")


def test_data_urls(limits: None) -> None:
    text = base64.b64encode(PIXEL).decode()
    assert read_data_url(f"data:image/png;base64,{text}") == PIXEL
    assert read_data_url("data:text/plain,a%20b") == b"a b"
    for url, why in (("data:image/png;base64", "no comma"), ("data:image/png;base64,@@@", "base64"),
                     (f"data:;base64,{'A' * 2_000_000}", "limit is 1000000")):  # fmt: skip
        with pytest.raises(InputError, match=why):
            read_data_url(url)


@pytest.mark.parametrize("url", ["ftp://a/b", "gopher://a", "javascript:alert(1)", "", "image.png", "s3://bucket/x"])
def test_other_schemes_are_refused(url: str) -> None:
    with pytest.raises(InputError, match="only data:, http:, https: and file:"):
        MediaSources().read(url, "image")


def test_programs_exchange_media(tmp_path: Path) -> None:
    from PIL import Image

    from quire.media import exchange

    image = Image.new("RGBA", (6, 4), (10, 20, 30, 255))
    image.save(tmp_path / "a.png")
    fetched = exchange.fetch_image(f"file://{tmp_path}/a.png")
    assert fetched.mode == "RGB" and fetched.size == (6, 4) and fetched.getpixel((0, 0)) == (10, 20, 30)
    again = exchange.fetch_image("data:image/png;base64," + exchange.encode_image_base64(image))
    assert again.tobytes() == fetched.tobytes()
    assert exchange.convert_image_mode(image, "L").mode == "L"
    samples, rate = exchange.fetch_audio(
        "data:audio/wav;base64," + exchange.encode_audio_base64([0.0, 0.5, -0.5], 8000)
    )
    assert rate == 8000 and [round(float(one), 3) for one in samples] == [0.0, 0.5, -0.5]
    with pytest.raises(InputError, match="not public"):
        exchange.fetch_image("http://127.0.0.1/x.png")
    with pytest.raises(InputError, match="format"):
        exchange.encode_image_base64(image, format="EPS")
