"""The bytes on the wire, frozen: field names, their order, null or absent. Clients broke on every change of these.

Scripted results go through the renderers; tests/server/golden has what must come out. After a wanted change:
WRITE_GOLDEN=1 pytest tests/server/test_golden_wire.py, and read the difference.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.engine.inputs import PreparedRequest
from quire.schema.outputs import CompletionOutput, Logprob, RequestOutput
from quire.schema.params import SamplingParams
from quire.schema.prompt import Prompt
from quire.server.anthropic.answer import MessageEvents, MessageStream, WholeMessage
from quire.server.anthropic.errors import error_event
from quire.server.errors import refusal
from quire.server.openai.chat import ChatAnswer
from quire.server.openai.chat_open import OpenedChat, PreparedChat
from quire.server.openai.chat_protocol import ChatRequest
from quire.server.openai.completions import CompletionAnswer
from quire.server.openai.params import Opened
from quire.server.openai.protocol import CompletionRequest
from quire.server.openai.responses_answer import ResponseAnswer, ResponseStream, WholeResponse
from quire.server.openai.responses_protocol import ResponsesRequest
from quire.server.openai.tool_choice import read_tool_use
from quire.server.stream import DONE
from tests.server.live import Live, live_fake

FOLDER = Path(__file__).parent / "golden"
HI: Any = [{"role": "user", "content": "Say hi"}]
USAGE = {"include_usage": True}
ALWAYS = {"include_usage": True, "continuous_usage_stats": True}


@pytest.fixture(autouse=True)
def fixed(monkeypatch: pytest.MonkeyPatch, fake: Live) -> Iterator[None]:
    monkeypatch.setattr("quire.server.openai.envelope.time.time", lambda: 1794708338.5)
    fingerprint = fake.state.served.base.fingerprint
    object.__setattr__(fake.state.served.base, "fingerprint", "quire-0.1.0-3919a215")
    yield
    object.__setattr__(fake.state.served.base, "fingerprint", fingerprint)


def results(*, logprobs: bool = False) -> list[RequestOutput]:
    """Three tokens: ' a', ' pla' with half a character held back, and the end."""
    pieces: list[tuple[str, list[int], str | None]] = [(" a", [5], None), (" plac", [6], None), ("é", [7, 8], "length")]
    found = []
    for text, ids, reason in pieces:
        positions = [{i: Logprob(-0.5, 1, chr(60 + i)), i + 20: Logprob(float("-inf"), 2, "x")} for i in ids]
        output = CompletionOutput(0, text, ids, finish_reason=reason, logprobs=positions if logprobs else None)
        found.append(RequestOutput("r", "The", [1, 2, 3], None, [output], reason is not None, num_cached_tokens=2))
    return found


def opened() -> Opened:
    flow: Any = None
    return Opened(flow, (PreparedRequest("r", "The", (1, 2, 3), SamplingParams(), (), 0.0),), {"r": 0})


def completion(fake: Live, **body: Any) -> CompletionAnswer:
    request = CompletionRequest(prompt="The", **body)
    options, model = fake.state.options, fake.state.served.base
    return CompletionAnswer(options, model, request, opened(), "cmpl-8b2850b1b37d1788", only_echo=False)


def chat(fake: Live, **body: Any) -> ChatAnswer:
    prepared = PreparedChat(ChatRequest(messages=HI, **body), Prompt(text="The"), SamplingParams(), None, True)
    chat = OpenedChat(fake.state.options, fake.state.served.base, prepared, opened())
    return ChatAnswer(chat, "chatcmpl-b93a7cbb2516bcaf")


def stream(answer: Any, **kwargs: Any) -> bytes:
    return b"".join(answer.chunk([result]) for result in results(**kwargs)) + bytes(answer.end()) + DONE


def whole(answer: Any, **kwargs: Any) -> bytes:
    for result in results(**kwargs):
        answer.take([result])
    return bytes(answer.whole())


CASES: dict[str, Any] = {
    "completion": lambda f: whole(completion(f)),
    "completion_full": lambda f: whole(completion(f, logprobs=1, return_token_ids=True, echo=False), logprobs=True),
    "completion_stream": lambda f: stream(completion(f, stream=True, stream_options=USAGE)),
    "completion_stream_full": lambda f: stream(
        completion(f, stream=True, stream_options=ALWAYS, logprobs=1, return_token_ids=True), logprobs=True
    ),
    "chat": lambda f: whole(chat(f)),
    "chat_full": lambda f: whole(
        chat(f, logprobs=True, top_logprobs=2, return_token_ids=True, return_prompt_text=True), logprobs=True
    ),
    "chat_stream": lambda f: stream(chat(f, stream=True, stream_options=USAGE)),
    "chat_stream_full": lambda f: stream(
        chat(f, stream=True, stream_options=ALWAYS, logprobs=True, top_logprobs=2, return_token_ids=True), logprobs=True
    ),
    "unknown_model": lambda f: f.post("/v1/completions", {"model": "nope", "prompt": "a"}).content,
    "bad_value": lambda f: f.post("/v1/completions", {"prompt": "a", "max_tokens": 999999}).content,
    "not_found": lambda f: f.post("/v1/nowhere", {"input": "a"}).content,
    "tokenize": lambda f: f.post("/tokenize", {"prompt": "ab"}).content,
}


@pytest.mark.parametrize("name", CASES)
def test_wire(fake: Live, name: str) -> None:
    compare(name, CASES[name](fake))


def compare(name: str, found: bytes) -> None:
    path = FOLDER / f"{name}.txt"
    if os.environ.get("WRITE_GOLDEN"):
        path.write_bytes(found + b"\n")
    assert found + b"\n" == path.read_bytes()


# ---- dialects that show an answer in parts --------------------------------------------------------------------------

PARTS = 'I must look.</think>Let me see "é".<tool_call>\n{"name": "find", "arguments": {"what": "sea"}}\n</tool_call>'
FIND: Any = {"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Thoughts and calls are parsed."""
    with live_fake(
        tmp_path_factory.mktemp("scripted"), enable_auto_tool_choice=True, tool_call_parser="hermes",
        engine={"reasoning_parser": "deepseek_r1"},
    ) as server:  # fmt: skip
        yield server


@pytest.fixture
def numbered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids that are drawn are 0, 1, 2."""
    numbers = itertools.count()
    monkeypatch.setattr("secrets.token_hex", lambda size: f"{next(numbers):0{2 * size}x}")


def parts(text: str = PARTS, reason: str = "stop", stop: str | None = None, *, logprobs: bool = False) -> Any:
    """Nine characters at a time."""
    found = []
    for start in range(0, len(text), 9):
        number, last = start // 9, start + 9 >= len(text)
        output = CompletionOutput(
            0, text[start : start + 9], [number], finish_reason=reason if last else None,
            stop_reason=stop if last else None,
            logprobs=[{number: Logprob(-0.5, 1, "a"), number + 9: Logprob(-1.5, 2, "b")}] if logprobs else None,
        )  # fmt: skip
        found.append(RequestOutput("r", "The", [1, 2, 3], None, [output], last, num_cached_tokens=2))
    return found


def parsed(server: Live, **body: Any) -> OpenedChat:
    request = ChatRequest(messages=HI, tools=[FIND], **body)
    tools = read_tool_use(request, server.state.options)
    prepared = PreparedChat(request, Prompt(text="The"), SamplingParams(), None, True, tools)
    return OpenedChat(server.state.options, server.state.served.base, prepared, opened())


def message(server: Live) -> MessageEvents:
    return MessageEvents(parsed(server), "msg_8b2850b1b37d1788")


def response(server: Live, chat_fields: Any = None, **body: Any) -> ResponseAnswer:
    return ResponseAnswer(parsed(server, **(chat_fields or {})), ResponsesRequest(input="Say hi", **body), "resp_8b28")


def shown(answer: Any, results: Any) -> bytes:
    """Streamed."""
    return b"".join(answer.chunk([result]) for result in results) + bytes(answer.end())


def collected(answer: Any, results: Any) -> bytes:
    for result in results:
        answer.take([result])
    answer.end()
    return bytes(answer.whole())


def failed(answer: Any) -> bytes:
    return b"".join(answer.chunk([result]) for result in parts()[:3]) + bytes(answer.failed(refusal(500, "no more")))


WITH_LOGPROBS = {"logprobs": True, "top_logprobs": 2}
FULL: Any = {
    "instructions": "Be brief.", "metadata": {"a": "b"}, "max_output_tokens": 99, "text": {"format": {"type": "text"}},
    "reasoning": {"effort": "low"}, "tools": [{"type": "function", "name": "find"}], "tool_choice": "required",
    "parallel_tool_calls": False, "service_tier": "flex", "truncation": "auto", "user": "u", "top_logprobs": 2,
}  # fmt: skip
DIALECTS: dict[str, Any] = {
    "message": lambda f: collected(WholeMessage(message(f)), parts()),
    "message_stream": lambda f: shown(MessageStream(message(f)), parts()),
    "message_cut": lambda f: collected(WholeMessage(message(f)), parts(PARTS[:-24], "length")),
    "message_stopped": lambda f: shown(MessageStream(message(f)), parts("</think>Hello", "stop", "zz")),
    "message_error": lambda f: error_event(refusal(503, "full", headers={"Retry-After": "1"})),
    "response": lambda f: collected(WholeResponse(response(f)), parts()),
    "response_stream": lambda f: shown(ResponseStream(response(f)), parts()),
    "response_full": lambda f: collected(
        WholeResponse(response(f, WITH_LOGPROBS, **FULL)), parts("</think>Hello there", logprobs=True)
    ),
    "response_full_stream": lambda f: shown(
        ResponseStream(response(f, WITH_LOGPROBS, **FULL)), parts("</think>Hello there", logprobs=True)
    ),
    "response_cut": lambda f: collected(WholeResponse(response(f)), parts(PARTS[:-24], "length")),
    "response_failed": lambda f: failed(ResponseStream(response(f))),
}


@pytest.mark.parametrize("name", DIALECTS)
def test_wire_of_parts(scripted: Live, numbered: None, name: str) -> None:
    compare(name, DIALECTS[name](scripted))
