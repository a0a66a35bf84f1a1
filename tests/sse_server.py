"""A scripted server of OpenAI's kind, in a thread: what it answers, and when, is known, so measurements can be checked.

`Script` says how many pieces an answer has, how long before the first and between them, and what goes wrong. Requests
are kept as they came. Nothing of Quire is used.
"""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Script:
    pieces: int | None = None  # None: as many as the request asks for
    first_s: float = 0.0
    gap_s: float = 0.0
    usage: bool = True
    status: int = 200
    fail_after: int | None = None  # cut the connection after so many pieces
    error_after: int | None = None  # an error event after so many pieces
    close: bool = False  # Connection: close after each answer
    split: bool = False  # every event in two packets, with the chunk size in a third
    words: tuple[str, ...] = (" one", " two", " three")
    models: list[dict[str, Any]] = field(default_factory=lambda: [{"id": "scripted", "root": "scripted"}])


class ScriptedServer:
    def __init__(self, script: Script | None = None) -> None:
        self.script = script or Script()
        self.requests: list[tuple[str, dict[str, str], Any]] = []  # path, headers, body
        self.connections = 0
        self.running = self.most_running = 0
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True)

    def __enter__(self) -> ScriptedServer:
        self._thread.start()
        assert self._ready.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(60)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def bodies(self, path: str) -> list[Any]:
        return [body for where, _, body in self.requests if where == path]

    async def _main(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stop.wait()
        server.close()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while await self._exchange(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.strip().split("\r\n")
        method, path, _ = first.split()
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        raw = await reader.readexactly(int(headers.get("content-length", 0)))
        body = json.loads(raw) if raw else None
        self.requests.append((path, headers, body))
        script = self.script
        if method == "GET":
            listed = {"object": "list", "data": script.models}
            return self._whole(writer, 200 if path in ("/v1/models", "/health") else 404, listed)
        if not path.endswith(("completions", "embeddings", "rerank", "/pooling")):
            return self._whole(writer, 200, {})
        if script.status != 200:
            return self._whole(writer, script.status, {"error": {"message": "scripted refusal", "code": script.status}})
        self.running += 1
        self.most_running = max(self.running, self.most_running)
        try:
            if body.get("stream"):
                return await self._stream(writer, path, body)
            await asyncio.sleep(script.first_s + script.gap_s * (self._count(body) - 1))
            return self._whole(writer, 200, self._answer(path, body))
        finally:
            self.running -= 1

    def _count(self, body: dict[str, Any]) -> int:
        return self.script.pieces or body.get("max_tokens") or body.get("max_completion_tokens") or 16

    def _text(self, index: int) -> str:
        return self.script.words[index % len(self.script.words)]

    def _usage(self, body: dict[str, Any]) -> dict[str, int]:
        return {"prompt_tokens": 7, "completion_tokens": self._count(body), "total_tokens": 7 + self._count(body)}

    def _answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if not path.endswith("completions"):
            if "documents" in body:
                ranks = [{"index": i, "relevance_score": 0.5} for i in range(len(body["documents"]))]
                return {"results": ranks, "usage": {"prompt_tokens": 7, "total_tokens": 7}}
            return {"data": [{"index": 0, "embedding": [0.5]}], "usage": {"prompt_tokens": 7, "total_tokens": 7}}
        text = "".join(self._text(i) for i in range(self._count(body)))
        choice = {"message": {"role": "assistant", "content": text}} if "chat" in path else {"text": text}
        return {"choices": [choice | {"index": 0, "finish_reason": "length"}], "usage": self._usage(body)}

    def _whole(self, writer: asyncio.StreamWriter, status: int, content: Any) -> bool:
        data = json.dumps(content).encode()
        ending = "Connection: close\r\n" if self.script.close else ""
        head = f"HTTP/1.1 {status} Scripted\r\nContent-Type: application/json\r\n{ending}Content-Length: {len(data)}"
        writer.write(head.encode() + b"\r\n\r\n" + data)
        return not self.script.close

    async def _stream(self, writer: asyncio.StreamWriter, path: str, body: dict[str, Any]) -> bool:
        script, chat, count = self.script, "chat" in path, self._count(body)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        if chat:
            opening = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            await self._event(writer, {"choices": [opening]})
        await asyncio.sleep(script.first_s)
        for index in range(count):
            if script.fail_after == index:
                writer.transport.abort()
                return False
            if script.error_after == index:
                await self._event(writer, {"error": {"message": "scripted failure", "code": 500}})
                break
            if index and script.gap_s:
                await asyncio.sleep(script.gap_s)
            finish = "length" if index == count - 1 else None
            text = self._text(index)
            choice = {"delta": {"content": text}} if chat else {"text": text}
            await self._event(writer, {"choices": [choice | {"index": 0, "finish_reason": finish}]})
        else:
            if script.usage and (body.get("stream_options") or {}).get("include_usage"):
                await self._event(writer, {"choices": [], "usage": self._usage(body)})
        await self._event(writer, "[DONE]")
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return not script.close

    async def _event(self, writer: asyncio.StreamWriter, content: Any) -> None:
        text = content if isinstance(content, str) else json.dumps(content)
        data = f"data: {text}\n\n".encode()
        if not self.script.split:
            writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            return
        for part in (f"{len(data):x}\r".encode(), b"\n" + data[:9], data[9:] + b"\r", b"\n"):
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.001)
