"""The batch over HTTP beside the same batch offline: output tokens per second, their ratio, and whose processor time.

    python benchmarks/cpu/http_batch.py [--requests 64] [--prompt 128] [--new 128] [--rounds 3] [--model MODEL]

Each round runs LLM.generate, then `quire serve` with all requests streaming at once, then with whole answers, all with
the same options and each in processes of its own; the client is a process of bare sockets. On a machine that others use
the processor time is the figure: `step` is that of the process that computes (offline: of the whole program), `API`
and `client` that of theirs, `cost` is step and API together over the offline program. Greedy, the end of text ignored,
no prefix cache.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quire import LLM, SamplingParams

QUIRE = str(Path(sys.executable).parent / "quire")
TICK = os.sysconf("SC_CLK_TCK")
KINDS = ("offline", "streams", "whole answers")
OPTIONS = {"max_model_len": 2048, "max_num_seqs": 256, "enable_prefix_caching": False, "generation_config": "vllm"}
FLAGS = (
    "--max-model-len",
    "2048",
    "--max-num-seqs",
    "256",
    "--no-enable-prefix-caching",
    "--generation-config",
    "vllm",
)
QUIET = {"QUIRE_CPU_KVCACHE_SPACE": "2", "QUIRE_LOGGING_LEVEL": "WARNING", "QUIRE_TARGET_DEVICE": "cpu"}


def prompts_of(asked: argparse.Namespace) -> list[list[int]]:
    return [[(7 * i + 13 * j + i * j) % 40000 + 100 for j in range(asked.prompt)] for i in range(asked.requests)]


def own_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def seconds_of(pid: int) -> float:
    """Processor time of a process, all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK


def children_of(pid: int) -> list[int]:
    return [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]


# ---- offline ---------------------------------------------------------------------------------------------------------


def offline(asked: argparse.Namespace) -> dict[str, float]:
    llm = LLM(model=asked.model, disable_log_stats=True, **OPTIONS)
    params = SamplingParams(temperature=0, max_tokens=asked.new, ignore_eos=True)
    prompts = [{"prompt_token_ids": ids} for ids in prompts_of(asked)]
    llm.generate(prompts[:2], SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    used, began = own_seconds(), time.perf_counter()
    answers = llm.generate(prompts, params, use_tqdm=False)
    wall, used = time.perf_counter() - began, own_seconds() - used
    assert all(len(answer.outputs[0].token_ids) == asked.new for answer in answers)
    return {"wall": wall, "step": used}


# ---- over HTTP -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def server(model: str | None, *flags: str) -> Iterator[tuple[int, int]]:
    """(port, process id) of `quire serve` with these flags."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [QUIRE, "serve", *([model] if model else []), "--host", "127.0.0.1", "--port", str(port),
               "--uvicorn-log-level", "warning", *flags]  # fmt: skip
    child = subprocess.Popen(command)
    try:
        end = time.monotonic() + 300
        while True:
            if child.poll() is not None or time.monotonic() > end:
                sys.exit("the server did not start")
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1) as tried:
                tried.sendall(b"GET /health HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
                if b" 200 " in tried.recv(64):
                    break
            time.sleep(0.1)
        yield port, child.pid
    finally:
        child.terminate()
        child.wait(30)


async def answer(port: int, body: dict[str, Any]) -> int:
    """Tokens that came, by the server's own count."""
    data = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-type: application/json\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.encode() + b"content-length: %d\r\n\r\n" % len(data) + data)
    last = b""
    while part := await reader.read(1 << 16):
        last = (last + part)[-1024:]
    writer.close()
    return int(last.rpartition(b'"completion_tokens":')[2].split(b",")[0].split(b"}")[0])


async def send_all(port: int, asked: argparse.Namespace) -> int:
    fixed: dict[str, Any] = {"max_tokens": asked.new, "temperature": 0, "ignore_eos": True}
    if asked.child == "streams":
        fixed |= {"stream": True, "stream_options": {"include_usage": True}}
    return sum(await asyncio.gather(*(answer(port, fixed | {"prompt": ids}) for ids in prompts_of(asked))))


def client(asked: argparse.Namespace) -> dict[str, float]:
    began, used = time.perf_counter(), own_seconds()
    count = asyncio.run(send_all(asked.port, asked))
    assert count == asked.requests * asked.new, f"{count} tokens came"
    return {"wall": time.perf_counter() - began, "client": own_seconds() - used}


def over_http(kind: str, asked: argparse.Namespace) -> dict[str, float]:
    with server(asked.model, *FLAGS) as (port, pid):
        small = argparse.Namespace(**vars(asked) | {"requests": 2, "new": 4})
        child(kind, small, port)  # unmeasured: everything imported and warm
        engine = max(children_of(pid), key=seconds_of)
        before = seconds_of(pid), seconds_of(engine)
        found = child(kind, asked, port)
        return found | {"API": seconds_of(pid) - before[0], "step": seconds_of(engine) - before[1]}


# ---- all of it -------------------------------------------------------------------------------------------------------


def child(kind: str, asked: argparse.Namespace, port: int = 0) -> dict[str, float]:
    given = {"requests": asked.requests, "prompt": asked.prompt, "new": asked.new, "child": kind, "port": port}
    flags = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    flags += ["--model", asked.model] if asked.model else []
    done = subprocess.run([sys.executable, __file__, *flags], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{kind} failed:\n{done.stderr[-2000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def report(runs: dict[str, list[dict[str, float]]], tokens: int) -> None:
    base, cost = (statistics.median(run[name] for run in runs["offline"]) for name in ("wall", "step"))
    print(f"{'':<15}{'tok/s':>8}{'(least - most)':>18}{'of offline':>12}"
          f"{'step s':>9}{'API s':>8}{'client s':>10}{'cost':>8}{'us API per token':>18}")  # fmt: skip
    for kind, found in runs.items():
        walls = sorted(run["wall"] for run in found)
        middle = {name: statistics.median(run.get(name, 0.0) for run in found) for name in ("step", "API", "client")}
        spread = f"({tokens / walls[-1]:.1f} - {tokens / walls[0]:.1f})"
        print(f"{kind:<15}{tokens / statistics.median(walls):>8.1f}{spread:>18}{base / statistics.median(walls):>12.3f}"
              f"{middle['step']:>9.2f}{middle['API']:>8.2f}{middle['client']:>10.2f}"
              f"{(middle['step'] + middle['API']) / cost:>8.3f}{1e6 * middle['API'] / tokens:>18.0f}")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("requests", 64), ("prompt", 128), ("new", 128), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--model", help="folder or GGUF file; the embedded model if not given")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        print(json.dumps(offline(asked) if asked.child == "offline" else client(asked)))
        return
    os.environ.update(QUIET)
    runs: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    for _ in range(asked.rounds):
        for kind in KINDS:
            runs[kind].append(child(kind, asked) if kind == "offline" else over_http(kind, asked))
    report(runs, asked.requests * asked.new)


if __name__ == "__main__":
    main()
