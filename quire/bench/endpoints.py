"""What a request looks like to each kind of endpoint, and how its answer is read.

In: samples of a dataset, the asked parameters. Out: whole requests as bytes, made before the clock starts, and one
MeasuredResponse per answer. A token's moment is the moment its bytes arrived. Must not know: when requests are sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from quire.bench.datasets import Sample
from quire.bench.http_client import Reply, ServerAddress, encode_request
from quire.schema.errors import InputError

COMPLETIONS = ("openai", "vllm")
CHAT = ("openai-chat",)
RANKING = ("vllm-rerank",)
# Endpoints that answer with vectors, classes or scores: whole, and without tokens of their own.
POOLING = ("openai-embeddings", "openai-embeddings-chat", "vllm-pooling", *RANKING)
BACKENDS = COMPLETIONS + CHAT + POOLING
# How the path of a backend's endpoint ends.
_ENDINGS = dict.fromkeys(COMPLETIONS, "completions") | {
    "openai-chat": "chat/completions", "openai-embeddings": "embeddings", "openai-embeddings-chat": "embeddings",
    "vllm-pooling": "pooling", "vllm-rerank": "rerank",
}  # fmt: skip


@dataclass(frozen=True)
class RequestTemplate:
    """What every request of a run has in common."""

    backend: str
    endpoint: str
    model: str
    headers: dict[str, str] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)  # temperature, top_p, … as far as they were given
    extra_body: dict[str, Any] = field(default_factory=dict)
    ignore_eos: bool = False
    logprobs: int | None = None
    stream: bool = True
    request_id_prefix: str = "bench-"

    def body(self, sample: Sample) -> dict[str, Any]:
        if self.backend in POOLING:
            return {"model": self.model} | _pooling_input(self.backend, sample) | self.extra_body
        body: dict[str, Any] = {"model": self.model}
        if self.backend in CHAT:
            body["messages"] = [{"role": "user", "content": sample.prompt}]
            body["max_completion_tokens"] = sample.output_len
            if self.logprobs is not None:
                body |= {"logprobs": True, "top_logprobs": self.logprobs}
        else:
            body["prompt"] = sample.prompt
            body["max_tokens"] = sample.output_len
            if self.logprobs is not None:
                body["logprobs"] = self.logprobs
        if self.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        if self.ignore_eos:
            body["ignore_eos"] = True
        return body | self.sampling | self.extra_body

    def encode(self, server: ServerAddress, sample: Sample, name: str) -> bytes:
        headers = {"Content-Type": "application/json", "X-Request-Id": f"{self.request_id_prefix}{name}"}
        body = msgspec.json.encode(self.body(sample))
        return encode_request(server, "POST", self.endpoint, headers | self.headers, body)


def _pooling_input(backend: str, sample: Sample) -> dict[str, Any]:
    if backend in RANKING:
        return {"query": sample.prompt, "documents": list(sample.more)}
    if backend == "openai-embeddings-chat":
        return {"messages": [{"role": "user", "content": sample.prompt}]}
    return {"input": [sample.prompt, *sample.more] if sample.more else sample.prompt}


def check_endpoint(backend: str, endpoint: str) -> None:
    """A backend at another's address gives answers nobody can read."""
    if not endpoint.startswith("/"):
        raise InputError(f"--endpoint must begin with '/', got {endpoint!r}", param="endpoint", value=endpoint)
    path, ending = endpoint.rstrip("/"), _ENDINGS[backend]
    fits = path.endswith(ending) if backend in POOLING else path.endswith("chat/completions") is (backend in CHAT)
    if not fits:
        prefix = "/" if backend == "vllm-pooling" else "/v1/"
        raise InputError(
            f"--backend {backend} talks to an endpoint like {prefix}{ending}; --endpoint is {endpoint!r}",
            param="endpoint",
            value=endpoint,
        )


class StreamDelta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    role: str | None = None


class Choice(msgspec.Struct):
    text: str | None = None
    delta: StreamDelta | None = None
    message: StreamDelta | None = None
    finish_reason: str | None = None


class StreamUsage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = None


class StreamChunk(msgspec.Struct):
    """The fields of a streamed piece, or of a whole answer, that are measured."""

    choices: list[Choice] = []
    data: list[msgspec.Raw] = []  # vectors, classes, scores
    results: list[msgspec.Raw] = []  # documents with their ranks
    usage: StreamUsage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(StreamChunk).decode


class MeasuredResponse:
    """One answer, being read and then measured. Seconds on this process's clock."""

    __slots__ = (
        "_buffer",
        "_first",
        "_last",
        "_whole",
        "error",
        "finished",
        "itls",
        "latency",
        "output_len",
        "prompt_len",
        "start",
        "success",
        "texts",
        "ttft",
    )  # fmt: skip

    def __init__(self, sample: Sample, start: float, *, stream: bool) -> None:
        self.start = self._last = start
        self.prompt_len = sample.prompt_len  # the server's own count goes before it
        self.output_len = 0
        self.ttft = self.latency = 0.0
        self.itls: list[float] = []
        self.texts: list[str] = []
        self.success = self.finished = False
        self.error = ""
        self._buffer = b""
        self._first = b""  # the first bytes of the body: a refusal is no stream
        self._whole = not stream

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def feed(self, data: bytes, at: float) -> None:
        """A piece of the body."""
        if self._whole:
            self._buffer += data
            self._last = at
            return
        if not self._first:
            self._first = data
        for event in self._events(data):
            if event == b"[DONE]":
                self.finished = True
                continue
            self._chunk(event, at)

    def end(self, reply: Reply) -> None:
        """The answer is complete."""
        if reply.status != 200:
            self.error = f"HTTP {reply.status}: {self._complaint()}"
            return
        if self._whole:
            self._read_whole()
        if self.error:
            return
        if self.ttft == 0.0:
            self.error = "the answer held no token"
            return
        if not self._whole and not self.finished:
            self.error = "the stream ended without [DONE]"
            return
        self.success = True
        self.latency = self._last - self.start

    def fail(self, why: str) -> None:
        self.error = why

    def _events(self, new: bytes) -> Iterator[bytes]:
        """Payloads of the `data:` lines that are complete; each of our events is one line."""
        data = self._buffer + new if self._buffer else new
        *lines, self._buffer = data.split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()

    def _chunk(self, event: bytes, at: float) -> None:
        try:
            chunk = _decode(event)
        except msgspec.MsgspecError as wrong:
            self.error = f"an event is not what it should be: {wrong}: {event[:200].decode(errors='replace')}"
            return
        if chunk.error is not None:
            self.error = _message_of(chunk.error)
            return
        if chunk.usage is not None:
            self._usage(chunk.usage)
        for choice in chunk.choices:
            text = _text(choice)
            if text:
                self.texts.append(text)
            if self._counts(choice, text):
                if self.ttft == 0.0:
                    self.ttft = at - self.start
                else:
                    self.itls.append(at - self._last)
            elif choice.finish_reason is None:
                continue  # it only opens the message
            self._last = at

    def _counts(self, choice: Choice, text: str) -> bool:
        """A chunk stands for a token unless it only opens the message or only closes it."""
        if text or (choice.finish_reason is not None and self.ttft == 0.0):
            return True
        opens = choice.delta is not None and choice.delta.role is not None
        return choice.finish_reason is None and not opens

    def _usage(self, usage: StreamUsage) -> None:
        self.prompt_len = usage.prompt_tokens or self.prompt_len
        if usage.completion_tokens is not None:
            self.output_len = usage.completion_tokens

    def _read_whole(self) -> None:
        try:
            answer = _decode(self._buffer)
        except msgspec.MsgspecError as wrong:
            self.error = f"the answer is not what it should be: {wrong}"
            return
        if answer.error is not None:
            self.error = _message_of(answer.error)
            return
        if answer.usage is not None:
            self._usage(answer.usage)
        self.texts = [_text(choice) for choice in answer.choices]
        if answer.choices or answer.data or answer.results:
            self.ttft = self._last - self.start

    def _complaint(self) -> str:
        body = self._first or self._buffer
        try:
            parsed = msgspec.json.decode(body)
        except msgspec.MsgspecError:
            return body[:300].decode(errors="replace")
        return _message_of(parsed["error"] if isinstance(parsed, dict) and "error" in parsed else parsed)


def _text(choice: Choice) -> str:
    if choice.text is not None:
        return choice.text
    part = choice.delta or choice.message
    if part is None:
        return ""
    return (part.reasoning_content or part.reasoning or "") + (part.content or "")


def _message_of(error: Any) -> str:
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)
