"""Many streaming clients for minutes: none lost, none wrong, memory flat.

    python benchmarks/soak.py --streams 256 --minutes 10            # steady load: each stream starts anew when it ends
    python benchmarks/soak.py --streams 2000 --once                 # one burst: every stream once, all at the same time
    python benchmarks/soak.py --streams 64 --minutes 2 --leave 0.2  # a fifth of the clients hang up mid-stream
    python benchmarks/soak.py --streams 8 --once --kill-clients     # then kill -9 a process with open streams

Starts `quire serve` on the embedded model (or takes --url), asks for every prompt alone first (greedy), then compares
each streamed answer with it. Reads the memory of every process of the server every few seconds and fits a line; before
that it fills the KV cache once, because memory that was never written to is not counted by the system. Exits
1 when an answer is lost or wrong, when memory grows by more than --max-slope, or when blocks are not given back.
float32 by default: a batch of another size may round differently, and in bfloat16 that is enough to change a greedy
choice now and then, as it does in every engine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import resource
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import aiohttp

QUIRE = str(Path(sys.executable).parent / "quire")
SUBJECTS = ("rivers", "the moon", "bread", "a clock", "old maps", "glass", "winter", "trains", "salt", "a violin",
            "bees", "paper", "harbours", "lightning", "chess", "gardens")  # fmt: skip
FORMS = ("Tell me about {}.", "The story of {} begins with", "Three facts about {}:\n1.", "Q: What is {}?\nA:")
PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Case:
    prompt: str
    max_tokens: int

    def body(self) -> dict[str, Any]:
        return dict(prompt=self.prompt, max_tokens=self.max_tokens, temperature=0.0, stream=True, ignore_eos=True)


@dataclass
class Tally:
    """What became of the streams."""

    outcomes: Counter[str] = field(default_factory=Counter)
    troubles: list[str] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    num_tokens: int = 0
    seconds: float = 0.0

    def trouble(self, kind: str, words: str) -> None:
        self.outcomes[kind] += 1
        if len(self.troubles) < 10:
            self.troubles.append(f"{kind}: {words}")


def cases(count: int, longest: int) -> list[Case]:
    texts = [form.format(subject) for form in FORMS for subject in SUBJECTS]
    filler = "It was a long day, and there was much to see on the way. "
    return [Case(filler * (i % 7) + texts[i % len(texts)], longest // 2 + i % (longest // 2 + 1)) for i in range(count)]


# ---- one stream -------------------------------------------------------------------------------------------------


async def ask(session: aiohttp.ClientSession, url: str, case: Case, *, leave_after: int = 0) -> tuple[bytes, float]:
    """The raw events of a stream, and when the first came. `leave_after`: hang up after so many pieces."""
    parts: list[bytes] = []
    first = 0.0
    async with session.post(f"{url}/v1/completions", json=case.body()) as answer:
        if answer.status != 200:
            raise ConnectionError(f"status {answer.status}: {(await answer.text())[:200]}")
        async for part in answer.content.iter_any():
            first = first or time.perf_counter()
            parts.append(part)
            if leave_after and len(parts) >= leave_after:
                answer.close()
                return b"", first
    return b"".join(parts), first


def fold(events: bytes) -> tuple[str, str | None, bool]:
    """Text, finish reason, and whether the stream ended as it should."""
    text, reason, done = [], None, False
    for event in events.split(b"\n\n"):
        data = event.removeprefix(b"data: ")
        if data == b"[DONE]":
            done = True
        elif data:
            piece = json.loads(data)
            if "error" in piece:
                raise ConnectionError(f"error in the stream: {piece['error']}")
            for choice in piece["choices"]:
                text.append(choice["text"])
                reason = choice["finish_reason"] or reason
    return "".join(text), reason, done


async def run_case(
    session: aiohttp.ClientSession, url: str, case: Case, expected: str, tally: Tally, leave_after: int
) -> None:
    began = time.perf_counter()
    try:
        events, first = await ask(session, url, case, leave_after=leave_after)
        if not events and leave_after:
            tally.outcomes["left"] += 1
            return
        text, reason, done = fold(events)
    except (aiohttp.ClientError, OSError, ValueError, TimeoutError) as failed:
        tally.trouble("lost", f"{type(failed).__name__}: {failed}")
        return
    ended = time.perf_counter()
    if not done or reason != "length":
        tally.trouble("lost", f"ended with finish_reason {reason}, [DONE] {'came' if done else 'did not come'}")
    elif text != expected:
        tally.trouble("wrong", f"{case.prompt[-40:]!r}: {text!r} is not {expected!r}")
    else:
        tally.outcomes["right"] += 1
    tally.num_tokens += case.max_tokens
    tally.first.append(first - began)
    tally.whole.append(ended - began)


# ---- the load ---------------------------------------------------------------------------------------------------


async def load(args: argparse.Namespace, url: str, watch: Memory | None) -> Tally:
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=60, sock_read=args.patience)
    asked = cases(args.prompts, args.max_tokens)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False) as session:
        expected = []
        for case in asked:  # alone: nothing else runs
            text, _, _ = fold((await ask(session, url, case))[0])
            expected.append(text)
        print(f"{len(asked)} prompts answered alone", flush=True)
        if not args.once:
            await fill_cache(session, url)
        tally, stop_at = Tally(), time.monotonic() + args.minutes * 60
        if watch is not None:
            watch.start()

        async def client(number: int) -> None:
            turn = number
            while True:
                index = turn % len(asked)
                leaves = args.leave and (turn * 7919) % 1000 < args.leave * 1000
                await run_case(session, url, asked[index], expected[index], tally, 1 if leaves else 0)
                turn += args.streams + 1
                if args.once or time.monotonic() > stop_at:
                    return

        told = asyncio.create_task(tell(tally, watch))
        began = time.perf_counter()
        await asyncio.gather(*(client(number) for number in range(args.streams)))
        tally.seconds = time.perf_counter() - began
        told.cancel()
        if watch is not None:
            watch.stop()
    return tally


async def fill_cache(session: aiohttp.ClientSession, url: str) -> None:
    """Prompts that share nothing, until every block has been written."""
    async with session.get(f"{url}/metrics", params={"name[]": "vllm:cache_config_info"}) as answer:
        labels = dict(re.findall(r'(\w+)="([^"]*)"', await answer.text()))
    tokens = int(labels["num_gpu_blocks"]) * int(labels["block_size"])
    began, length, drawn = time.perf_counter(), 400, random.Random(0)
    turns = iter(range(-(-tokens * 11 // 10 // length)))

    async def send() -> None:
        for _ in turns:
            words = [drawn.randrange(100, 40000) for _ in range(length)]
            async with session.post(f"{url}/v1/completions", json=dict(prompt=words, max_tokens=1)) as answer:
                await answer.read()

    await asyncio.gather(*(send() for _ in range(4)))
    print(f"{tokens} tokens of KV cache filled in {time.perf_counter() - began:.0f} s", flush=True)


async def tell(tally: Tally, watch: Memory | None) -> None:
    while True:
        await asyncio.sleep(15)
        memory = "" if watch is None else ", " + watch.now()
        print(f"  {dict(tally.outcomes)}{memory}", flush=True)


# ---- memory -----------------------------------------------------------------------------------------------------


class Memory:
    """RSS of every process of a server, read in a task of the event loop."""

    def __init__(self, root: int, interval: float) -> None:
        self.root, self.interval = root, interval
        self.samples: dict[str, list[tuple[float, float]]] = {}  # process -> (minutes, MiB)
        self._task: asyncio.Task[None] | None = None
        self._began = 0.0

    def start(self) -> None:
        self._began = time.monotonic()
        self._task = asyncio.get_running_loop().create_task(self._run())

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
        self.read()

    async def _run(self) -> None:
        while True:
            self.read()
            await asyncio.sleep(self.interval)

    def read(self) -> None:
        minutes = (time.monotonic() - self._began) / 60
        for pid, name in processes(self.root).items():
            try:
                pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            except OSError:
                continue  # it ended this moment
            self.samples.setdefault(f"{name} {pid}", []).append((minutes, pages * PAGE / 2**20))

    def now(self) -> str:
        return ", ".join(f"{name.split()[0]} {rows[-1][1]:.0f} MiB" for name, rows in self.samples.items())

    def slopes(self) -> dict[str, dict[str, float]]:
        """Per process: first, last, most (MiB), and MiB a minute over the last two thirds, when caches are warm."""
        found = {}
        for name, rows in self.samples.items():
            late = rows[len(rows) // 3 :]
            slope = statistics.linear_regression(*zip(*late, strict=True)).slope if len(late) > 2 else 0.0
            values = [mib for _, mib in rows]
            found[name] = dict(first=values[0], last=values[-1], most=max(values), slope_per_minute=slope)
        return found


def processes(root: int) -> dict[int, str]:
    """A process and all below it: engine, api (whoever else was started), main."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            parents.setdefault(parent, []).append(int(entry.name))
    found, todo = {}, [root]
    while todo:
        pid = todo.pop()
        todo += parents.get(pid, [])
        try:
            command = Path(f"/proc/{pid}/cmdline").read_text()
        except OSError:
            continue
        found[pid] = "main" if pid == root else "engine" if "engine.proc" in command else "api"
    return found


# ---- the server -------------------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(args: argparse.Namespace) -> tuple[subprocess.Popen[bytes], str]:
    port = free_port()
    command = [QUIRE, "serve", *([args.model] if args.model else []), "--host", "127.0.0.1", "--port", str(port),
               "--dtype", args.dtype, "--max-model-len", "2048", "--disable-uvicorn-access-log"]  # fmt: skip
    command += ["--api-server-count", str(args.api_server_count)] if args.api_server_count > 1 else []
    print(" ".join([*command, *args.server_options]), flush=True)
    environment = {"QUIRE_CPU_KVCACHE_SPACE": "0.5" if args.once else "0.25"} | os.environ  # GiB; small: it is filled
    server = subprocess.Popen([*command, *args.server_options], env=environment)
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 600
    while True:
        if server.poll() is not None:
            sys.exit(f"the server ended with {server.returncode} before it was ready")
        try:
            with urlopen(f"{url}/health", timeout=2) as answer:
                if answer.status == 200:
                    return server, url
        except OSError:
            pass
        if time.monotonic() > deadline:
            server.kill()
            sys.exit("the server was not ready after 10 minutes")
        time.sleep(0.1)


def gauge(url: str, name: str) -> float:
    with urlopen(f"{url}/metrics?name[]={name}", timeout=30) as answer:
        lines = [line for line in answer.read().decode().splitlines() if line.startswith(name)]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def wait_for(url: str, name: str, test: Any, limit: float) -> float:
    """Seconds until a gauge is as wanted; inf after `limit`."""
    began = time.perf_counter()
    while not test(gauge(url, name)):
        if time.perf_counter() - began > limit:
            return float("inf")
        time.sleep(0.005)
    return time.perf_counter() - began


def kill_clients(url: str, count: int) -> dict[str, float]:
    """A process with open streams dies by SIGKILL: how long until the engine has its rows and blocks back."""
    victim = subprocess.Popen([sys.executable, __file__, "--victim", url, "--streams", str(count)])
    running = wait_for(url, "vllm:num_requests_running", lambda n: n >= count, 60)
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    if running == float("inf"):
        return dict(rows=float("inf"), blocks=float("inf"))
    rows = wait_for(url, "vllm:num_requests_running", lambda n: n == 0, 30)
    return dict(rows=rows, blocks=wait_for(url, "vllm:kv_cache_usage_perc", lambda n: n == 0, 30))


async def be_victim(url: str, count: int) -> None:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(ask(session, url, Case(f"Count from {i}:", 2000)) for i in range(count)))


# ---- the run ----------------------------------------------------------------------------------------------------


def quantiles(values: list[float]) -> str:
    if len(values) < 2:
        return "-"
    cuts = statistics.quantiles(values, n=100)
    return f"p50 {cuts[49]:.3f} s, p99 {cuts[98]:.3f} s, max {max(values):.3f} s"


def report(args: argparse.Namespace, tally: Tally, watch: Memory | None, freed: dict[str, float]) -> int:
    seconds = tally.seconds
    outcomes = dict(tally.outcomes)
    bad = outcomes.get("lost", 0) + outcomes.get("wrong", 0)
    print(f"\n{args.streams} streams at once, {seconds:.0f} s: {outcomes}")
    print(f"  {tally.num_tokens / seconds:.0f} tokens/s")
    print(f"  first token {quantiles(tally.first)}; whole {quantiles(tally.whole)}")
    for words in tally.troubles:
        print(f"  {words}")
    slopes = {} if watch is None else watch.slopes()
    grew = False
    for name, row in slopes.items():
        print(f"  {name}: {row['first']:.0f} -> {row['last']:.0f} MiB (most {row['most']:.0f}), "
              f"{row['slope_per_minute']:+.2f} MiB/min")  # fmt: skip
        grew |= not args.once and row["slope_per_minute"] > args.max_slope
    for what, waited in freed.items():
        print(f"  {what} back after {waited * 1000:.0f} ms")
        bad += waited > 5
    if args.json:
        told = dict(streams=args.streams, seconds=seconds, outcomes=outcomes, tokens=tally.num_tokens, memory=slopes,
                    freed=freed, samples={} if watch is None else watch.samples)  # fmt: skip
        Path(args.json).write_text(json.dumps(told, indent=2))
    return int(bool(bad) or grew)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64, help="streams at once")
    parser.add_argument("--minutes", type=float, default=1.0, help="how long new streams are started")
    parser.add_argument("--once", action="store_true", help="every stream once, however long it takes")
    parser.add_argument("--prompts", type=int, default=64, help="different prompts")
    parser.add_argument(
        "--max-tokens", type=int, default=24, help="most tokens of an answer; each asks for half to all"
    )
    parser.add_argument("--leave", type=float, default=0.0, help="share of streams whose client hangs up")
    parser.add_argument("--kill-clients", action="store_true", help="at the end, kill -9 a process with open streams")
    parser.add_argument("--patience", type=float, default=600.0, help="seconds of silence after which a stream is lost")
    parser.add_argument("--interval", type=float, default=5.0, help="seconds between memory readings")
    parser.add_argument("--max-slope", type=float, default=2.0, help="MiB a minute that a process may grow")
    parser.add_argument("--model", help="default: the embedded one")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--api-server-count", type=int, default=1)
    parser.add_argument("--url", help="a running server; its memory is then not watched unless --pid is given")
    parser.add_argument("--pid", type=int, help="first process of the server at --url")
    parser.add_argument("--json", help="file for the figures")
    parser.add_argument("--victim", help=argparse.SUPPRESS)
    args, others = parser.parse_known_args()
    args.server_options = others
    return args


def main() -> int:
    args = arguments()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if args.victim:
        asyncio.run(be_victim(args.victim, args.streams))
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the server below goes with us
    server = None
    url, pid = args.url, args.pid
    if url is None:
        server, url = start(args)
        pid = server.pid
    watch = None if pid is None else Memory(pid, args.interval)
    try:
        tally = asyncio.run(load(args, url, watch))
        freed = dict(rows=wait_for(url, "vllm:num_requests_running", lambda n: n == 0, 30))
        freed["blocks"] = wait_for(url, "vllm:kv_cache_usage_perc", lambda n: n == 0, 30)
        if args.kill_clients:
            freed |= {f"after kill -9: {k}": v for k, v in kill_clients(url, 32).items()}
        return report(args, tally, watch, freed)
    finally:
        if server is not None:
            server.send_signal(signal.SIGTERM)
            try:
                print(f"the server ended with {server.wait(60)}")
            except subprocess.TimeoutExpired:
                print("the server did not end within 60 s of SIGTERM")
                server.kill()


if __name__ == "__main__":
    sys.exit(main())
