"""`quire run-batch`: files in OpenAI's batch format through the server's own routes; order, errors, memory, URLs."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.base.net import free_port
from quire.cli import batch as command
from quire.schema.errors import EngineDeadError, InputError, NotBuiltError
from quire.server.openai import batch_resume
from quire.server.openai.batch import BatchRunner
from quire.server.openai.batch_resume import read_lines
from tests.fake_engine import use_fake, write_model

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def line(custom_id: str, url: str = COMPLETIONS, method: str = "POST", **body: Any) -> str:
    return json.dumps({"custom_id": custom_id, "method": method, "url": url, "body": body})


def lines_of(data: bytes | str) -> list[dict[str, Any]]:
    return [json.loads(one) for one in data.splitlines()]


# ---- the command, on an engine without a model -----------------------------------------------------------------------


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    use_fake(monkeypatch)
    monkeypatch.setenv("QUIRE_ENABLE_V1_MULTIPROCESSING", "0")
    return write_model(tmp_path / "model")


@pytest.fixture
def run(model: str, tmp_path: Path) -> Any:
    def answer(*given: str, flags: tuple[str, ...] = ()) -> list[dict[str, Any]]:
        source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
        source.write_text("\n".join(given) + "\n")
        base = ["-i", str(source), "-o", str(target), "--model", model, "--served-model-name", "fake"]
        status = command.run_batch([*base, "--disable-tqdm", *flags], "quire run-batch")
        found = lines_of(target.read_text())
        assert status == any(one["custom_id"] is None for one in found)
        return found

    return answer


def test_answers_come_in_order_with_their_names(run: Any, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    slow = {"vllm_xargs": {"sleep": 0.02}}
    found = run(
        line("first", prompt="abc", max_tokens=20, temperature=0, model="fake", **slow),
        "",
        line("second", CHAT, messages=messages, max_tokens=4, model="fake"),
        line("third", prompt="xy", max_tokens=1, n=2, model="fake"),
    )
    assert [one["custom_id"] for one in found] == ["first", "second", "third"]
    assert [one["response"]["status_code"] for one in found] == [200] * 3
    assert all(one["error"] is None and one["id"].startswith("batch_req_") for one in found)
    assert len({one["id"] for one in found}) == 3 and all(one["response"]["request_id"] for one in found)
    first, second, third = (one["response"]["body"] for one in found)
    assert first["object"] == "text_completion" and first["choices"][0]["text"] == ("abc" * 7)[:20]
    assert second["object"] == "chat.completion" and second["choices"][0]["message"]["content"] == "user"
    assert len(third["choices"]) == 2 and third["usage"]["completion_tokens"] == 2
    assert sorted(path.name for path in tmp_path.glob("*.jsonl")) == ["in.jsonl", "out.jsonl"]


@pytest.mark.parametrize(
    "given, status, code, says, custom_id",
    [
        ("nonsense", 400, "invalid_request", "line 1 is not a batch request", None),
        ('{"custom_id": "a"}', 400, "invalid_request", "missing required field", "a"),
        ('{"custom_id": 5, "url": "/x", "body": {}}', 400, "invalid_request", "Expected `str`", None),
        (line("a", method="GET"), 405, "invalid_method", "only POST", "a"),
        (line("a", "/v1/embeddings", input="x"), 400, 400, "runner=generate", "a"),
        (line("a", "/v2/rerank", query="x", documents=["y"]), 400, 400, "runner=generate", "a"),
        (line("a", "/v1/audio/translations", input="x"), 501, "invalid_url", "not in this version", "a"),
        (line("a", "/shutdown"), 404, "invalid_url", "unknown", "a"),
        (line("a", "/metrics"), 404, "invalid_url", "unknown", "a"),
        (line("a", prompt="x", stream=True), 400, "invalid_request", "whole answers only", "a"),
        (line("a", prompt="x", model="other"), 404, 404, "does not exist", "a"),
        (line("a", prompt="x", max_tokens=-1), 400, 400, "max_tokens", "a"),
        (line("a", CHAT, messages=[]), 400, 400, "messages", "a"),
        (line("a", prompt="x" * 600), 400, 400, "512", "a"),
    ],
)
def test_a_bad_line_is_one_line_of_output(
    given: str, status: int, code: object, says: str, custom_id: str | None, run: Any
) -> None:
    bad, good = run(given, line("good", prompt="ab", max_tokens=2))
    assert bad["custom_id"] == custom_id
    assert bad["response"]["status_code"] == status
    assert bad["error"]["code"] == code and says in bad["error"]["message"]
    assert bad["response"]["body"]["error"] == bad["error"]  # where OpenAI's clients look
    assert good["response"]["body"]["choices"][0]["text"] == "ab" and good["error"] is None


def test_a_line_that_is_too_long(run: Any) -> None:
    flags = ("--max-request-bytes", "2000")
    long, good = run(line("a", prompt="x" * 5000), line("b", prompt="ab", max_tokens=2), flags=flags)
    assert long["response"]["status_code"] == 413 and "longer than 2000 bytes" in long["error"]["message"]
    assert good["response"]["status_code"] == 200


def test_one_request_that_fails_in_the_engine(run: Any) -> None:
    bad, good = run(
        line("a", prompt="abc", max_tokens=9, vllm_xargs={"fail_at": 2}), line("b", prompt="ab", max_tokens=2)
    )
    assert bad["response"]["status_code"] == 500 and "cannot go on" in bad["error"]["message"]
    assert good["error"] is None


def test_a_dead_engine_ends_the_run_and_keeps_what_there_is(
    run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    many = [line(str(i), prompt="ab", max_tokens=2) for i in range(4)]
    with pytest.raises(EngineDeadError, match="the step went wrong"):
        run(*many, line("bad", prompt="abc", max_tokens=30, vllm_xargs={"raise_at": 20}))
    kept = tmp_path / "out.jsonl"
    assert [one["custom_id"] for one in lines_of(kept.read_text())] == ["0", "1", "2", "3"]
    assert f"the answers so far are in {kept}" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.glob("*.jsonl")) == ["in.jsonl", "out.jsonl"]


def test_whoever_reads_along_sees_the_answers(model: str, tmp_path: Path) -> None:
    """The file that was named grows while the batch runs, in its place."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    target.write_text("of another run\n")
    gate = tmp_path / "gate"
    slow = {"max_tokens": 6, "vllm_xargs": {"gate": str(gate)}}
    source.write_text(line("a", prompt="ab", max_tokens=1) + "\n" + line("b", prompt="ab", **slow) + "\n")
    flags = ["--disable-tqdm", "--model", model]
    with open(target) as reader:
        run = threading.Thread(target=command.run_batch, args=(["-i", str(source), "-o", str(target), *flags], "x"))
        run.start()
        seen, until = "", time.monotonic() + 120
        while not seen.endswith("\n") and time.monotonic() < until:
            reader.seek(0)
            seen = "" if (text := reader.read()).startswith("of another") else text
            time.sleep(0.02)
        running = run.is_alive()
        gate.touch()
        run.join()
        reader.seek(0)
        whole = lines_of(reader.read())
    assert [one["custom_id"] for one in lines_of(seen)] == ["a"] and running
    assert [one["custom_id"] for one in whole] == ["a", "b"]


@pytest.mark.parametrize("make_alias", [os.symlink, os.link, lambda source, target: None])
def test_an_input_is_not_overwritten(make_alias: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "answer_file", lambda *_: pytest.fail("an engine was started"))
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(line("a", prompt="ab"))
    make_alias(source, target)
    place = str(target if target.exists() else source)
    with pytest.raises(InputError, match=f"--output-file {place} is --input-file {source}, whose requests would be"):
        command.run_batch(["-i", str(source), "-o", place], "x")
    assert source.read_text() == line("a", prompt="ab")


def test_lines_in_another_encoding_and_a_byte_order_mark(model: str, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    latin = line("\xe9", prompt="ab").replace("\\u00e9", "\xe9").encode("latin-1")
    source.write_bytes(b"\xef\xbb\xbf" + b"\n".join([short("a").encode(), latin, short("b").encode()]))
    assert command.run_batch(["-i", str(source), "-o", str(target), "--model", model, "--disable-tqdm"], "x") == 1
    first, wrong, last = lines_of(target.read_bytes())
    assert (first["custom_id"], wrong["custom_id"], last["custom_id"]) == ("a", None, "b")
    assert first["error"] is None and last["error"] is None
    assert "line 2 is not a batch request: 'utf-8' codec can't decode" in wrong["error"]["message"]


def test_an_input_that_is_a_pipe(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "out.jsonl"
    reading, writing = os.pipe()
    with os.fdopen(writing, "wb") as pipe:
        pipe.write(f"{short('a')}\n{short('a')}\nnonsense".encode())
    flags = ["-i", f"/dev/fd/{reading}", "-o", str(target), "--model", model, "--disable-tqdm"]
    assert command.run_batch(flags, "x") == 1
    os.close(reading)
    assert [one["custom_id"] for one in lines_of(target.read_bytes())] == ["a", "a", None]
    assert "1 line has no readable custom_id" in capsys.readouterr().err


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device of Linux")
def test_a_full_disk_is_one_line(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(short("a"))
    with pytest.raises(InputError, match=r"^--output-file /dev/full: No space left on device$"):
        command.run_batch(["-i", str(source), "-o", "/dev/full", "--model", model, "--disable-tqdm"], "x")
    assert "answers so far" not in capsys.readouterr().err


def test_lines_with_one_name_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = batch_resume.check_input(
        batch_resume.Earlier("out"), io.BytesIO("\n".join(map(short, "abcbab")).encode()), 1000
    )
    assert lines == (6, 3, "b")
    told: list[str] = []
    monkeypatch.setattr(command.log, "warning", lambda form, *values: told.append(form % values))
    command.warn_of_repeated(lines)
    assert len(told) == 1 and told[0].startswith("3 lines have the custom_id of an earlier line, the first 'b': ")
    command.warn_of_repeated(lines._replace(repeated=0))
    assert len(told) == 1


def test_a_taken_port_of_metrics_is_told_before_a_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "answer_file", lambda *_: pytest.fail("an engine was started"))
    source = tmp_path / "in.jsonl"
    source.write_text(short("a"))
    flags = ["-i", str(source), "-o", str(tmp_path / "out"), "--enable-metrics", "--host", "127.0.0.1", "--port"]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=f"127.0.0.1:{port} is in use by another program: choose another --port"):
            command.run_batch([*flags, str(port)], "x")
    with pytest.raises(InputError, match="port must be at least 0 and at most 65535, got 99999"):
        command.run_batch([*flags, "99999"], "x")


def test_the_address_of_metrics_has_two_names() -> None:
    parser = command.make_parser("quire run-batch")
    for flag in ("--host", "--url"):
        assert parser.parse_args(["-i", "a", "-o", "b", flag, "1.2.3.4"]).host == "1.2.3.4"


def test_a_key_in_the_environment_does_not_lock_the_batch_out(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_API_KEY", "secret")
    assert run(line("a", prompt="ab", max_tokens=2))[0]["response"]["status_code"] == 200


def test_options_of_the_server_hold(run: Any) -> None:
    template = "{% for m in messages %}{{ m['content'] }}!{% endfor %}"
    body = dict(messages=[{"role": "user", "content": "hey"}], max_tokens=4)
    (found,) = run(line("a", CHAT, **body), flags=("--chat-template", template, "--response-role", "poet"))
    message = found["response"]["body"]["choices"][0]["message"]
    assert (message["content"], message["role"]) == ("hey!", "poet")


def test_metrics_while_it_runs(run: Any, tmp_path: Path) -> None:
    port, gate = free_port(), tmp_path / "gate"
    pages: list[httpx.Response] = []
    done = threading.Event()

    def scrape() -> None:
        while not done.is_set() and not pages:
            try:
                page = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=60)
            except httpx.TransportError:
                done.wait(0.02)
                continue
            if "vllm:prompt_tokens_total" in page.text:
                pages.extend([page, httpx.get(f"http://127.0.0.1:{port}/v1/models", timeout=60)])
        gate.touch()

    reader = threading.Thread(target=scrape)
    reader.start()
    slow = line("a", prompt="abc", max_tokens=6, ignore_eos=True, vllm_xargs={"gate": str(gate)})
    run(slow, flags=("--enable-metrics", "--url", "127.0.0.1", "--port", str(port)))
    done.set()
    reader.join()
    assert pages[0].status_code == 200 and pages[1].status_code == 404  # nothing else is served


@pytest.mark.parametrize(
    "flags, error, says",
    [
        (["-i", "/no/such/file", "-o", "out"], InputError, "--input-file /no/such/file: No such file"),
        (["-i", __file__, "-o", "/no/such/folder/out"], InputError, "--output-file"),
        (["-i", "file:///etc/passwd", "-o", "out"], InputError, "only http and https"),
        (["-i", "http://127.0.0.1:1/x", "-o", "out"], InputError, "not public"),
        (["-i", __file__, "-o", "out", "--lora-modules", "x"], SystemExit, "2"),
        (["-i", __file__, "-o", "out", "--enable-sleep-mode"], NotBuiltError, "enable_sleep_mode"),
    ],
)
def test_wrong_flags(
    flags: list[str], error: type[BaseException], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=says):
        command.run_batch([*flags, "--disable-tqdm"], "quire run-batch")
    assert list(tmp_path.iterdir()) == []


# ---- going on with an interrupted batch ------------------------------------------------------------------------------

_IN_A_PROCESS = "import sys; from tests.fake_engine import batch; sys.exit(batch(sys.argv[1:]))"


@pytest.fixture
def resume(model: str, tmp_path: Path) -> Any:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"

    def go_on(given: list[str], *flags: str) -> list[dict[str, Any]]:
        source.write_text("".join(one + "\n" for one in given))
        base = ["-i", str(source), "-o", str(target), "--model", model, "--disable-tqdm", "--resume"]
        assert command.run_batch([*base, *flags], "quire run-batch") == 0
        return lines_of(target.read_bytes())

    return go_on


def answer_of(custom_id: str, status: int = 200) -> str:
    response = {"status_code": status, "request_id": "r", "body": {"earlier": True}}
    return json.dumps({"id": "batch_req_0", "custom_id": custom_id, "response": response, "error": None})


def short(custom_id: str) -> str:
    return line(custom_id, prompt="ab", max_tokens=2)


def was_asked(found: dict[str, Any]) -> bool:
    return "earlier" not in found["response"]["body"]


def test_a_killed_run_goes_on_where_it_was(
    model: str, resume: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """SIGKILL, in the middle of a line: what had been answered is in the file byte for byte, the rest is asked."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    slow = {"max_tokens": 400, "ignore_eos": True, "vllm_xargs": {"sleep": 0.05}}
    given = [*(short(str(i)) for i in range(5)), line("slow", prompt="ab", **slow), short("last")]
    source.write_text("\n".join(given))
    flags = ["-i", str(source), "-o", str(target), "--model", model, "--disable-tqdm"]
    with subprocess.Popen([sys.executable, "-c", _IN_A_PROCESS, *flags], cwd=Path(__file__).parents[2]) as run:
        until = time.monotonic() + 120
        while not (target.exists() and target.read_bytes().count(b"\n") >= 5) and time.monotonic() < until:
            time.sleep(0.02)
        assert run.poll() is None
        run.send_signal(signal.SIGKILL)
    before = target.read_bytes()
    with open(target, "ab") as file:
        file.write(before[: len(before) // 7])  # what a run that died in a write leaves
    given[5] = short("slow")
    found = resume(given)
    assert target.read_bytes().startswith(before)
    assert [one["custom_id"] for one in found] == ["0", "1", "2", "3", "4", "slow", "last"]
    assert all(one["response"]["status_code"] == 200 for one in found)
    assert "5 answered earlier, 2 answered, 0 failed" in capsys.readouterr().err


def test_only_answers_stay_and_failures_are_asked_again(resume: Any, tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    target.write_text("\n".join([answer_of("a"), answer_of("b", 500), answer_of("c"), ""]))
    os.chmod(target, 0o640)
    found = resume([short(name) for name in "abcd"])
    assert [(one["custom_id"], was_asked(one)) for one in found] == [
        ("a", False),
        ("c", False),
        ("b", True),
        ("d", True),
    ]
    assert all(one["response"]["status_code"] == 200 for one in found)
    assert target.stat().st_mode & 0o777 == 0o640
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "model", "out.jsonl"]


def test_a_last_line_without_its_end_is_whole_or_torn(resume: Any, tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    target.write_text(answer_of("a") + "\n" + answer_of("b"))
    found = resume([short("a"), short("b"), short("c")])
    assert [(one["custom_id"], was_asked(one)) for one in found] == [("a", False), ("b", False), ("c", True)]
    target.write_text(answer_of("a") + "\n" + answer_of("b")[:-2])
    found = resume([short("a"), short("b")])
    assert [(one["custom_id"], was_asked(one)) for one in found] == [("a", False), ("b", True)]


def test_without_a_file_to_go_on_with_a_batch_begins(resume: Any, tmp_path: Path) -> None:
    assert [was_asked(one) for one in resume([short("a")])] == [True]


def test_nothing_left_starts_no_engine(
    resume: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command.AsyncLLM, "from_engine_args", lambda *_, **__: pytest.fail("an engine was started"))
    (tmp_path / "out.jsonl").write_text(answer_of("a") + "\n")
    assert not was_asked(resume([short("a")])[0])
    assert "nothing is left to ask: 1 of 1 answered already" in capsys.readouterr().err


def test_nothing_left_drops_what_is_no_answer(resume: Any, tmp_path: Path) -> None:
    (tmp_path / "out.jsonl").write_text(answer_of("a") + "\n" + answer_of("b")[:30])
    found = resume([short("a")])
    assert [one["custom_id"] for one in found] == ["a"]


def test_progress_counts_what_was_done(
    resume: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("quire.base.progress.LINE_SECONDS", 0.0)
    (tmp_path / "out.jsonl").write_text("".join(answer_of(str(i)) + "\n" for i in range(8)))
    resume([short(str(i)) for i in range(10)])
    shown = [record.getMessage() for record in caplog.records if record.getMessage().startswith("Answering")]
    assert list(dict.fromkeys(words.partition(" (")[0] for words in shown)) == [
        "Answering: 9 requests of 10 requests", "Answering: 10 requests of 10 requests",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "output, given, says",
    [
        (answer_of("a") + "\n" + answer_of("z") + "\n", "a", r"1 answer that the input does not ask for.*'z'"),
        ("my notes\n" + answer_of("a") + "\n", "a", r"line 1 of .* is not the output of a batch"),
        ("[1]\n", "a", r"line 1 of .* is not the output of a batch"),
        (answer_of("a") + "\n" + answer_of("a") + "\n", "a", "two answers for custom_id 'a'"),
        (answer_of("a") + "\n", "aa", "custom_id 'a' occurs twice in the input"),
    ],
)
def test_an_output_of_something_else_is_left_alone(
    output: str, given: str, says: str, resume: Any, tmp_path: Path
) -> None:
    (tmp_path / "out.jsonl").write_text(output)
    with pytest.raises(InputError, match=says):
        resume([short(name) for name in given])
    assert (tmp_path / "out.jsonl").read_text() == output


def test_a_run_that_cannot_start_leaves_the_file_alone(resume: Any, tmp_path: Path) -> None:
    output = answer_of("a") + "\n" + answer_of("b", 500) + "\n" + answer_of("c")[:20]
    (tmp_path / "out.jsonl").write_text(output)
    with pytest.raises(NotBuiltError):
        resume([short("a"), short("b"), short("c")], "--enable-sleep-mode")
    assert (tmp_path / "out.jsonl").read_text() == output


def test_an_output_that_is_not_text_is_not_that_of_a_batch(resume: Any, tmp_path: Path) -> None:
    """A torn line may end within a character, too."""
    (tmp_path / "out.jsonl").write_bytes(b'{"custom_id": "\xe9"}\n')
    with pytest.raises(InputError, match=r"line 1 of .* is not the output of a batch: 'utf-8' codec"):
        resume([short("a")])
    (tmp_path / "out.jsonl").write_bytes(answer_of("a").encode() + b'\n{"custom_id": "\xe9"}')
    assert [one["custom_id"] for one in resume([short("a")])] == ["a"]


def test_a_line_too_long_for_an_answer(resume: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_resume, "LONGEST_ANSWER", 100)
    (tmp_path / "out.jsonl").write_text("x" * 101 + "\n")
    with pytest.raises(InputError, match="longer than 100 bytes"):
        resume([short("a")])


def test_answers_for_a_url_cannot_be_resumed(model: str, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text(short("a"))
    with pytest.raises(InputError, match="--resume needs an --output-file that is a path"):
        command.run_batch(["-i", str(tmp_path / "in.jsonl"), "-o", "http://x/y", "--resume", "--model", model], "x")


# ---- URLs ------------------------------------------------------------------------------------------------------------


class Store(BaseHTTPRequestHandler):
    """An object store with presigned URLs, more or less."""

    files: dict[str, bytes] = {}

    def do_GET(self) -> None:
        found = self.files.get(self.path)
        self.send_response(404 if found is None else 200)
        self.end_headers()
        self.wfile.write(found or b"")

    def do_PUT(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        if "denied" not in self.path:
            Store.files[self.path] = data
        self.send_response(403 if "denied" in self.path else 200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def store() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Store)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_files_behind_urls(store: str, model: str, tmp_path: Path) -> None:
    Store.files = {"/in.jsonl?sig=1": line("a", prompt="abc", max_tokens=3).encode()}
    flags = ["-i", f"{store}/in.jsonl?sig=1", "-o", f"{store}/out?sig=2", "--model", model, "--disable-tqdm"]
    with pytest.raises(InputError, match="not public"):
        command.run_batch(flags, "x")
    Store.files["/answers"] = b""
    with pytest.raises(InputError, match="host 'localhost' is refused"):  # before anything is computed
        place = f"{store.replace('127.0.0.1', 'localhost')}/answers"
        command.run_batch([*flags[:3], place, *flags[4:], "--allow-url-host", "127.0.0.1"], "x")
    allowed = [*flags, "--allow-url-host", "127.0.0.1", "--output-tmp-dir", str(tmp_path)]
    assert command.run_batch(allowed, "x") == 0
    (found,) = lines_of(Store.files["/out?sig=2"])
    assert found["response"]["body"]["choices"][0]["text"] == "abc"
    assert not list(tmp_path.glob("*.jsonl"))


def test_answers_that_cannot_be_sent_are_kept(store: str, model: str, tmp_path: Path) -> None:
    Store.files = {"/in": line("a", prompt="abc", max_tokens=3).encode()}
    flags = ["-i", f"{store}/in", "-o", f"{store}/denied", "--model", model, "--disable-tqdm"]
    with pytest.raises(InputError, match=r"HTTP 403 .*; the answers are in"):
        command.run_batch([*flags, "--allow-url-host", "127.0.0.1", "--output-tmp-dir", str(tmp_path)], "x")
    (kept,) = tmp_path.glob("*.jsonl")
    assert lines_of(kept.read_text())[0]["custom_id"] == "a"


def test_a_file_that_is_too_large(store: str, model: str, tmp_path: Path) -> None:
    Store.files = {"/in": b"x" * 5000}
    flags = ["-i", f"{store}/in", "-o", str(tmp_path / "out"), "--model", model, "--allow-url-host", "127.0.0.1"]
    with pytest.raises(InputError, match="limit of 4000 bytes"):
        command.run_batch([*flags, "--max-file-bytes", "4k"], "x")


# ---- the runner, on an app of our own --------------------------------------------------------------------------------


class Echo:
    """Answers with the body it got, the later the smaller `wait` says; counts what is under way."""

    def __init__(self, busy: int = 0) -> None:
        self.running = self.most = self.calls = 0
        self.busy = busy

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.calls += 1
        self.running += 1
        self.most = max(self.most, self.running)
        body = (await receive())["body"]
        status, headers = 200, [(b"content-type", b"application/json")]
        if self.busy:
            self.busy -= 1
            status, headers = 503, [*headers, (b"retry-after", b"1")]
        else:
            for _ in range(json.loads(body)["wait"]):
                await asyncio.sleep(0)
        self.running -= 1
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body[:3], "more_body": True})
        await send({"type": "http.response.body", "body": body[3:]})


def answer_all(app: Any, given: list[str], **options: Any) -> tuple[list[dict[str, Any]], Any]:
    source, target = io.BytesIO("\n".join(given).encode()), io.BytesIO()
    tally = asyncio.run(BatchRunner(app, **{"window": 8, "longest_line": 10_000} | options).run(source, target))
    return lines_of(target.getvalue()), tally


def test_a_bounded_window_keeps_order() -> None:
    app = Echo()
    found, tally = answer_all(app, [line(str(i), wait=(i * 7) % 40) for i in range(200)])
    assert [one["custom_id"] for one in found] == [str(i) for i in range(200)]
    assert [one["response"]["body"]["wait"] for one in found] == [(i * 7) % 40 for i in range(200)]
    assert 2 <= app.most <= 8
    assert (tally.completed, tally.failed) == (200, 0)


def test_lines_are_read_only_as_they_are_needed() -> None:
    """With a window of 4, no more than a few lines are in memory at once."""
    reading: list[int] = []
    written = io.BytesIO()

    class Source(io.BytesIO):
        def readline(self, *size: Any) -> bytes:
            reading.append(written.getvalue().count(b"\n"))
            return super().readline(*size)

    source = Source("\n".join(line(str(i), wait=3) for i in range(50)).encode())
    asyncio.run(BatchRunner(Echo(), window=4, longest_line=1000).run(source, written))
    ahead = [number - done for number, done in enumerate(reading)]
    assert max(ahead) <= 5 and reading[-1] >= 46


def test_a_full_queue_is_waited_for() -> None:
    app = Echo(busy=3)
    found, tally = answer_all(app, [line("a", wait=0)], window=1)
    assert found[0]["response"]["status_code"] == 200 and tally.completed == 1 and app.calls == 4


def test_whoever_must_stop_stops() -> None:
    def alive() -> None:
        raise EngineDeadError("gone")

    with pytest.raises(EngineDeadError):
        answer_all(Echo(), [line("a", wait=0)], alive=alive)


def test_reading_lines() -> None:
    source = io.BytesIO(b"abc\n\n  \n" + b"x" * 25 + b"\nlast")
    assert list(read_lines(source, 10)) == [(1, b"abc\n"), (4, None), (5, b"last")]
    assert list(read_lines(io.BytesIO(b"x" * 10 + b"\n" + b"y" * 11), 10)) == [(1, b"x" * 10 + b"\n"), (2, None)]
