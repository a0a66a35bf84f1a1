"""Four engines behind one port, counted: is the load even, does routing by prefix find caches, who is told of a death.

    python benchmarks/engines.py                          # 500 streams at a time; about two minutes on two cores
    python benchmarks/engines.py --streams 40 --rounds 2  # a quick look

Starts `quire serve -dp 4` on a tiny random checkpoint (or takes --model). Counts, not times:

    even     streams in steady flow: how many unfinished ones each engine has, at many moments, and how many it answered
    prefix   prompts of some groups that share a prefix each, more prefixes than one engine's cache holds: share of
             prompt tokens found in caches, with routing by load and by prefix
    death    streams under way, one engine is killed: those that fail and what they are told, those that go on, /health

Prints one JSON object; exits 1 if a stream is lost or wrong, the load is uneven by more than 10%, routing by prefix
finds no more than routing by load, or a death is told of wrongly.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

sys.path.insert(0, str(Path(__file__).parents[1]))

import aiohttp
from soak import fold, free_port, processes

from tests.tiny_models import make_tiny

ENGINES = 4
UNEVEN = 0.10
GROUPS, PREFIX = 24, 320  # of prompts that share a prefix of so many tokens
BLOCKS = 260  # KV blocks of 16 tokens of each engine then: half of the prefixes


@contextmanager
def serving(model: str, *options: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    port = free_port()
    command = [sys.executable, "-m", "quire.cli.main", "serve", model, "--host", "127.0.0.1", "--port", str(port),
               "-dp", str(ENGINES), "--device", "cpu", "--dtype", "float32", *options]  # fmt: skip
    environment = {"QUIRE_CPU_KVCACHE_SPACE": "0.25", "QUIRE_CPU_NUM_THREADS": "1"} | os.environ
    server = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}"
        while not is_ready(url):
            if server.poll() is not None:
                sys.exit(f"{' '.join(command)} ended with {server.returncode}")
            time.sleep(0.2)
        yield server, url
    finally:
        server.terminate()
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:
            server.kill()


def is_ready(url: str) -> bool:
    try:
        with urlopen(f"{url}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def by_engine(text: str, *names: str) -> list[float]:
    """The sum of some metrics, for each engine."""
    sums = [0.0] * ENGINES
    for name in names:
        for engine, value in re.findall(rf'^{name}{{[^}}]*engine="(\d+)"[^}}]*}} (\S+)$', text, re.MULTILINE):
            sums[int(engine)] += float(value)
    return sums


async def metrics(session: aiohttp.ClientSession, url: str) -> str:
    async with session.get(f"{url}/metrics") as answer:
        return await answer.text()


async def ask(session: aiohttp.ClientSession, url: str, prompt: list[int], count: int, begun: list[int]) -> str:
    """right, or what went wrong."""
    body = dict(prompt=prompt, max_tokens=count, temperature=0.0, ignore_eos=True, stream=True)
    parts = []
    try:
        async with session.post(f"{url}/v1/completions", json=body) as answer:
            if answer.status != 200:
                return f"status {answer.status}: {await answer.text()}"
            async for part in answer.content.iter_any():
                begun[0] += not parts
                parts.append(part)
        _, reason, is_done = fold(b"".join(parts))
    except (aiohttp.ClientError, OSError, ValueError) as failed:
        return str(failed)
    return "right" if is_done and reason == "length" else f"ended with {reason}"


def session_of() -> aiohttp.ClientSession:
    """Connections are kept and used again, as programs do."""
    connector = aiohttp.TCPConnector(limit=0)
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))


# ---- even -------------------------------------------------------------------------------------------------------


async def even(url: str, streams: int, rounds: int) -> dict[str, Any]:
    outcomes: Counter[str] = Counter()
    ended, drawn, moments = 0, random.Random(0), list[list[float]]()

    async def client(session: aiohttp.ClientSession) -> None:
        nonlocal ended
        for _ in range(rounds):
            prompt = [drawn.randrange(4, 200) for _ in range(drawn.randrange(8, 40))]
            outcomes[await ask(session, url, prompt, drawn.randrange(60, 180), [0])] += 1
        ended += 1

    async def watch(session: aiohttp.ClientSession) -> None:
        while ended < 0.1 * streams:  # then the flow is steady no more
            text = await metrics(session, url)
            there = by_engine(text, "vllm:num_requests_running", "vllm:num_requests_waiting")
            if sum(there) > 0.5 * streams:  # the others are on their way, from here or to here
                moments.append(there)
            await asyncio.sleep(0.05)

    async with session_of() as session:
        watched = asyncio.create_task(watch(session))
        await asyncio.gather(*(client(session) for _ in range(streams)))
        await watched
        answered = by_engine(await metrics(session, url), "vllm:request_success_total")
    means = [sum(one) / len(moments) for one in zip(*moments, strict=True)] if moments else [0.0]
    mean = sum(means) / len(means)
    return dict(
        outcomes=dict(outcomes), moments=len(moments), unfinished=[round(one, 1) for one in means],
        answered=answered, uneven=max(abs(one / mean - 1) for one in means) if mean else 1.0,
    )  # fmt: skip


# ---- prefix -----------------------------------------------------------------------------------------------------


async def hit_rate(url: str, requests: int) -> dict[str, Any]:
    drawn = random.Random(1)
    prefixes = [[drawn.randrange(4, 200) for _ in range(PREFIX)] for _ in range(GROUPS)]
    prompts = iter([[*drawn.choice(prefixes), *(drawn.randrange(4, 200) for _ in range(9))] for _ in range(requests)])
    outcomes: Counter[str] = Counter()

    async def client(session: aiohttp.ClientSession) -> None:
        for prompt in prompts:
            outcomes[await ask(session, url, prompt, 4, [0])] += 1

    async with session_of() as session:
        await asyncio.gather(*(client(session) for _ in range(16)))
        text = await metrics(session, url)
    hits, queries = (sum(by_engine(text, f"vllm:prefix_cache_{name}_total")) for name in ("hits", "queries"))
    answered = by_engine(text, "vllm:request_success_total")
    return dict(outcomes=dict(outcomes), hit_rate=round(hits / queries, 3), answered=answered)


# ---- death ------------------------------------------------------------------------------------------------------


async def death(server: subprocess.Popen[bytes], url: str, streams: int) -> dict[str, Any]:
    """The second engine is killed once every stream has begun."""
    begun, drawn = [0], random.Random(2)
    pids = sorted(pid for pid, name in processes(server.pid).items() if name == "engine")
    assert len(pids) == ENGINES, pids
    async with session_of() as session:

        def client() -> asyncio.Task[str]:
            prompt = [drawn.randrange(4, 200) for _ in range(10)]
            return asyncio.create_task(ask(session, url, prompt, 400, begun))

        asking = [client() for _ in range(streams)]
        while begun[0] < streams:
            await asyncio.sleep(0.05)
        there = by_engine(await metrics(session, url), "vllm:num_requests_running", "vllm:num_requests_waiting")
        os.kill(pids[1], signal.SIGKILL)
        told = Counter("right" if one == "right" else "told" if "engine 1" in one else one for one in
                       await asyncio.gather(*asking))  # fmt: skip
        later = Counter(await asyncio.gather(*(ask(session, url, [5, 6, 7], 4, begun) for _ in range(4 * ENGINES))))
        async with session.get(f"{url}/health") as answer:
            health = dict(status=answer.status, dead=sorted((await answer.json())["dead_engines"]))
    return dict(before=there, streams=dict(told), later=dict(later), health=health)


# ---- all --------------------------------------------------------------------------------------------------------


def measure(args: argparse.Namespace, model: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    rows = str(-(-args.streams // ENGINES) + 8)
    # eight tokens a message: else the one API process is what limits, and the engines have little to do
    with serving(model, "--max-num-seqs", rows, "--stream-interval", "8") as (server, url):
        found["even"] = asyncio.run(even(url, args.streams, args.rounds))
        found["death"] = asyncio.run(death(server, url, args.streams))
    for routing in ("least-loaded", "prefix-aware"):
        options = ("--data-parallel-routing", routing, "--num-gpu-blocks-override", str(BLOCKS), "--block-size", "16")
        with serving(model, *options) as (_, url):
            found[routing] = asyncio.run(hit_rate(url, args.requests))
    return found


def faults(found: dict[str, Any], args: argparse.Namespace) -> list[str]:
    even_, death_ = found["even"], found["death"]
    wrong = []
    if even_["outcomes"] != {"right": args.streams * args.rounds}:
        wrong.append(f"streams went wrong: {even_['outcomes']}")
    if even_["uneven"] > UNEVEN:
        wrong.append(f"an engine had {even_['uneven']:.0%} more or fewer requests than the mean")
    if found["prefix-aware"]["hit_rate"] <= found["least-loaded"]["hit_rate"]:
        wrong.append("routing by prefix found no more in caches than routing by load")
    if set(death_["streams"]) != {"right", "told"} or death_["later"] != {"right": 4 * ENGINES}:
        wrong.append(f"after a death: {death_['streams']}, then {death_['later']}")
    if death_["health"] != {"status": 200, "dead": ["1"]}:
        wrong.append(f"/health after a death: {death_['health']}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a checkpoint of at most a few million parameters")
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=3, help="requests of each stream")
    parser.add_argument("--requests", type=int, default=1000, help="of prompts with shared prefixes")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if args.model is None:
            make_tiny("LlamaForCausalLM", folder, max_position_embeddings=512)
        found = measure(args, args.model or folder)
    found["faults"] = faults(found, args)
    print(json.dumps(found, indent=1))
    return 1 if found["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
