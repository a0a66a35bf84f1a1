"""`quire chat` and `quire complete` against a scripted server: what is asked, what is printed, who is chosen."""

from __future__ import annotations

import io
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from quire.cli import client, remote
from quire.schema.errors import ConfigError, EngineGenerateError, InputError
from tests.sse_server import Script, ScriptedServer


class NoEngine:
    """Nothing may be loaded here."""

    @classmethod
    def from_engine_args(cls, args: Any) -> Any:
        raise AssertionError("an engine was made")


@pytest.fixture(autouse=True)
def nobody(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """No engine, and where a server would be, nobody listens: the port is taken."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
        monkeypatch.setattr(client, "LLMEngine", NoEngine)
        monkeypatch.setattr(remote, "LOCAL_URL", url)
        monkeypatch.delenv("OPENAI_API_KEY", raising=False)
        yield url


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer(Script(pieces=3)) as running:
        yield running


def feed(monkeypatch: pytest.MonkeyPatch, *typed: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in typed)))


def test_a_quick_question(server: ScriptedServer, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [
        "--url",
        f"{server.url}/v1",
        "-q",
        "Hi",
        "--system-prompt",
        "Be brief.",
        "--temperature",
        "0",
        "--stop",
        "x",
    ]
    assert client.chat(flags, "quire chat") == 0
    printed = capsys.readouterr()
    assert printed.out == " one two three\n"
    assert printed.err == f"scripted at {server.url}/v1\n"
    (body,) = server.bodies("/v1/chat/completions")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert body == {"model": "scripted", "messages": messages, "temperature": 0.0, "stop": ["x"], "stream": True}


def test_the_address_of_a_server_alone_is_explained(server: ScriptedServer) -> None:
    with pytest.raises(InputError, match=f"HTTP 404: .*; did you mean --url {server.url}/v1\\?$"):
        client.chat(["--url", server.url, "-q", "Hi"], "quire chat")
    with pytest.raises(InputError, match=r"HTTP 404: [^;]*$"):
        client.chat(["--url", f"{server.url}/v2", "-q", "Hi"], "quire chat")


def test_a_conversation_keeps_its_history(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    feed(monkeypatch, "one", "two")
    assert client.chat(["--url", f"{server.url}/v1/"], "quire chat") == 0
    first, second = (body["messages"] for body in server.bodies("/v1/chat/completions"))
    answer = {"role": "assistant", "content": " one two three"}
    assert second == [*first, answer, {"role": "user", "content": "two"}]


def test_a_text_is_continued(server: ScriptedServer, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--url", f"{server.url}/v1", "--model-name", "other", "--api-key", "secret", "-q", "The sky is"]
    assert client.complete(flags, "quire complete") == 0
    assert capsys.readouterr().out == " one two three\n"
    (body,) = server.bodies("/v1/completions")
    assert body == {"model": "other", "prompt": "The sky is", "max_tokens": 128, "stream": True}
    assert {headers["authorization"] for _, headers, _ in server.requests} == {"Bearer secret"}


def test_a_template_goes_along(server: ScriptedServer, tmp_path: Any) -> None:
    path = tmp_path / "template.jinja"
    path.write_text("{{ messages }}")
    client.chat(["--url", f"{server.url}/v1", "-q", "x", "--chat-template", str(path)], "quire chat")
    assert server.bodies("/v1/chat/completions")[0]["chat_template"] == "{{ messages }}"


def test_a_refusal_does_not_end_the_session(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    feed(monkeypatch, "one", "two")
    server.script = Script(status=400)
    assert client.chat(["--url", f"{server.url}/v1", "--model-name", "m"], "quire chat") == 0
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("quire chat: the server refused: HTTP 400: scripted refusal") == 2
    assert all(len(body["messages"]) == 1 for body in server.bodies("/v1/chat/completions"))


@pytest.mark.parametrize(
    "script, says",
    [
        (Script(pieces=3, error_after=1), "the server failed: scripted failure"),
        (Script(pieces=3, fail_after=1), "broke|before it was complete"),
    ],
)
def test_a_broken_answer_is_one_error(
    script: Script, says: str, server: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.script = script
    with pytest.raises(EngineGenerateError, match=says):
        client.complete(["--url", f"{server.url}/v1", "-q", "x"], "quire complete")
    assert capsys.readouterr().out == " one\n"  # what came is shown


def test_control_c_closes_the_connection(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.script = Script(pieces=2, first_s=0.0, gap_s=60.0)
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))

    class Shown(io.StringIO):
        def write(self, text: str) -> int:
            if "one" in text:
                timer.start()  # the second piece is waited for
            return super().write(text)

    shown = Shown()
    monkeypatch.setattr(sys, "stdout", shown)
    assert client.complete(["--url", f"{server.url}/v1", "-q", "x"], "quire complete") == 130
    timer.join()
    assert shown.getvalue() == " one\n"


def test_no_server_is_one_clear_error(nobody: str) -> None:
    with pytest.raises(remote.ServerError, match=r"no answer from http://127\.0\.0\.1"):
        client.chat(["--url", nobody, "-q", "x"], "quire chat")


def test_something_else_at_the_url(server: ScriptedServer) -> None:
    server.script.models = "nonsense"
    with pytest.raises(remote.ServerError, match="not that of an OpenAI-compatible server"):
        client.chat(["--url", f"{server.url}/v1", "-q", "x"], "quire chat")


def test_a_server_without_models(server: ScriptedServer) -> None:
    server.script.models = []
    with pytest.raises(remote.ServerError, match="serves no model"):
        client.chat(["--url", f"{server.url}/v1", "-q", "x"], "quire chat")


# ---- without --url ---------------------------------------------------------------------------------------------------


@pytest.fixture
def local(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> ScriptedServer:
    """A server at the usual place."""
    monkeypatch.setattr(remote, "LOCAL_URL", f"{server.url}/v1")
    return server


def test_a_server_at_the_usual_place_is_found(
    local: ScriptedServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    assert client.chat(["-q", "x"], "quire chat") == 0
    printed = capsys.readouterr()
    assert printed.out == " one two three\n" and f"at {local.url}/v1" in printed.err
    assert all("authorization" not in headers for _, headers, _ in local.requests)  # nobody named this server


@pytest.mark.parametrize("flag", ["--api-key", "--model-name"])
def test_what_only_a_server_has_means_the_server(flag: str, local: ScriptedServer) -> None:
    assert client.chat(["-q", "x", flag, "given"], "quire chat") == 0
    (asked,) = [(headers, body) for path, headers, body in local.requests if path == "/v1/chat/completions"]
    assert asked[0].get("authorization") == ("Bearer given" if flag == "--api-key" else None)
    assert asked[1]["model"] == ("given" if flag == "--model-name" else "scripted")


@pytest.mark.parametrize("flags", [["--local"], ["some/model"], ["--model", "some/model"], ["--max-num-seqs", "3"]])
def test_whoever_wants_an_engine_here_gets_it(flags: list[str], local: ScriptedServer) -> None:
    with pytest.raises(AssertionError, match="an engine was made"):
        client.chat(["-q", "x", *flags], "quire chat")
    assert local.requests == []


def test_no_server_at_the_usual_place() -> None:
    with pytest.raises(AssertionError, match="an engine was made"):
        client.chat(["-q", "x"], "quire chat")


def test_a_local_server_that_asks_for_a_key(local: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Any, *_: Any) -> list[str]:
        raise remote.RefusedError("no", 401)

    monkeypatch.setattr(remote.Remote, "models", refuse)
    with pytest.raises(ConfigError, match="set --api-key"):
        client.chat(["-q", "x"], "quire chat")


def test_a_refusal_is_bad_input() -> None:
    assert issubclass(remote.RefusedError, InputError)
