"""What stands before the routes of a live server: keys, CORS, ids, sizes, proxies, sockets, overload, deadlines."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import ssl
import stat
import subprocess
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import uvicorn

from quire.config.server import server_config
from quire.schema.errors import ConfigError
from quire.server import limits, tls
from quire.server.middleware import _users_own as users_own
from tests.server.hosted import Hosted, completion, hosted, started, wait_until

KEYS = ("first-key", "second-key")
SITE = "https://pages.example"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    flags = [
        "--api-key", *KEYS, "--allowed-origins", f'["{SITE}"]', "--max-request-bytes", "4096",
        "--h11-max-header-count", "40", "--h11-max-incomplete-event-size", "8192", "--root-path", "/quire",
        "--middleware", "tests.server.layers:Stamp", "--middleware", "tests.server.layers.mark",
        "--enable-log-requests", "--enable-log-outputs", "--max-log-len", "4",
        "--disable-access-log-for-endpoints", "/version,/load", "--shutdown-timeout", "1",
    ]  # fmt: skip
    with hosted(tmp_path_factory.mktemp("doors"), *flags, env={"QUIRE_SERVER_DEV_MODE": "1"}) as running:
        yield running


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


GOOD = bearer(KEYS[1])


# ---- keys ----------------------------------------------------------------------------------------------------------

GUARDED = (
    "/v1/models", "/version", "/load", "/metrics", "/console/stats", "/openapi.json", "/server_info", "/is_paused",
    "/nowhere", "//health", "/health/", "/healthy",
)  # fmt: skip


@pytest.mark.parametrize("path", GUARDED)
def test_every_route_asks_for_a_key(server, path):
    refused = server.get(path)
    assert refused.status_code == 401
    assert refused.json()["error"]["type"] == "AuthenticationError" and refused.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize", "/invocations", "/pause", "/abort_requests"])
def test_so_does_every_post(server, path):
    assert server.post(path, {}).status_code == 401


def test_health_and_ping_and_options_do_not(server):
    assert (
        server.get("/health").status_code == server.get("/ping").status_code == server.post("/ping").status_code == 200
    )
    assert httpx.options(f"{server.url}/v1/completions", timeout=60).status_code != 401


@pytest.mark.parametrize("key", KEYS)
def test_each_key_opens(server, key):
    assert server.get("/v1/models", headers=bearer(key)).status_code == 200


@pytest.mark.parametrize(
    "header",
    [
        "Bearer wrong",
        "Bearer",
        "",
        "first-key",
        "Basic first-key",
        "Bearer first-key x",
        "Bearer first-ke",
        "bearer\tx",
    ],
)
def test_anything_else_does_not(server, header):
    assert server.get("/v1/models", headers={"Authorization": header}).status_code == 401


def test_narrower_rules_can_be_chosen(tmp_path):
    flags = ("--api-key", "k", "--api-key-scope", "v1")
    with hosted(tmp_path, *flags) as narrow:
        assert narrow.get("/version").status_code == narrow.get("/metrics").status_code == 200
        assert narrow.get("/v1/models").status_code == 401


def test_a_key_from_the_environment_and_open_metrics(tmp_path):
    with hosted(tmp_path, "--open-metrics", env={"VLLM_API_KEY": "from-env"}) as running:
        assert running.get("/metrics").status_code == 200 and running.get("/version").status_code == 401
        assert running.get("/version", headers=bearer("from-env")).status_code == 200


# ---- CORS, ids, proxies, middleware, logs ---------------------------------------------------------------------------


def test_cors_names_the_sites(server):
    asked = {"Origin": SITE, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    allowed = httpx.options(f"{server.url}/v1/completions", headers=asked, timeout=60)
    assert allowed.status_code == 200 and allowed.headers["access-control-allow-origin"] == SITE
    other = httpx.options(
        f"{server.url}/v1/completions", headers=asked | {"Origin": "https://other.example"}, timeout=60
    )
    assert other.status_code == 400 and "access-control-allow-origin" not in other.headers
    refused = server.get("/v1/models", headers={"Origin": SITE})
    assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == SITE


def test_request_ids_come_back(server):
    mine = server.post("/v1/completions", completion(), headers=GOOD | {"X-Request-Id": "job-7.a"})
    assert mine.headers["x-request-id"] == "job-7.a" and mine.json()["id"] == "cmpl-job-7.a"
    made = server.post("/v1/completions", completion(), headers=GOOD)
    assert made.json()["id"] == f"cmpl-{made.headers['x-request-id']}"
    refused = server.get("/v1/models", headers={"X-Request-Id": "also-refusals"})
    assert refused.headers["x-request-id"] == "also-refusals"


@pytest.mark.parametrize("bad", ["a b", "x" * 129, "naïve", 'quote"d', "tcp://10.0.0.1:9?x", ""])
def test_an_id_that_is_no_id_is_replaced(server, bad):
    answer = server.get("/health", headers={"X-Request-Id": bad.encode("latin-1")})
    assert answer.headers["x-request-id"] != bad and len(answer.headers["x-request-id"]) == 32


def test_a_proxy_may_strip_its_prefix_or_not(server):
    assert server.get("/v1/models", headers=GOOD).status_code == 200
    assert server.get("/quire/v1/models", headers=GOOD).status_code == 200
    assert server.get("/quire/v1/models").status_code == 401 and server.get("/quire/health").status_code == 200
    assert server.get("/openapi.json", headers=GOOD).json()["servers"] == [{"url": "/quire"}]


def test_middleware_of_ones_own(server):
    answer = server.get("/version", headers=GOOD)
    assert answer.headers["x-stamp"] == "class" and answer.headers["x-mark"] == "function"


@pytest.mark.parametrize("path", ["tests.server.layers:NEITHER", "tests.server.layers:Nobody", "no.such.module:Layer"])
def test_middleware_that_is_none_is_refused_by_name(path):
    with pytest.raises(ConfigError, match=path):
        users_own(path)


def test_a_server_whose_middleware_is_none_does_not_start(tmp_path):
    from tests.fake_engine import write_model

    path = "tests.server.layers:NEITHER"
    with started(write_model(tmp_path), "--port", "0", "--middleware", path) as wrong:
        assert wrong.wait() == 1 and path in wrong.lines[-1]


def test_requests_and_answers_are_logged_within_the_limit(server):
    server.post("/v1/completions", completion("abcdefgh", 12), headers=GOOD | {"X-Request-Id": "logged"})
    assert server.wait_for_line(r"Request \S*logged\S*: 8 prompt tokens, .*prompt 'abcd'$")
    assert server.wait_for_line(r"Request \S*logged\S*: answer 0 'abcd', finish_reason length")
    assert "abcde" not in server.log and not any(key in server.log for key in KEYS)


def test_chosen_paths_have_no_access_line(server):
    server.get("/version", headers=GOOD)
    server.get("/is_paused", headers=GOOD)
    server.wait_for_line("GET /is_paused")
    assert "GET /version" not in server.log


# ---- sizes ---------------------------------------------------------------------------------------------------------


def test_a_body_over_the_limit_is_refused(server):
    large = server.post("/v1/completions", completion("x" * 5000), headers=GOOD)
    assert large.status_code == 413 and "at most 4096" in large.json()["error"]["message"]
    assert server.post("/v1/completions", completion("x" * 100), headers=GOOD).status_code == 200


def test_a_declared_length_is_refused_before_the_body_is_sent(server):
    with _connection(server) as wire:
        wire.sendall(_head("POST", "/v1/completions", {**GOOD, "Content-Length": "99999999999"}))
        assert wire.recv(65536).startswith(b"HTTP/1.1 413")


def test_a_chunked_body_is_refused_once_it_is_too_long(server):
    def pieces():
        for _ in range(10):
            yield b" " * 1000

    with httpx.Client(timeout=60) as client:
        answer = client.post(
            f"{server.url}/v1/completions", content=pieces(), headers=GOOD | {"Content-Type": "application/json"}
        )
    assert answer.status_code == 413 and "more bytes" in answer.json()["error"]["message"]


def test_an_endless_chunked_body_is_cut_off(server):
    with _connection(server) as wire:
        wire.sendall(_head("POST", "/v1/completions", {**GOOD, "Transfer-Encoding": "chunked"}))
        piece = b"10000\r\n" + b" " * 65536 + b"\r\n"
        with pytest.raises(OSError):
            for _ in range(4000):  # 250 MB
                wire.sendall(piece)
    assert server.get("/health").status_code == 200


def test_too_many_headers_are_refused(server):
    many = {f"x-{i}": "1" for i in range(60)}
    answer = server.get("/health", headers=many)
    assert answer.status_code == 431 and "40 headers" in answer.json()["error"]["message"]


@pytest.mark.parametrize("ends", [True, False], ids=["whole", "endless"])
def test_a_giant_header_is_refused(server, ends):
    with _connection(server) as wire:
        wire.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nx-big: " + b"y" * 20000 + (b"\r\n\r\n" if ends else b""))
        assert wire.recv(65536).startswith(b"HTTP/1.1 431")


def test_a_giant_path_is_refused(server):
    with _connection(server) as wire:
        wire.sendall(b"GET /" + b"y" * 20000)
        assert wire.recv(65536).startswith(b"HTTP/1.1 431")


def test_what_is_no_http_is_refused(server):
    with _connection(server) as wire:
        wire.sendall(b"\x16\x03\x01\x02\x00 hello\r\n\r\n")
        assert wire.recv(65536).startswith(b"HTTP/1.1 400")
    assert server.get("/health").status_code == 200


CHUNKED = {**GOOD, "Content-Type": "application/json", "Transfer-Encoding": "chunked"}


def _chunked(body: dict[str, object], trailers: bytes) -> bytes:
    raw = json.dumps(body).encode()
    return b"%x\r\n%s\r\n0\r\n%s\r\n" % (len(raw), raw, trailers)


def test_trailers_are_no_headers(server):
    with _connection(server) as wire:
        head = {name: value for name, value in CHUNKED.items() if name != "Authorization"}
        trailer = f"Authorization: Bearer {KEYS[0]}\r\n".encode()
        wire.sendall(_head("POST", "/v1/completions", head) + _chunked(completion(), trailer))
        assert wire.recv(65536).startswith(b"HTTP/1.1 401")
    with _connection(server) as wire:
        for _ in range(2):  # the connection goes on
            wire.sendall(_head("POST", "/v1/completions", CHUNKED) + _chunked(completion(), b"x-sum: 1\r\n" * 20))
            assert _answer(wire).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "trailers",
    [b"x-big: " + b"y" * 9000 + b"\r\n", b"x: 1\r\n" * 60, b"x-some: " + b"y" * 800 + b"\r\n" + b"x: 1\r\n" * 1500],
    ids=["large", "many", "large and many"],
)
def test_trailers_over_the_limits_are_refused(server, trailers):
    with _connection(server) as wire:
        wire.sendall(_head("POST", "/v1/completions", CHUNKED) + _chunked(completion(), trailers))
        assert _until_closed(wire).startswith(b"HTTP/1.1 431")


@pytest.mark.parametrize("key", [True, False], ids=["with a key", "without"])
@pytest.mark.parametrize("begin", [b"1\r\n{\r\n0\r\nx: ", b"1\r\n{\r\n0\r\n", b"1\r\n{\r\n5;x="])
def test_a_trailer_without_end_is_cut_off(server, begin, key):
    head = CHUNKED if key else {**CHUNKED, "Authorization": "no"}
    piece = b"y" * 65536 if not begin.endswith(b"0\r\n") else b"y: 1\r\n" * 1000
    with _connection(server) as wire:
        wire.sendall(_head("POST", "/v1/completions", head) + begin)
        with pytest.raises(OSError):
            for _ in range(1000):  # 64 MB
                wire.sendall(piece)
    assert server.get("/health").status_code == 200


def test_a_request_refused_before_its_body_ends_closes_its_connection(server):
    """Also while more of the body comes: a client cannot hold it by sending a little now and then. All at once, because
    the server waits some seconds for the rest of each body."""
    long = GOOD | {"Content-Length": str(1 << 40)}
    without_key = _head("POST", "/v1/completions", {**CHUNKED, "Authorization": "no"}) + b"1\r\n{\r\n"
    too_long = _head("POST", "/v1/completions", long)
    cases = [
        (without_key, b"HTTP/1.1 401", b"1\r\n \r\n"),
        (too_long, b"HTTP/1.1 413", b" "),
        (too_long, b"HTTP/1.1 413", b""),
    ]

    def is_closed(case: tuple[bytes, bytes, bytes]) -> bool:
        request, refusal, more = case
        with _connection(server) as wire:
            wire.sendall(request)
            assert wire.recv(65536).startswith(refusal)
            return _is_closed_while_sending(wire, more)

    with ThreadPoolExecutor(len(cases)) as clients:
        assert list(clients.map(is_closed, cases)) == [True] * len(cases)


def _is_closed_while_sending(wire: socket.socket, piece: bytes, seconds: float = 40.0) -> bool:
    end = time.monotonic() + seconds
    wire.settimeout(0.5)
    while time.monotonic() < end:
        try:
            if not wire.recv(65536):
                return True
        except TimeoutError:
            wire.settimeout(0.5)
        except OSError:
            return True
        with contextlib.suppress(OSError):
            wire.sendall(piece)
    return False


def test_a_body_that_comes_behind_its_refusal_keeps_the_connection(server):
    with _connection(server) as wire:
        wire.sendall(_head("POST", "/v1/completions", {"Authorization": "no", "Content-Length": "9"}))
        assert _answer(wire).startswith(b"HTTP/1.1 401")
        wire.sendall(b"x" * 9 + _head("GET", "/health", {}))
        assert wire.recv(65536).startswith(b"HTTP/1.1 200")


def test_a_slow_trailer_is_cut_off(monkeypatch):
    monkeypatch.setattr(limits, "HEAD_SECONDS", 0.3)
    with live_protocol() as (host, port), socket.create_connection((host, port), timeout=30) as wire:
        wire.sendall(_head("POST", "/", {"Transfer-Encoding": "chunked"}) + b"1\r\n{\r\n0\r\n")
        assert _until_closed(wire) == b""


def _answer(wire: socket.socket) -> bytes:
    """A whole answer of known length; the connection stays open."""
    found = b""
    while True:
        found += (more := wire.recv(65536))
        head, end, body = found.partition(b"\r\n\r\n")
        length = re.search(rb"(?i)content-length: (\d+)", head)
        if not more or (end and length and len(body) >= int(length[1])):
            return found


def _until_closed(wire: socket.socket) -> bytes:
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while more := wire.recv(65536):
            found += more
    return found


@contextlib.contextmanager
def live_protocol():
    """The protocol alone, over an app that reads whole bodies."""

    async def app(scope, receive, send):
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    config = uvicorn.Config(app, http=limits.LimitedProtocol, lifespan="off", log_level="critical")
    server, listening = uvicorn.Server(config), socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
    thread.start()
    try:
        yield listening.getsockname()
    finally:
        server.should_exit = server.force_exit = True
        thread.join(60)
        listening.close()


def _connection(server: Hosted) -> socket.socket:
    host, _, port = server.url.removeprefix("http://").partition(":")
    return socket.create_connection((host, int(port)), timeout=30)


def _head(method: str, path: str, headers: dict[str, str]) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: x", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
    return "\r\n".join(lines).encode()


# ---- control -------------------------------------------------------------------------------------------------------


def test_pause_and_resume(server):
    assert server.get("/is_paused", headers=GOOD).json() == {"is_paused": False}
    assert server.post("/pause?mode=wait", headers=GOOD).json() == {"status": "paused"}
    held: list[httpx.Response] = []
    asking = threading.Thread(target=lambda: held.append(server.post("/v1/completions", completion(), headers=GOOD)))
    asking.start()
    wait_until(lambda: server.get("/load", headers=GOOD).json()["server_load"] == 1)
    assert server.get("/health").status_code == 200 and not held
    assert server.post("/resume", headers=GOOD).status_code == 200
    asking.join(60)
    assert held[0].status_code == 200


def test_abort_by_id(server):
    answers: list[httpx.Response] = []

    def ask() -> None:
        headers = GOOD | {"X-Request-Id": "endless"}
        answers.append(server.post("/v1/completions", completion("abc", 400, sleep=0.2), headers=headers))

    asking = threading.Thread(target=ask)
    asking.start()
    wait_until(lambda: server.get("/load", headers=GOOD).json()["server_load"] == 1)
    others = {"request_ids": ["end", "endles", "endless-2", "e.dless"]}
    assert server.post("/abort_requests", others, headers=GOOD).json() == {"aborted": 0}
    ids = {"request_ids": ["another", "endless"]}
    wait_until(lambda: server.post("/abort_requests", ids, headers=GOOD).json()["aborted"] == 1)
    asking.join(60)
    assert answers[0].json()["choices"][0]["finish_reason"] == "abort"


def test_other_control_routes(server):
    assert server.post("/reset_prefix_cache", headers=GOOD).json() == {"done": True}
    assert server.post("/reset_mm_cache", headers=GOOD).status_code == 200
    assert server.get("/is_sleeping", headers=GOOD).json() == {"is_sleeping": False}
    assert "not in this version" in server.post("/sleep", headers=GOOD).json()["error"]["message"]
    assert server.post("/collective_rpc", {"method": "nap", "args": [0]}, headers=GOOD).json() == {"results": ["awake"]}
    for method in ("os:system", "_private", "no_such", "posix.system"):
        refused = server.post("/collective_rpc", {"method": method, "args": ["true"]}, headers=GOOD)
        assert 400 <= refused.status_code < 600 and "results" not in refused.json()
    info = server.get("/server_info?config_format=json", headers=GOOD)
    assert info.json()["vllm_config"]["model_config"]["max_model_len"] == 512
    assert not any(key in info.text for key in KEYS)


def test_invocations_go_to_the_right_handler(server):
    text = server.post("/invocations", completion("abc", 4), headers=GOOD).json()
    assert text["object"] == "text_completion" and text["choices"][0]["text"] == "abca"
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "temperature": 0}
    assert server.post("/invocations", chat, headers=GOOD).json()["object"] == "chat.completion"
    for wrong in ({}, {"model": "x"}, [], "text"):
        assert server.post("/invocations", wrong, headers=GOOD).status_code == 400


def test_a_deadline_of_the_client_ends_the_request(server):
    began = time.monotonic()
    late = server.post(
        "/v1/completions", completion("abc", 400, sleep=0.2), headers=GOOD | {"X-Request-Timeout": "0.5"}
    )
    assert late.status_code == 504 and "0.5 s" in late.json()["error"]["message"] and time.monotonic() - began < 40
    for wrong in ("-1", "0", "nan", "inf", "soon"):
        refused = server.post("/v1/completions", completion(), headers=GOOD | {"X-Request-Timeout": wrong})
        assert refused.status_code == 400
    in_time = server.post("/v1/completions", completion(), headers=GOOD | {"X-Request-Timeout": "60"})
    assert in_time.status_code == 200


# ---- overload ------------------------------------------------------------------------------------------------------


def test_a_full_queue_refuses_and_says_when_to_come_again(tmp_path):
    """One request runs until it is aborted; those behind it are answered then."""
    flags = (
        "--max-num-seqs",
        "1",
        "--max-num-queued-reqs",
        "2",
        "--max-num-queued-tokens",
        "100",
        "--request-timeout",
        "60",
    )
    with hosted(tmp_path, *flags, env={"QUIRE_SERVER_DEV_MODE": "1"}) as full, ThreadPoolExecutor(3) as clients:

        def running() -> Future[httpx.Response]:
            body = completion("abc", 400, sleep=0.1)
            return clients.submit(full.post, "/v1/completions", body, headers={"X-Request-Id": "running"})

        def reasons(*asked: Future[httpx.Response]) -> list[str]:
            assert full.post("/abort_requests", {"request_ids": ["running"]}).json() == {"aborted": 1}
            answers = [one.result(60) for one in asked]
            assert [answer.status_code for answer in answers] == [200] * len(asked)
            return [answer.json()["choices"][0]["finish_reason"] for answer in answers]

        first = running()
        wait_until(lambda: _waiting(full) == (1, 0))
        more = [clients.submit(full.complete) for _ in range(2)]
        wait_until(lambda: _waiting(full) == (1, 2))
        refused = full.complete()
        assert refused.status_code == 503 and "max_num_queued_reqs=2" in refused.json()["error"]["message"]
        assert int(refused.headers["retry-after"]) >= 1
        assert reasons(first, *more) == ["abort", "length", "length"]
        first = running()
        wait_until(lambda: _waiting(full) == (1, 0))
        one = clients.submit(full.complete, "x" * 90)
        wait_until(lambda: _waiting(full) == (1, 1))
        refused = full.complete("y" * 20)
        assert refused.status_code == 503 and "max_num_queued_tokens=100" in refused.json()["error"]["message"]
        assert reasons(first, one) == ["abort", "length"]


def _waiting(server: Hosted) -> tuple[int, int]:
    lines = server.get("/metrics").text.splitlines()
    found = {}
    for line in lines:
        for name in ("running", "waiting"):
            if line.startswith(f"vllm:num_requests_{name}{{"):
                found[name] = int(float(line.rpartition(" ")[2]))
    return found.get("running", 0), found.get("waiting", 0)


# ---- several API processes -----------------------------------------------------------------------------------------


def test_two_api_processes_give_the_same_answers_and_survive_each_other(tmp_path):
    with hosted(tmp_path, "--api-server-count", "2", "--seed", "3", env={"QUIRE_SERVER_DEV_MODE": "1"}) as server:
        answers = {server.complete(f"abc{i % 3}", 9).json()["choices"][0]["text"] for i in range(30)}
        assert answers == {(f"abc{i}" * 3)[:9] for i in range(3)}
        same_id = [server.post("/v1/completions", completion(), headers={"X-Request-Id": "one"}) for _ in range(8)]
        assert all(answer.status_code == 200 for answer in same_id)
        before = server.api_pids()
        assert len(before) == 2
        lost: list[object] = []

        def ask() -> None:
            try:
                lost.append(server.complete("abc", 400, sleep=0.05))
            except httpx.HTTPError as wrong:
                lost.append(wrong)

        asking = [threading.Thread(target=ask) for _ in range(8)]
        for one in asking:
            one.start()
        wait_until(lambda: _rows(server) == 8)
        victim = max(before, key=lambda pid: len(os.listdir(f"/proc/{pid}/fd")))  # it has most of the connections
        os.kill(victim, 9)
        server.wait_for_line(rf"API process \d \(process {victim}\) was killed by SIGKILL.*another takes its place")
        wait_until(lambda: len(server.api_pids()) == 2 and victim not in server.api_pids())
        # What the dead one had asked for is not computed any more, and whoever had asked it knows.
        wait_until(lambda: lost and _rows(server) == 8 - len(lost))
        left = 8 - len(lost)
        server.post("/abort_requests")
        for one in asking:
            one.join(60)
        done = [one for one in lost if isinstance(one, httpx.Response)]
        assert len(done) == left and all(one.json()["choices"][0]["finish_reason"] == "abort" for one in done)
        (stopped,) = {*before} - {victim}
        os.kill(stopped, signal.SIGSTOP)
        server.wait_for_line(
            rf"API process \d \(process {stopped}\) has been stopped by a signal.*another takes its place"
        )
        wait_until(lambda: len(server.api_pids()) == 2 and stopped not in server.api_pids())
        assert server.complete("abc", 5).json()["choices"][0]["text"] == "abcab"
        server.signal(15)
        assert server.wait() == 0


def _rows(server: Hosted) -> int:
    """Requests in the engine, whoever asked; /metrics is of all processes."""
    try:
        return sum(_waiting(server))
    except httpx.HTTPError:  # the process that was to answer is the one that was killed
        return -1


# ---- other sockets -------------------------------------------------------------------------------------------------


def test_a_unix_socket_is_for_this_user_alone(tmp_path):
    from tests.fake_engine import write_model

    path = str(tmp_path / "s")
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(path)
    stale.close()  # a socket file that nobody listens on is no obstacle
    with started(write_model(tmp_path / "m"), "--uds", path) as server:
        server.wait_for_line(f"Listening at unix:{path}")
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        with httpx.Client(transport=httpx.HTTPTransport(uds=path), timeout=60) as client:
            assert client.get("http://server/health").status_code == 200
        with started(write_model(tmp_path / "m"), "--uds", path) as second:
            assert second.wait() == 1 and "another process is listening" in second.lines[-1]
        server.signal(15)
        assert server.wait() == 0 and not os.path.exists(path)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates are made with openssl")
def test_tls_and_new_certificates_while_running(tmp_path):
    key, certificate = _certificate(tmp_path, "one")
    flags = ("--ssl-keyfile", key, "--ssl-certfile", certificate, "--enable-ssl-refresh")
    with hosted(tmp_path / "m", *flags) as server:
        assert server.url.startswith("https://")
        port = int(server.url.rpartition(":")[2])
        assert server.get("/health").status_code == 200
        assert _serial(port) == _serial_of(certificate)
        new_key, new_certificate = _certificate(tmp_path, "two")
        os.replace(new_key, key)
        os.replace(new_certificate, certificate)
        wait_until(lambda: _serial(port) == _serial_of(certificate))
        Path(certificate).write_text("half a certificate")
        server.wait_for_line("New certificate files cannot be used")
        assert server.get("/health").status_code == 200


@pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates are made with openssl")
def test_clients_may_have_to_show_a_certificate(tmp_path):
    key, certificate = _certificate(tmp_path, "server")
    client_key, client_certificate = _certificate(tmp_path, "client")
    flags = ("--ssl-keyfile", key, "--ssl-certfile", certificate, "--ssl-ca-certs", client_certificate)
    with hosted(tmp_path / "m", *flags, "--ssl-cert-reqs", "2") as server:
        with pytest.raises(httpx.HTTPError):
            server.get("/health")
        context = ssl.create_default_context(cafile=certificate)
        context.check_hostname = False
        context.load_cert_chain(client_certificate, client_key)
        assert httpx.get(f"{server.url}/health", verify=context, timeout=60).status_code == 200


def test_tls_files_that_are_not_there_are_named_at_once(tmp_path):
    from tests.fake_engine import write_model

    flags = ("--port", "0", "--log-format", "json", "--ssl-certfile", str(tmp_path / "none.pem"))
    with started(write_model(tmp_path), *flags) as server:
        assert server.wait() == 1 and "there is no file" in server.lines[-1] and "none.pem" in server.lines[-1]
        *logged, _ = server.lines  # the cause is no record of the log; all that comes before it is
        assert any("max_model_len" in json.loads(line)["message"] for line in logged)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates are made with openssl")
def test_wrong_tls_files_are_told_in_terms_of_the_options(tmp_path):
    key, certificate = _certificate(tmp_path, "one")
    encrypted, empty = str(tmp_path / "encrypted.key"), str(tmp_path / "empty")
    Path(empty).touch()
    subprocess.run(
        ["openssl", "pkcs8", "-topk8", "-in", key, "-out", encrypted, "-passout", "pass:word"],
        check=True, capture_output=True, timeout=300,
    )  # fmt: skip
    for wrong, words in (
        ({"ssl_keyfile": None}, f"ssl_certfile '{certificate}' holds no private key: name its file with ssl_keyfile"),
        ({"ssl_keyfile": empty}, f"ssl_keyfile '{empty}' holds no private key in PEM form"),
        ({"ssl_certfile": key}, f"ssl_certfile '{key}' holds no certificate in PEM form"),
        ({"ssl_ca_certs": empty}, f"ssl_ca_certs '{empty}' holds no certificate in PEM form"),
        ({"ssl_keyfile": encrypted}, "the private key is encrypted; a server needs one without a password"),
        ({"ssl_keyfile": _certificate(tmp_path, "two")[0]}, "key values mismatch"),
    ):
        with pytest.raises(ConfigError, match=rf"TLS cannot be set up: .*{re.escape(words)}"):
            tls.settings(server_config(**{"ssl_keyfile": key, "ssl_certfile": certificate} | wrong))


def _certificate(folder: Path, name: str) -> tuple[str, str]:
    key, certificate = str(folder / f"{name}.key"), str(folder / f"{name}.pem")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
         "-keyout", key, "-out", certificate, "-days", "2", "-subj", f"/CN={name}"],
        check=True, capture_output=True, timeout=300,
    )  # fmt: skip
    return key, certificate


def _serial(port: int) -> str:
    pem = ssl.get_server_certificate(("127.0.0.1", port), timeout=30)
    return json.dumps(ssl.PEM_cert_to_DER_cert(pem).hex())


def _serial_of(path: str) -> str:
    return json.dumps(ssl.PEM_cert_to_DER_cert(Path(path).read_text()).hex())


def test_other_processes_get_no_keys(tmp_path: Path) -> None:
    """The engine and the API processes: a key of the environment is the server's all the same."""
    secrets = {
        "QUIRE_API_KEY": "s3cret",
        "HF_TOKEN": "hf_s3cret",
        "AWS_SECRET_ACCESS_KEY": "s3cret",
        "MY_PLUGIN": "yes",
    }
    with hosted(tmp_path / "model", "--api-server-count", "2", env=secrets) as server:
        for pid in (server.engine_pid, *server.api_pids()):
            found = Path(f"/proc/{pid}/environ").read_bytes()
            assert b"s3cret" not in found and b"MY_PLUGIN=yes" in found
        assert server.complete().status_code == 401
        body = {"prompt": "abc", "max_tokens": 2}
        answer = server.post("/v1/completions", body, headers={"Authorization": "Bearer s3cret"})
        assert answer.status_code == 200
