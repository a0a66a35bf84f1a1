"""cli/client.py with a scripted engine: what is asked of it, what is printed where, history, Ctrl-C, bad input."""

from __future__ import annotations

import io
import os
import signal
from types import SimpleNamespace
from typing import Any

import pytest

from quire.cli import client
from quire.schema.errors import ConfigError, InputError
from quire.schema.outputs import CompletionOutput, RequestOutput
from quire.schema.params import RequestOutputKind, SamplingParams


class FakeEngine:
    """Answers every request with the words of `script`, one per step."""

    script = ["Hel", "lo", "!"]
    made: list[FakeEngine] = []

    def __init__(self, args: Any) -> None:
        self.args = args
        self.model_config = SimpleNamespace(default_sampling={"temperature": 0.7, "top_p": 0.9}, max_model_len=99)
        self.prompts: list[Any] = []
        self.params: list[SamplingParams] = []
        self.aborted: list[str] = []
        self.closed = False
        self._left: list[str] = []
        FakeEngine.made.append(self)

    @classmethod
    def from_engine_args(cls, args: Any) -> FakeEngine:
        return cls(args)

    def get_tokenizer(self) -> str:
        return "its tokenizer"

    def add_request(self, request_id: str, prompt: Any, params: SamplingParams) -> None:
        if isinstance(prompt, str) and "too long" in prompt:
            raise InputError("the prompt has 99 tokens, the limit is 9")
        self.request_id, self._left = request_id, list(self.script)
        self.prompts.append(prompt)
        self.params.append(params)

    def has_unfinished_requests(self) -> bool:
        return bool(self._left)

    def step(self) -> list[RequestOutput]:
        word = self._left.pop(0)
        answer = CompletionOutput(index=0, text=word, token_ids=[1], finish_reason=None if self._left else "stop")
        return [RequestOutput(self.request_id, None, [], None, [answer], finished=not self._left)]

    def close(self) -> None:
        self.closed = True

    def abort_request(self, request_ids: list[str]) -> None:
        self.aborted += request_ids
        self._left = []


def tokenize_chat(tokenizer: str, messages: list[dict[str, str]], *, chat_template: str | None = None) -> str:
    assert tokenizer == "its tokenizer"
    return "".join(f"<{m['role']}>{m['content']}" for m in messages) + f"<{chat_template or 'assistant'}>"


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> type[FakeEngine]:
    monkeypatch.setattr(client, "LLMEngine", FakeEngine)
    monkeypatch.setattr(client, "tokenize_chat", tokenize_chat)
    monkeypatch.setattr(FakeEngine, "made", [])
    monkeypatch.setattr(client, "find_local", lambda: None)  # whatever runs on this machine
    return FakeEngine


def feed(monkeypatch: pytest.MonkeyPatch, *typed: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in typed)))


def test_quick_chat_prints_only_the_answer(engine: type[FakeEngine], capsys: pytest.CaptureFixture[str]) -> None:
    assert client.chat(["-q", "Hi", "--system-prompt", "Be brief.", "--max-tokens", "5"], "quire chat") == 0
    printed = capsys.readouterr()
    assert printed.out == "Hello!\n"
    assert "loading the embedded model ... " in printed.err
    (made,) = engine.made
    assert made.closed
    assert made.prompts[0] == "<system>Be brief.<user>Hi<assistant>"
    assert made.params[0] == SamplingParams(
        temperature=0.7, top_p=0.9, max_tokens=5, output_kind=RequestOutputKind.DELTA
    )


def test_flags_beat_the_models_defaults(engine: type[FakeEngine]) -> None:
    client.chat(["-q", "Hi", "--temperature", "0", "--stop", "a", "--stop", "b", "--min-p", "0.1"], "quire chat")
    params = engine.made[0].params[0]
    assert (params.temperature, params.top_p, params.min_p, params.stop) == (0.0, 0.9, 0.1, ["a", "b"])
    assert params.max_tokens is None  # an answer may be as long as the model allows


def test_engine_flags_and_the_model_reach_the_engine(engine: type[FakeEngine]) -> None:
    client.complete(["some/model", "-q", "x", "--max-model-len", "2k", "--max_num_seqs", "3"], "quire complete")
    args = engine.made[0].args
    assert (args.model, args.max_model_len, args.max_num_seqs) == ("some/model", 2000, 3)
    client.complete(["--model", "other/model", "-q", "x"], "quire complete")
    assert engine.made[1].args.model == "other/model"


def test_complete_sends_the_text_itself(engine: type[FakeEngine], capsys: pytest.CaptureFixture[str]) -> None:
    assert client.complete(["-q", "The sky is"], "quire complete") == 0
    assert capsys.readouterr().out == "Hello!\n"
    assert engine.made[0].prompts == ["The sky is"]
    assert engine.made[0].params[0].max_tokens == 128


def test_a_conversation_keeps_its_history(
    engine: type[FakeEngine], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    feed(monkeypatch, "one", "", "two")
    assert client.chat(["--chat-template", "other"], "quire chat") == 0
    assert engine.made[0].prompts == ["<user>one<other>", "<user>one<assistant>Hello!<user>two<other>"]
    assert capsys.readouterr().out == "Hello!\nHello!\n"  # a pipe sees no prompt


def test_bad_input_does_not_end_the_session(
    engine: type[FakeEngine], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    feed(monkeypatch, "too long", "fine")
    assert client.complete([], "quire complete") == 0
    printed = capsys.readouterr()
    assert printed.out == "Hello!\n"
    assert "quire complete: the prompt has 99 tokens, the limit is 9" in printed.err


def test_control_c_stops_the_answer_not_the_session(
    engine: type[FakeEngine], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(engine, "step", interrupting(engine.step))
    feed(monkeypatch, "one", "two")
    assert client.chat([], "quire chat") == 0
    assert capsys.readouterr().out == "Hel\nHello!\n"
    (made,) = engine.made
    assert made.aborted == ["terminal-1"]
    assert made.prompts[1] == "<user>one<assistant>Hel<user>two<assistant>"
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("command", [client.chat, client.complete])
def test_control_c_of_a_quick_question_is_its_status(
    command: Any, engine: type[FakeEngine], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(engine, "step", interrupting(engine.step))
    assert command(["-q", "one"], "quire") == 130
    assert capsys.readouterr().out == "Hel\n"


def test_a_second_control_c_ends_the_command(engine: type[FakeEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "step", interrupting(engine.step, times=2))
    with pytest.raises(KeyboardInterrupt):
        client.chat(["-q", "one"], "quire chat")
    assert engine.made[0].closed


def interrupting(step: Any, times: int = 1) -> Any:
    """The first step is hit by Ctrl-C."""
    hits = [True]

    def wrapped(self: FakeEngine) -> list[RequestOutput]:
        if hits:
            hits.pop()
            for _ in range(times):
                os.kill(os.getpid(), signal.SIGINT)
        return step(self)

    return wrapped


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--url", "http://x/v1", "--local"], "mutually exclusive"),
        (["--url", "http://x/v1", "--max-model-len", "512"], "--max-model-len is an option of an engine"),
        (["--local", "--api-key", "k"], "^--api-key is for a server, and a model in this process was asked for"),
        (["--local", "--model-name", "m"], "^--model-name is for a server"),
        (["some/model", "--api-key", "k"], "^--api-key is for a server"),
        (["--url", "localhost:8000"], "--url must be a URL such as http://localhost:8000/v1"),
    ],
)
def test_what_does_not_go_with_a_url(arguments: list[str], says: str, engine: type[FakeEngine]) -> None:
    with pytest.raises(ConfigError, match=says):
        client.chat([*arguments, "-q", "x"], "quire chat")
    assert engine.made == []


@pytest.mark.parametrize("arguments", [["--temperature", "hot"], ["--no-such-flag"]])
def test_wrong_flags_exit_with_usage(arguments: list[str], engine: type[FakeEngine]) -> None:
    with pytest.raises(SystemExit) as ended:
        client.chat(["-q", "x", *arguments], "quire chat")
    assert ended.value.code == 2
