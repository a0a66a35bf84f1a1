"""What HTTP costs: requests per second, and time per streamed token, beside a bare FastAPI stream as the floor.

    python benchmarks/server_overhead.py [--streams 256] [--tokens 128] [--requests 4000] [--concurrency 32] [--model]

Rows: the whole server over a worker that computes nothing (it repeats its prompt), the same over the embedded model
(with --model), and a FastAPI + uvicorn app that only yields chunks of the same size. Servers run in processes of their
own; clients are bare sockets here. The figure per token is processor time of the API process (all threads, read from
/proc) over tokens that reached a client, so that it does not depend on what else the machine does; wall time is beside.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import Response, StreamingResponse

from quire.base import registry
from quire.config import AsyncEngineArgs
from quire.config.server import server_config
from quire.engine import process_client
from quire.llm.online import AsyncLLM
from quire.server.app import build_app
from quire.server.state import ServerState

ROOT = Path(__file__).resolve().parents[1]
TICK = os.sysconf("SC_CLK_TCK")
CHAT = {"messages": [{"role": "user", "content": "Say something about the sea."}], "ignore_eos": True}
TEXT = {"prompt": "Say something about the sea, and go on.", "ignore_eos": True}


# ---- servers, each in its own process --------------------------------------------------------------------------------


def serve(kind: str, port: int) -> None:
    app = floor() if kind == "floor" else whole(kind)
    uvicorn.run(app, host="127.0.0.1", port=port, loop="uvloop", http="httptools", log_level="warning",
                access_log=False)  # fmt: skip


def floor() -> Any:
    """No parsing, no engine: what FastAPI and uvicorn cost by themselves."""
    app = FastAPI()
    choice = b'{"index":0,"text":" a","logprobs":null,"finish_reason":null,"stop_reason":null}'
    chunk = (
        b'data: {"id":"cmpl-0123456789abcdef","object":"text_completion","created":1794708338,"model":"m","choices":'
    )
    chunk += b"[" + choice + b"]}\n\n"

    @app.get("/health")
    async def health() -> Response:
        return Response()

    @app.post("/v1/completions")
    @app.post("/v1/chat/completions")
    async def complete(request: Request) -> Response:
        asked = await request.json()
        if not asked.get("stream"):
            return Response(chunk, media_type="application/json")

        async def body() -> Any:
            for _ in range(asked["max_tokens"]):
                yield chunk
                await asyncio.sleep(0)
            yield b"data: [DONE]\n\n"

        return StreamingResponse(body(), media_type="text/event-stream")

    return app


def whole(kind: str) -> Any:
    given: dict[str, Any] = {"max_num_seqs": 256, "enable_prefix_caching": False, "max_num_batched_tokens": 8192,
                             "generation_config": "vllm"}  # fmt: skip
    if kind == "scripted":
        sys.path.insert(0, str(ROOT))
        process_client.MAIN = "tests.fake_engine:main"
        write_model = registry.load("tests.fake_engine:write_model")
        given |= {"model": write_model(Path(tempfile.mkdtemp())), "num_gpu_blocks_override": 16384}
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**given))
    app = build_app(ServerState.of(engine, server_config()))
    gc.collect()
    gc.freeze()
    return app


@contextlib.contextmanager
def running(kind: str) -> Iterator[tuple[int, int]]:
    """Port and process id."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    environment = os.environ | {
        "PYTHONPATH": str(ROOT), "QUIRE_TARGET_DEVICE": "cpu", "QUIRE_LOGGING_LEVEL": "WARNING",
        "QUIRE_CPU_KVCACHE_SPACE": "1",
    }  # fmt: skip
    if kind == "scripted":
        environment["OMP_NUM_THREADS"] = "1"  # nothing to compute: the cores are the server's and the clients'
    child = subprocess.Popen([sys.executable, __file__, "--serve", kind, "--port", str(port)], env=environment)
    try:
        end = time.monotonic() + 120
        while True:
            if child.poll() is not None or time.monotonic() > end:
                sys.exit(f"the {kind} server did not start")
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1) as tried:
                tried.sendall(b"GET /health HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
                if b"200" in tried.recv(64):
                    break
            time.sleep(0.1)
        yield port, child.pid
    finally:
        child.terminate()
        child.wait(30)


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK


# ---- clients ---------------------------------------------------------------------------------------------------------


def http(path: str, body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    return b"POST %s HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (
        path.encode(), len(data), data,
    )  # fmt: skip


async def one_stream(port: int, message: bytes) -> int:
    """Events received, [DONE] left out."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(message)
    seen, last = 0, b""
    while True:
        data = await reader.read(1 << 16)
        if not data:
            raise ConnectionError("the server closed a stream")
        seen += data.count(b"data: {")
        last = (last + data)[-64:]
        if b"[DONE]" in last:
            break
    writer.close()
    return seen


async def streams(port: int, path: str, body: dict[str, Any], number: int, pace: float = 0.0) -> int:
    """`pace`: the scripted worker's seconds per step, so that no two tokens of a stream come at once."""
    messages = [http(path, body | {"vllm_xargs": {"sleep": pace}} if pace and i == 0 else body) for i in range(number)]
    return sum(await asyncio.gather(*(one_stream(port, message) for message in messages)))


async def requests(port: int, path: str, body: dict[str, Any], number: int, concurrency: int) -> None:
    message, left = http(path, body), iter(range(number))

    async def client() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in left:
            writer.write(message)
            head = await reader.readuntil(b"\r\n\r\n")
            if b" 200 " not in head[:20]:
                raise RuntimeError(head.decode())
            length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
            await reader.readexactly(length)
        writer.close()

    await asyncio.gather(*(client() for _ in range(concurrency)))


def measure(kind: str, args: argparse.Namespace) -> None:
    tokens, number, at_once = args.tokens, args.requests, args.streams
    if kind in ("model", "other"):  # it computes, so a tenth of the work takes as long
        tokens, number, at_once = max(2, tokens // 8), max(32, number // 8), min(args.model_streams, at_once)
    named = {"model": args.other_model} if kind == "other" else {}
    given = contextlib.nullcontext((args.other[0], args.other[1])) if kind == "other" else running(kind)
    with given as (port, pid):
        for path, base in (("/v1/completions", TEXT), ("/v1/chat/completions", CHAT)):
            body = base | named | {"max_tokens": tokens, "stream": True}
            asyncio.run(streams(port, path, body, 32))  # unmeasured: everything imported and warm
            cpu, began = cpu_seconds(pid), time.perf_counter()
            pace = args.pace if kind == "scripted" else 0.0
            events = asyncio.run(streams(port, path, body, at_once, pace))
            wall, cpu = time.perf_counter() - began, cpu_seconds(pid) - cpu
            total = at_once * tokens
            rate, share = total / wall, cpu / total * 1e6
            print(f"{kind:<10}{path:<24}{at_once:>5} streams{rate:>10.0f} tokens/s{share:>9.1f} us API processor "
                  f"time per token{wall / total * 1e6:>9.1f} us wall{events:>9} events")  # fmt: skip
        body = TEXT | named | {"max_tokens": 1, "temperature": 0}
        asyncio.run(requests(port, "/v1/completions", body, 200, args.concurrency))
        cpu, began = cpu_seconds(pid), time.perf_counter()
        asyncio.run(requests(port, "/v1/completions", body, number, args.concurrency))
        wall, cpu = time.perf_counter() - began, cpu_seconds(pid) - cpu
        print(f"{kind:<10}{'/v1/completions':<24}{args.concurrency:>5} clients{number / wall:>10.0f} requests/s"
              f"{cpu / number * 1e6:>7.0f} us API processor time per request, max_tokens 1")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--pace", type=float, default=0.04, help="seconds per step of the scripted worker")
    parser.add_argument("--kinds", nargs="*", default=["floor", "scripted"], choices=["floor", "scripted", "model"])
    parser.add_argument("--model", action="store_true", help="the embedded model too")
    parser.add_argument("--model-streams", type=int, default=32, help="streams at once where a model computes")
    parser.add_argument("--other", type=int, nargs=2, metavar=("PORT", "PID"), help="another engine's server, running")
    parser.add_argument("--other-model", default="smollm2", help="its name for the model")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, args.port)
        return
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    for kind in [*args.kinds, *(["model"] if args.model else []), *(["other"] if args.other else [])]:
        measure(kind, args)


if __name__ == "__main__":
    main()
