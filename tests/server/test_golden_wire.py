"""The bytes on the wire, frozen: field names, their order, null or absent. Clients broke on every change of these.

Scripted results go through the renderers; tests/server/golden has what must come out. After a wanted change:
WRITE_GOLDEN=1 pytest tests/server/test_golden_wire.py, and read the difference.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.engine.inputs import PreparedRequest
from quire.schema.outputs import CompletionOutput, Logprob, RequestOutput
from quire.schema.params import SamplingParams
from quire.schema.prompt import Prompt
from quire.server.openai.chat import ChatAnswer
from quire.server.openai.chat_open import OpenedChat, PreparedChat
from quire.server.openai.chat_protocol import ChatRequest
from quire.server.openai.completions import CompletionAnswer
from quire.server.openai.params import Opened
from quire.server.openai.protocol import CompletionRequest
from quire.server.stream import DONE
from tests.server.live import Live

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
    found: bytes = CASES[name](fake)
    path = FOLDER / f"{name}.txt"
    if os.environ.get("WRITE_GOLDEN"):
        path.write_bytes(found + b"\n")
    assert found + b"\n" == path.read_bytes()
