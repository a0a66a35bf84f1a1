"""`quire bench serve` against a scripted server: what is sent, what is measured, what is said when things go wrong."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.bench import plot, serve
from quire.bench.http_client import HTTPError, Pool, encode_request, parse_server
from quire.schema.errors import InputError, MissingExtraError, NotBuiltError, QuireError
from tests.fake_engine import write_model
from tests.sse_server import Script, ScriptedServer

PATH = "/v1/completions"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as running:
        yield running


@pytest.fixture
def bench(server: ScriptedServer, model: str, tmp_path: Path) -> Any:
    """Runs the command; the exit status and the saved result."""

    def run(*flags: str, num_prompts: int = 6) -> tuple[int, dict[str, Any]]:
        path = tmp_path / "result.json"
        always = [
            "--base-url", server.url, "--tokenizer", model, "--num-prompts", str(num_prompts), "--random-input-len",
            "8", "--random-output-len", "5", "--disable-tqdm", "--save-result", "--save-detailed",
            "--result-filename", str(path),
        ]  # fmt: skip
        status = serve.main([*always, *flags], "quire bench serve")
        return status, json.loads(path.read_text())

    return run


def test_requests_and_result(bench: Any, server: ScriptedServer, model: str) -> None:
    status, found = bench("--temperature", "0", "--top-k", "3", "--ignore-eos", "--header", "X-Team=red", "--seed", "7")
    assert status == 0
    bodies = server.bodies(PATH)
    assert len(bodies) == 6 and len({body["prompt"] for body in bodies}) == 6
    assert {key: bodies[0][key] for key in bodies[0] if key != "prompt"} == {
        "model": "scripted", "max_tokens": 5, "stream": True, "stream_options": {"include_usage": True},
        "ignore_eos": True, "temperature": 0.0, "top_k": 3,
    }  # fmt: skip
    headers = [headers for path, headers, _ in server.requests if path == PATH]
    assert all(one["x-team"] == "red" for one in headers)
    ids = {one["x-request-id"] for one in headers}
    assert len(ids) == 6 and all(name.startswith("bench-") for name in ids)
    assert found["completed"] == 6 and found["failed"] == 0
    assert found["total_output_tokens"] == 30 and found["total_input_tokens"] == 42  # as the server counted them
    assert found["generated_texts"] == [" one two three one two"] * 6
    assert found["itls"] and all(len(gaps) == 4 for gaps in found["itls"])
    assert found["model_id"] == "scripted" and found["tokenizer_id"] == model and found["request_rate"] == "inf"


def test_the_keys_of_the_result_are_vllms(bench: Any) -> None:
    _, found = bench("--metadata", "team=red", "--percentile-metrics", "ttft,e2el", "--metric-percentiles", "50,99.9")
    assert set(found) == {
        "date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts", "team", "request_rate",
        "burstiness", "max_concurrency", "duration", "completed", "failed", "total_input_tokens",
        "total_output_tokens", "request_throughput", "request_goodput", "output_throughput", "total_token_throughput",
        "max_output_tokens_per_s", "max_concurrent_requests", "input_lens", "output_lens", "start_times", "ttfts",
        "itls", "generated_texts", "errors", "mean_ttft_ms", "median_ttft_ms", "std_ttft_ms", "p50_ttft_ms",
        "p99.9_ttft_ms", "mean_e2el_ms", "median_e2el_ms", "std_e2el_ms", "p50_e2el_ms", "p99.9_e2el_ms",
    }  # fmt: skip


def test_times_are_the_scripts(bench: Any, server: ScriptedServer) -> None:
    server.script = Script(first_s=0.2, gap_s=0.05)
    _, found = bench("--percentile-metrics", "ttft,tpot,itl,e2el", "--max-concurrency", "2", num_prompts=4)
    # A loaded machine may only be later than the script, never earlier.
    assert 200 <= found["mean_ttft_ms"] < 400
    assert 49 <= found["mean_itl_ms"] < 150
    assert found["mean_tpot_ms"] == pytest.approx(found["mean_itl_ms"], rel=0.01)
    assert found["mean_e2el_ms"] == pytest.approx(found["mean_ttft_ms"] + 4 * found["mean_itl_ms"], rel=0.01)
    assert found["duration"] >= 2 * 0.4 and server.most_running == 2
    assert found["max_concurrent_requests"] == 2


def test_chat_does_not_count_the_opening_of_the_message(bench: Any, server: ScriptedServer) -> None:
    server.script = Script(first_s=0.2)
    flags = ("--backend", "openai-chat", "--endpoint", "/v1/chat/completions", "--extra-body", '{"top_p": 0.5}')
    _, found = bench(*flags, num_prompts=2)
    body = server.bodies("/v1/chat/completions")[0]
    assert body["messages"][0]["role"] == "user" and body["max_completion_tokens"] == 5 and body["top_p"] == 0.5
    assert found["mean_ttft_ms"] >= 199  # the role comes at once, the first token does not
    assert [len(gaps) for gaps in found["itls"]] == [4, 4]


def test_whole_answers(bench: Any, server: ScriptedServer) -> None:
    server.script = Script(first_s=0.1)
    _, found = bench("--no-stream", "--percentile-metrics", "ttft,e2el", num_prompts=2)
    assert "stream" not in server.bodies(PATH)[0]
    assert found["completed"] == 2 and found["total_output_tokens"] == 10
    assert found["mean_ttft_ms"] == found["mean_e2el_ms"] >= 99


@pytest.mark.parametrize(
    "backend, path",
    [
        ("openai-embeddings", "/v1/embeddings"), ("openai-embeddings-chat", "/v1/embeddings"),
        ("vllm-pooling", "/pooling"), ("vllm-rerank", "/v1/rerank"),
    ],
)  # fmt: skip
def test_pooling_endpoints(
    backend: str, path: str, bench: Any, server: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whole answers without tokens of their own: what is measured is the time of a request."""
    ranks = backend == "vllm-rerank"
    more = ("--dataset-name", "random-rerank", "--random-batch-size", "3") if ranks else ()
    server.script = Script(first_s=0.1, pieces=1)
    status, result = bench("--backend", backend, "--endpoint", path, "--extra-body", '{"priority": 1}', *more)
    bodies = server.bodies(path)
    assert status == 0 and len(bodies) == 6 and len({json.dumps(body) for body in bodies}) == 6
    names = {"vllm-rerank": {"query", "documents"}, "openai-embeddings-chat": {"messages"}}.get(backend, {"input"})
    assert all(set(body) == {"model", "priority"} | names for body in bodies)
    if ranks:
        assert all(len(set(body["documents"])) == 3 for body in bodies)
        # a byte is a token here: half of the 8 are the query's, with each document
        assert {len(body["query"]) for body in bodies} == {4}
        assert {len(text) for body in bodies for text in body["documents"]} == {4}
    assert result["completed"] == 6 and result["total_input_tokens"] == 42 and result["total_output_tokens"] == 0
    assert result["mean_e2el_ms"] >= 99 and "mean_tpot_ms" not in result
    printed = capsys.readouterr().out
    assert "Mean E2EL (ms)" in printed and "TTFT" not in printed and "generated tokens" not in printed


def test_several_texts_in_a_request(bench: Any, server: ScriptedServer) -> None:
    flags = ("--backend", "openai-embeddings", "--endpoint", "/v1/embeddings", "--random-batch-size", "4")
    bench(*flags, num_prompts=2)
    bodies = server.bodies("/v1/embeddings")
    assert [len(set(body["input"])) for body in bodies] == [4, 4]
    assert {len(text) for body in bodies for text in body["input"]} == {8}


@pytest.mark.parametrize(
    "flags, words",
    [
        (("--backend", "openai-embeddings"), "an endpoint like /v1/embeddings"),
        (("--backend", "vllm-pooling", "--endpoint", "/v1/embeddings"), "an endpoint like /pooling"),
        (("--backend", "vllm-rerank", "--endpoint", "/v1/rerank"), "random-rerank"),
        (("--dataset-name", "random-rerank"), "vllm-rerank"),
        (("--random-batch-size", "2"), "goes alone"),
        (
            ("--backend", "openai-embeddings", "--endpoint", "/v1/embeddings", "--random-batch-size", "0"),
            "at least 1, got 0",
        ),
    ],
)
def test_flags_that_do_not_go_together(flags: tuple[str, ...], words: str, bench: Any, server: ScriptedServer) -> None:
    with pytest.raises(InputError, match=words):
        bench(*flags)
    assert not [path for path, _, body in server.requests if body is not None]


def test_a_refusal_is_a_failure(bench: Any, server: ScriptedServer) -> None:
    status, result = bench("--backend", "openai-embeddings", "--endpoint", "/elsewhere/v1/embeddings", num_prompts=1)
    assert status == 0 and result["completed"] == 1
    server.script = Script(status=400)
    status, result = bench("--backend", "openai-embeddings", "--endpoint", "/v1/embeddings", num_prompts=1)
    assert status == 1 and "scripted refusal" in result["errors"][0]


def test_events_torn_into_packets(bench: Any, server: ScriptedServer) -> None:
    server.script = Script(split=True)
    _, found = bench(num_prompts=3)
    assert found["generated_texts"] == [" one two three one two"] * 3 and found["failed"] == 0


def test_tokens_are_counted_here_when_the_server_does_not(bench: Any, server: ScriptedServer) -> None:
    server.script = Script(usage=False)
    _, found = bench(num_prompts=2)
    assert found["total_output_tokens"] == 2 * len(b" one two three one two")  # a byte is a token here
    assert found["input_lens"] == [8, 8]


def test_connections_are_kept(bench: Any, server: ScriptedServer) -> None:
    bench("--max-concurrency", "2", num_prompts=10)
    assert server.connections <= 2


def test_a_server_that_closes_each_connection(bench: Any, server: ScriptedServer) -> None:
    server.script = Script(close=True)
    _, found = bench("--max-concurrency", "2", num_prompts=6)
    assert found["completed"] == 6 and server.connections >= 6


def test_a_rate_spreads_requests(bench: Any, server: ScriptedServer) -> None:
    _, found = bench("--request-rate", "5", "--burstiness", "1e6", num_prompts=6)
    assert found["duration"] >= 5 * 0.2  # the last one is sent a second after the first was due, never earlier
    assert found["request_rate"] == 5.0


@pytest.mark.parametrize(
    "script, says",
    [
        (Script(status=429), "HTTP 429: scripted refusal"),
        (Script(error_after=2), "scripted failure"),
        (Script(fail_after=2), "closed the connection in the middle of the answer"),
    ],
)
def test_failures_are_counted_and_told(
    script: Script, says: str, bench: Any, server: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.script = script
    status, found = bench(num_prompts=3)
    assert status == 1  # nothing succeeded
    assert (found["completed"], found["failed"]) == (0, 3)
    assert all(says in error for error in found["errors"])
    assert f"3 failed: {found['errors'][0]}" in capsys.readouterr().err


def test_only_the_table_goes_to_stdout(bench: Any, capsys: pytest.CaptureFixture[str]) -> None:
    bench("--goodput", "ttft:1000", num_prompts=1)
    printed = capsys.readouterr()
    assert "1 request, all sent at once, any number in flight\n" in printed.err
    lines = printed.out.splitlines()
    assert lines[0].startswith("====") and lines[-1].startswith("====")
    assert "Request goodput (req/s):" in printed.out


def test_warm_ups_and_profile_lie_outside_the_figures(bench: Any, server: ScriptedServer) -> None:
    _, found = bench("--num-warmups", "2", "--profile", num_prompts=3)
    assert found["completed"] == 3
    paths = [path for path, _, _ in server.requests if path not in ("/v1/models", "/metrics")]
    assert paths == [PATH] * 2 + ["/start_profile"] + [PATH] * 3 + ["/stop_profile"]


def test_the_ready_check_waits_for_a_server(model: str, tmp_path: Path) -> None:
    taken = port_without_server()
    base = [
        "--model", "scripted", "--tokenizer", model, "--num-prompts", "1", "--random-input-len", "4",
        "--random-output-len", "2", "--disable-tqdm", "--port", str(taken.getsockname()[1]),
    ]  # fmt: skip
    with pytest.raises(QuireError, match=r"not ready within 0\.6 s; the last try: no connection"):
        serve.main([*base, "--ready-check-timeout-sec", "0.6"], "x")
    late = LateServer(taken)
    with late:
        assert serve.main([*base, "--ready-check-timeout-sec", "60"], "x") == 0


def port_without_server() -> socket.socket:
    """Nobody else gets it, and nobody answers."""
    taken = socket.socket()
    taken.bind(("127.0.0.1", 0))
    return taken


class LateServer:
    """Begins to listen a while after the bench has begun to ask."""

    def __init__(self, taken: socket.socket) -> None:
        self.taken = taken
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._done = threading.Event()

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join(10)

    def _run(self) -> None:
        time.sleep(0.8)
        scripted = ScriptedServer()

        async def main() -> None:
            listening = await asyncio.start_server(scripted._connection, sock=self.taken)
            while not self._done.is_set():
                await asyncio.sleep(0.05)
            listening.close()

        asyncio.run(main())


def test_no_server_is_one_clear_error(model: str) -> None:
    with port_without_server() as taken, pytest.raises(QuireError, match=r"no connection to 127\.0\.0\.1"):
        serve.main(["--port", str(taken.getsockname()[1]), "--tokenizer", model], "x")


def test_no_tokenizer_is_one_clear_error(server: ScriptedServer) -> None:
    with pytest.raises(QuireError, match="Name one with --tokenizer"):
        serve.main(["--base-url", server.url, "--num-prompts", "1"], "x")


@pytest.mark.parametrize(
    "flags, error, says",
    [
        (["--backend", "openai-chat"], InputError, "/v1/chat/completions"),
        (["--endpoint", "/v1/chat/completions"], InputError, "--backend openai"),
        (["--dataset-name", "hf"], NotBuiltError, "--dataset-name hf"),
        (["--dataset-name", "poems"], InputError, "must be one of random"),
        (["--lora-modules", "a"], NotBuiltError, "--lora-modules"),
        (["--max-concurrency", "0"], InputError, "--max-concurrency"),
        (["--ramp-up-strategy", "linear"], InputError, "--ramp-up-start-rps"),
        (["--ramp-up-start-rps", "1"], InputError, "--ramp-up-strategy"),
        (["--header", "a=b\r\nc"], InputError, "line break"),
        (["--base-url", "ftp://x"], InputError, "http://host:port"),
        (["--base-url", "http://x:70000"], InputError, "70000|Port"),
        (["--goodput", "speed:3"], InputError, "--goodput"),
    ],
)
def test_wrong_flags(flags: list[str], error: type[Exception], says: str, server: ScriptedServer, model: str) -> None:
    base = ["--base-url", server.url, "--tokenizer", model, "--num-prompts", "2", "--random-input-len", "4"]
    with pytest.raises(error, match=says):
        serve.main([*base, *flags], "x")


@pytest.mark.parametrize(
    "flags, says",
    [
        (["--save-result", "--result-dir", "/proc/x"], "^--result-dir '/proc/x': No such file or directory$"),
        (["--plot-timeline", "--result-dir", "/proc/x"], "^--result-dir '/proc/x': No such file or directory$"),
        (["--append-result", "--result-filename", "/tmp/"], "^--result-filename '/tmp': it is a folder$"),
        (["--use-beam-search"], "--use-beam-search needs --no-stream"),
    ],
)
def test_what_cannot_succeed_sends_nothing(
    flags: list[str], says: str, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plot, "require", lambda: None)
    with pytest.raises(InputError, match=says):
        serve.main(["--base-url", server.url, *flags], "x")
    assert server.requests == []


def test_a_result_that_cannot_be_written_is_one_line(bench: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match=r"^--save-result '/dev/full': No space left on device$"):
        bench("--result-filename", "/dev/full", num_prompts=1)
    assert "Successful requests" in capsys.readouterr().out


def test_beams_are_asked_for_without_a_stream(bench: Any, server: ScriptedServer) -> None:
    bench("--use-beam-search", "--no-stream", num_prompts=1)
    (body,) = server.bodies(PATH)
    assert body["use_beam_search"] is True and "stream" not in body


def test_the_key_of_the_environment_is_sent(
    bench: Any, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    bench(num_prompts=1)
    assert {headers["authorization"] for _, headers, _ in server.requests} == {"Bearer secret"}


def test_plots_are_written(bench: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    bench("--plot-timeline", "--plot-dataset-stats", "--timeline-itl-thresholds", "1,5")
    for kind in ("timeline", "dataset_stats"):
        data = (tmp_path / f"result.{kind}.png").read_bytes()
        assert data.startswith(b"\x89PNG") and len(data) > 5000


def test_a_missing_plot_library_is_said_before_the_run(
    bench: Any, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(path: str) -> Any:
        raise ModuleNotFoundError(path)

    monkeypatch.setattr(plot, "load", absent)
    with pytest.raises(MissingExtraError, match=r'pip install "quire-llm\[bench\]"'):
        bench("--plot-timeline")
    assert server.requests == []


# ---- the client ------------------------------------------------------------------------------------------------------


def exchange(data: bytes, *, pieces: int = 1) -> tuple[Any, bytes]:
    """What the client makes of these very bytes, sent in so many packets."""

    async def main() -> tuple[Any, bytes]:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            size = -(-len(data) // pieces)
            for first in range(0, len(data), size):
                writer.write(data[first : first + size])
                await writer.drain()
                await asyncio.sleep(0.002)
            writer.close()

        listening = await asyncio.start_server(answer, "127.0.0.1", 0)
        pool = Pool(parse_server(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"))
        try:
            return await asyncio.wait_for(pool.get("/", {}), 20)
        finally:
            pool.close()
            listening.close()

    return asyncio.run(main())


CHUNKED = (
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nX-A: b\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"5\r\nhello\r\n7;note=1\r\n world!\r\n0\r\nTrailer: x\r\n\r\n"
)


@pytest.mark.parametrize("pieces", [1, 2, 3, 7, len(CHUNKED)])
def test_chunks_however_they_arrive(pieces: int) -> None:
    reply, body = exchange(CHUNKED, pieces=pieces)
    assert (reply.status, body, reply.headers["x-a"]) == (200, b"hello world!", "b")


@pytest.mark.parametrize(
    "data, body",
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc", b"abc"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", b""),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
        (b"HTTP/1.0 200 OK\r\n\r\nuntil the end", b"until the end"),
    ],
)
def test_bodies(data: bytes, body: bytes) -> None:
    assert exchange(data)[1] == body


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 30\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nabc",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhel",
        b"",
        b"x" * 70_000,
    ],
)
def test_what_is_no_answer(data: bytes) -> None:
    with pytest.raises(HTTPError):
        exchange(data)


def test_the_address_of_a_server() -> None:
    server = parse_server("https://[::1]:8443/prefix/", insecure=True)
    assert (server.host, server.port, server.path, server.name) == ("::1", 8443, "/prefix", "[::1]:8443")
    assert server.tls is not None and not server.tls.check_hostname
    assert parse_server("http://x").port == 80
    request = encode_request(parse_server("http://x/p"), "POST", "/v1/completions", {"A": "b"}, b"{}")
    assert request.startswith(b"POST /p/v1/completions HTTP/1.1\r\nHost: x\r\n")
    assert request.endswith(b"\r\nA: b\r\nContent-Length: 2\r\n\r\n{}")
