"""A model behind an OpenAI-compatible server, for `quire chat` and `quire complete`: the interface of a local engine.

In: a base URL such as http://localhost:8000/v1, messages or a prompt. Out: the answer, streamed to stdout.
A refusal of the server is one line; Ctrl-C closes the connection, which aborts the request there.
Must not know: engines.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import ssl
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from quire.base.clock import now
from quire.cli.conversation import ChatReply
from quire.cli.terminal import writer
from quire.schema.errors import ConfigError, EngineGenerateError, InputError, QuireError

LOCAL_URL = "http://localhost:8000/v1"
_PROBE_S = 0.5
_CONNECT_S = 10.0
_SILENCE_S = 600.0  # a long prompt may wait in a queue


class ServerError(QuireError):
    """The server cannot be reached, or its response is invalid."""


class RefusedError(ServerError, InputError):
    """The server works and refused the request."""

    def __init__(self, message: str, status: int) -> None:
        InputError.__init__(self, message)
        self.http_status = status


class AnswerChunk(NamedTuple):
    text: str
    finish_reason: str | None
    num_tokens: int | None  # of the complete answer, if the server reports it


class Remote:
    """One server. Each request opens a connection: a terminal waits for its user, not for a handshake."""

    def __init__(self, url: str, api_key: str | None, *, connect_s: float = _CONNECT_S) -> None:
        try:
            parts = urlsplit(url)
            self._port = parts.port
        except ValueError as wrong:
            raise ConfigError(f"--url {url!r}: {wrong}", param="url") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--url must be a URL such as {LOCAL_URL}, got {url!r}", param="url", value=url)
        self.url = url.rstrip("/")
        self._tls, self._host, self._path = parts.scheme == "https", parts.hostname, parts.path.rstrip("/")
        self._headers = {"Content-Type": "application/json", "Accept": "text/event-stream, application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._connect_s = connect_s

    def models(self) -> list[str]:
        """Names of the served models."""
        with self._ask("GET", "/models", None) as answer:
            try:
                listed = json.loads(answer.read(1 << 20))["data"]
                return [str(entry["id"]) for entry in listed]
            except (ValueError, KeyError, TypeError):
                raise ServerError(
                    f"{self.url}/models: the response is not that of an OpenAI-compatible server"
                ) from None

    def stream(self, path: str, body: Mapping[str, Any]) -> Iterator[AnswerChunk]:
        """The answer, chunk by chunk."""
        with self._ask("POST", path, {**body, "stream": True}) as answer:
            for line in answer:
                if not line.startswith(b"data:"):
                    continue
                event = line[5:].strip()
                if event == b"[DONE]":
                    return
                yield _chunk(event)
        raise EngineGenerateError("the server ended the answer before it was complete")

    @contextlib.contextmanager
    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None) -> Iterator[http.client.HTTPResponse]:
        connection = self._connection()
        try:
            try:
                connection.connect()
                connection.sock.settimeout(_SILENCE_S if body is not None else self._connect_s)
                data = None if body is None else json.dumps(body).encode()
                connection.request(method, f"{self._path}{path}", data, self._headers)
                answer = connection.getresponse()
            except (OSError, http.client.HTTPException) as wrong:
                raise ServerError(f"no answer from {self.url}: {wrong or type(wrong).__name__}") from None
            if answer.status != 200:
                raise RefusedError(_complaint(answer) + self._hint(answer.status), answer.status)
            try:
                yield answer
            except (OSError, http.client.HTTPException) as wrong:
                raise EngineGenerateError(f"the connection to {self.url} broke: {wrong}") from None
        finally:
            connection.close()

    def _hint(self, status: int) -> str:
        """At the most common mistake: the base URL is not the server's address alone."""
        return f"; did you mean --url {self.url}/v1?" if status == 404 and not self._path else ""

    def _connection(self) -> http.client.HTTPConnection:
        if self._tls:
            context = ssl.create_default_context()
            return http.client.HTTPSConnection(self._host, self._port, timeout=self._connect_s, context=context)
        return http.client.HTTPConnection(self._host, self._port, timeout=self._connect_s)


def local_server(api_key: str | None, *, connect_s: float = _CONNECT_S) -> Remote:
    """The default URL."""
    return Remote(LOCAL_URL, api_key, connect_s=connect_s)


def find_local() -> Remote | None:
    """A server on this machine at the default URL, if one responds at once. It gets no key: it could be anybody's."""
    probe = local_server(None, connect_s=_PROBE_S)
    try:
        probe.models()
    except RefusedError as wrong:
        if wrong.http_status in (401, 403):
            raise ConfigError(
                f"the server at {LOCAL_URL} requires a key: set --api-key, or --local to run a model in this process"
            ) from None
        return None
    except ServerError:
        return None
    return local_server(None)


class RemoteSpeaker:
    """Answers of a server, streamed to stdout."""

    def __init__(self, remote: Remote, model: str | None, sampling: Mapping[str, Any], template: str | None) -> None:
        self._remote, self.sampling = remote, dict(sampling)
        if model is None:
            listed = remote.models()
            if not listed:
                raise ServerError(f"{remote.url} serves no model")
            model = listed[0]
        self.model = model
        self._template = {} if template is None else {"chat_template": read_template(template)}
        self.status = 0

    def answer(self, messages: list[dict[str, Any]]) -> ChatReply:
        body = {"model": self.model, "messages": messages} | self._template | self.sampling
        return self._print("/chat/completions", body)

    def complete(self, text: str) -> ChatReply:
        return self._print("/completions", {"model": self.model, "prompt": text} | self.sampling)

    def close(self) -> None:
        """No connection is kept open."""

    def _print(self, path: str, body: Mapping[str, Any]) -> ChatReply:
        out, chunks, times, finish, counted = writer(), list[str](), list[float](), None, None
        began = now()
        self.status = 0
        usage = {"stream_options": {"include_usage": True}} if sys.stdin.isatty() else {}  # for the statistics line
        try:
            for chunk in self._remote.stream(path, {**body, **usage}):
                finish, counted = chunk.finish_reason or finish, chunk.num_tokens or counted
                if chunk.text:
                    chunks.append(chunk.text)
                    times.append(now())
                    out.write(chunk.text)
        except KeyboardInterrupt:  # the connection is closed by now, and the server stops generating
            self.status = 130
        finally:
            if chunks or self.status:
                out.close()
        first, rest = (times[0] - began, times[-1] - times[0]) if times else (0.0, 0.0)
        return ChatReply("".join(chunks), counted or len(chunks), first, rest, finish == "length")


def read_template(text_or_path: str) -> str:
    if os.path.isfile(text_or_path):
        with open(text_or_path, encoding="utf-8") as file:
            return file.read()
    return text_or_path


def _chunk(event: bytes) -> AnswerChunk:
    try:
        chunk = json.loads(event)
        if chunk.get("error"):
            raise EngineGenerateError(f"the server failed: {_message_of(chunk['error'])}")
        choice = (chunk.get("choices") or [{}])[0]
        text = str(choice.get("text") or (choice.get("delta") or {}).get("content") or "")
        counted = (chunk.get("usage") or {}).get("completion_tokens")
        return AnswerChunk(text, choice.get("finish_reason"), counted if isinstance(counted, int) else None)
    except (ValueError, AttributeError, TypeError) as wrong:
        raise EngineGenerateError(f"the server sent an invalid event ({wrong}): {event[:100]!r}") from None


def _complaint(answer: http.client.HTTPResponse) -> str:
    body = answer.read(1 << 16)
    try:
        content = json.loads(body)
        reason = _message_of(content.get("error", content))
    except (ValueError, AttributeError):
        reason = body[:300].decode("utf-8", "replace").strip() or answer.reason
    return f"the server refused: HTTP {answer.status}: {reason}"


def _message_of(error: Any) -> str:
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)
