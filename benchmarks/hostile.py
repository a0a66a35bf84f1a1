"""Every known attack and the fuzzers at once, beside honest streams: none lost, none wrong, none held up.

    python benchmarks/hostile.py                                  # ten minutes of attacks beside 50 streams
    python benchmarks/hostile.py --seconds 60 --only trailer isolation
    python benchmarks/hostile.py --list                           # what is sent, by subject

Starts `quire serve` on the embedded model for this machine alone, with three keys: that of the honest streams, the
attacker's, and that of somebody whose data attackers are after; its requests are not counted. The honest streams ask
for greedy answers, each recorded alone before; a stream begins anew when its answer ends. After --warm seconds of
attacks alone (modules that are imported late, caches and the allocator grow once) they run for --calm seconds by
themselves, then for --seconds beside benchmarks/hostile_attacks.py and tests/server/fuzz.py (processes of their own,
at the lowest priority and with a bounded rate, since they share the processor with the server), then for 20 s by
themselves again. One processor is left to HTTP and the attackers. A machine that others use at the same time measures
them. Exits 1 when one of these is broken:

- every honest answer comes, ends as it should and has the recorded text;
- the longest wait for a first piece, and the longest gap between two pieces of any answer, are at most 250 ms longer
  beside attacks than in the calm (greatest value of all answers against greatest value of all answers);
- no answer to an attack is a 5xx other than 503, no refusal takes over 10 s, and what each attack itself demands;
- memory of all processes, --settle seconds after the attacks, is at most --max-growth MiB over what it was before, and
  in a run of five minutes or more no process that stays grows by more than --max-slope MiB a minute over the last two
  thirds of it;
- the server is alive, holds no request and no block, logs no stack and no line that a client made up, gives its
  children no key, and leaves nothing behind when it ends.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO
from urllib.request import urlopen

import aiohttp
import hostile_attacks
from soak import Case, Memory, cases, fill_cache, fold, free_port, processes, wait_for

ROOT = Path(__file__).resolve().parents[1]
HONEST, ATTACKER, VICTIM = "honest-key", "attacker-key", "victim-key"
CANARY = "a-key-that-no-child-may-see"
SERVE = "import sys; from quire.cli.main import main; sys.exit(main(sys.argv[1:]))"
STALL_S = 0.25
PATIENCE_S = 120.0  # of an honest client
AFTERWARDS_S = 20.0


@dataclass
class Phase:
    """What became of honest streams."""

    right: int = 0
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    first: list[float] = field(default_factory=list)  # per answer: seconds to its first piece
    gap: list[float] = field(default_factory=list)  # per answer: its longest silence between two pieces
    gap_at: list[float] = field(default_factory=list)  # when that ended, in seconds of the phase


@dataclass(frozen=True)
class Promise:
    words: str
    found: str
    held: bool


# ---- honest streams ---------------------------------------------------------------------------------------------


async def ask(session: aiohttp.ClientSession, url: str, case: Case) -> tuple[bytes, list[float]]:
    """The events of a stream, and when each piece came; the first time is that of asking."""
    parts: list[bytes] = []
    times = [time.perf_counter()]
    async with session.post(f"{url}/v1/completions", json=case.body()) as answer:
        if answer.status != 200:
            raise ConnectionError(f"status {answer.status}: {(await answer.text())[:200]}")
        async for part in answer.content.iter_any():
            times.append(time.perf_counter())
            parts.append(part)
    return b"".join(parts), times


async def run_case(session: aiohttp.ClientSession, url: str, case: Case, text: str, phase: Phase, began: float) -> None:
    try:
        events, times = await ask(session, url, case)
        found, reason, done = fold(events)
    except (aiohttp.ClientError, OSError, ValueError, TimeoutError) as failed:
        phase.lost.append(f"{type(failed).__name__}: {failed}")
        return
    if not done or reason != "length":
        phase.lost.append(f"ended with finish_reason {reason}, [DONE] {'came' if done else 'did not come'}")
        return
    if found != text:
        phase.wrong.append(f"{case.prompt[-40:]!r}: {found!r} is not {text!r}")
        return
    gaps = [(after - before, after) for before, after in itertools.pairwise(times[1:])]
    longest, ended = max(gaps, default=(0.0, times[-1]))
    phase.right += 1
    phase.first.append(times[1] - times[0])
    phase.gap.append(longest)
    phase.gap_at.append(ended - began)


async def stream_for(
    seconds: float, session: aiohttp.ClientSession, url: str, asked: list[Case], texts: list[str], streams: int
) -> Phase:
    """`streams` at a time; they do not begin all at once."""
    phase, began = Phase(), time.perf_counter()

    async def client(number: int) -> None:
        await asyncio.sleep(number * 0.1)
        turn = number
        while time.perf_counter() - began < seconds:
            index = turn % len(asked)
            await run_case(session, url, asked[index], texts[index], phase, began)
            turn += streams + 1

    await asyncio.gather(*(client(number) for number in range(streams)))
    return phase


# ---- those who attack -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def attackers(args: argparse.Namespace, url: str, folder: Path, seconds: float) -> Any:
    """Attacks and fuzzers as processes of their own. Gives name -> process; what they print goes to files."""
    commands = {
        "attacks": ["benchmarks/hostile_attacks.py", "--url", url, "--key", ATTACKER, "--victim-key", VICTIM,
                    "--sockets", str(folder / "tmp"), "--seconds", str(seconds),
                    *(["--only", *args.only] if args.only else [])],
        "fuzz": ["-m", "tests.server.fuzz", "--url", url, "--api-key", ATTACKER, "--seconds", str(seconds),
                 "--pause", "0.5"],
    }  # fmt: skip
    if args.only:
        del commands["fuzz"]
    running: dict[str, subprocess.Popen[bytes]] = {}
    with contextlib.ExitStack() as files:
        for name, command in commands.items():
            told = files.enter_context(open(folder / f"{name}.out", "wb"))
            words = files.enter_context(open(folder / f"{name}.err", "wb"))
            running[name] = subprocess.Popen(
                ["nice", "-n", "19", sys.executable, *command], cwd=ROOT, stdout=told, stderr=words,
                env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
            )  # fmt: skip
        try:
            yield running
        finally:
            for process in running.values():
                if process.poll() is None:
                    process.terminate()
                process.wait(30)


async def attacked(
    args: argparse.Namespace,
    url: str,
    folder: Path,
    session: aiohttp.ClientSession,
    asked: list[Case],
    texts: list[str],
) -> tuple[Phase, dict[str, int]]:
    with attackers(args, url, folder, args.seconds) as running:
        phase = await stream_for(args.seconds, session, url, asked, texts, args.streams)
        await finished(running, PATIENCE_S + 60)
        codes = {name: -1 if (code := process.poll()) is None else code for name, process in running.items()}
    return phase, codes


async def finished(running: dict[str, subprocess.Popen[bytes]], seconds: float) -> None:
    end = time.monotonic() + seconds
    while any(process.poll() is None for process in running.values()) and time.monotonic() < end:
        await asyncio.sleep(0.5)


# ---- the server -------------------------------------------------------------------------------------------------


def start(args: argparse.Namespace, folder: Path, log: TextIO) -> tuple[subprocess.Popen[bytes], str]:
    port = free_port()
    (folder / "tmp").mkdir()
    command = [sys.executable, "-c", SERVE, "serve", "--host", "127.0.0.1", "--port", str(port),
               "--max-model-len", "2048", "--api-key", HONEST, ATTACKER, VICTIM, "--enable-prompt-tokens-details",
               "--trust-request-chat-template", "--open-metrics", "--disable-uvicorn-access-log"]  # fmt: skip
    threads = max(1, len(os.sched_getaffinity(0)) - 1)
    environment = os.environ | {
        "QUIRE_CPU_KVCACHE_SPACE": str(args.kv_gib), "OMP_NUM_THREADS": str(threads),
        "QUIRE_ENABLE_RESPONSES_API_STORE": "1", "QUIRE_API_KEY": CANARY, "TMPDIR": str(folder / "tmp"),
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }  # fmt: skip
    server = subprocess.Popen(command, env=environment, cwd=ROOT, stdout=log, stderr=log)
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 300
    while not is_alive(url):
        if server.poll() is not None or time.monotonic() > deadline:
            server.kill()
            sys.exit("the server did not start:\n" + (folder / "server.log").read_text()[-2000:])
        time.sleep(0.1)
    return server, url


def is_alive(url: str) -> bool:
    try:
        with urlopen(f"{url}/health", timeout=10) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def memory(root: int) -> dict[str, float]:
    """MiB of each process that lives long: main, engine, api. Children that compile come and go."""
    watch = Memory(root, 1.0)
    watch.read()
    return {name: rows[-1][1] for name, rows in watch.samples.items()}


async def watch_children(root: int, leaks: set[str]) -> None:
    """Every second: does a process below the server have the key in its environment? The API's own may."""
    while True:
        for pid in processes(root):
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
                is_child = pid != root and "server.host" not in command
                if is_child and CANARY.encode() in Path(f"/proc/{pid}/environ").read_bytes():
                    leaks.add(command[:120])
        await asyncio.sleep(1.0)


# ---- the run ----------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """All that was seen."""

    calm: Phase = field(default_factory=Phase)
    attacked: Phase = field(default_factory=Phase)
    afterwards: Phase = field(default_factory=Phase)
    before: dict[str, float] = field(default_factory=dict)
    after: dict[str, float] = field(default_factory=dict)
    slopes: dict[str, dict[str, float]] = field(default_factory=dict)
    codes: dict[str, int] = field(default_factory=dict)
    leaks: set[str] = field(default_factory=set)
    alive: bool = False
    rows_back: float = float("inf")
    blocks_back: float = float("inf")


async def drive(args: argparse.Namespace, server: subprocess.Popen[bytes], url: str, folder: Path) -> Run:
    run, asked = Run(), cases(args.streams, args.max_tokens)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=60, sock_read=PATIENCE_S)
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=timeout, headers={"Authorization": f"Bearer {HONEST}"},
    ) as session:  # fmt: skip
        watcher = asyncio.create_task(watch_children(server.pid, run.leaks))
        texts = [fold((await ask(session, url, case))[0])[0] for case in asked]  # alone: nothing else runs
        say(f"{len(asked)} answers recorded")
        await fill_cache(session, url)
        cold = memory(server.pid)
        with attackers(args, url, folder, args.warm) as running:
            await finished(running, args.warm + PATIENCE_S)
        await asyncio.sleep(args.settle)
        grown = sum(memory(server.pid).values()) - sum(cold.values())
        say(f"{args.warm:.0f} s of attacks alone: {grown:+.0f} MiB")
        await stream_for(10, session, url, asked, texts, args.streams)
        run.calm = await stream_for(args.calm, session, url, asked, texts, args.streams)
        say(f"calm: {run.calm.right} answers; attacks begin")
        await asyncio.sleep(3)
        run.before = memory(server.pid)
        watch = Memory(server.pid, 5.0)
        watch.start()
        run.attacked, run.codes = await attacked(args, url, folder, session, asked, texts)
        watch.stop()
        run.slopes = watch.slopes()
        say(f"attacked: {run.attacked.right} answers; settling")
        await asyncio.sleep(args.settle)
        run.after = memory(server.pid)
        run.alive = server.poll() is None and is_alive(url)
        if run.alive:
            run.afterwards = await stream_for(AFTERWARDS_S, session, url, asked, texts, args.streams)
        watcher.cancel()
    if run.alive:
        run.rows_back = wait_for(url, "vllm:num_requests_running", lambda n: n == 0, 30)
        run.blocks_back = wait_for(url, "vllm:kv_cache_usage_perc", lambda n: n == 0, 30)
    return run


def say(words: str) -> None:
    print(words, flush=True)


def judge(
    args: argparse.Namespace, run: Run, attacks: dict[str, Any], log: str, fuzz: str, left: list[str]
) -> list[Promise]:
    phases = (run.calm, run.attacked, run.afterwards)
    lost = [words for phase in phases for words in phase.lost]
    wrong = [words for phase in phases for words in phase.wrong]
    num_right = sum(phase.right for phase in phases)
    broken = [f"{name}: {words}" for name, row in attacks.items() for words in row["broken"]]
    idle = [name for name, row in attacks.items() if row["rounds"] == 0]
    grown = {name: run.after.get(name, 0.0) - mib for name, mib in run.before.items() if name in run.after}
    steepest = max((run.slopes[name]["slope_per_minute"] for name in grown if name in run.slopes), default=0.0)
    forged = sum(line.lstrip().startswith(hostile_attacks.FORGED) for line in log.splitlines())
    promises = [
        Promise("no honest answer lost", f"{len(lost)} of {num_right + len(lost) + len(wrong)}", not lost),
        Promise("no honest answer wrong", f"{len(wrong)}", not wrong),
        _no_stall("first piece", run.calm.first, run.attacked.first),
        _no_stall("gap between pieces", run.calm.gap, run.attacked.gap),
        Promise("attacks: no 5xx but 503, no slow refusal, what each demands", f"{len(broken)} broken", not broken),
        Promise("every attack was made", f"{len(attacks)} kinds; not: {idle}", bool(attacks) and not idle),
        Promise("memory afterwards", f"{sum(grown.values()):+.0f} MiB (most {args.max_growth:.0f})",
                bool(grown) and sum(grown.values()) <= args.max_growth),
        Promise("memory meanwhile", f"{steepest:+.2f} MiB a minute (most {args.max_slope:.0f}, in runs of 300 s)",
                steepest <= args.max_slope or args.seconds < 300),
        Promise("the server is alive", "yes" if run.alive else "no", run.alive),
        Promise("nothing is held", f"requests {run.rows_back:.1f} s, blocks {run.blocks_back:.1f} s",
                max(run.rows_back, run.blocks_back) < 30),
        Promise("no stack in the log", f"{log.count('Traceback')}", "Traceback" not in log),
        Promise("no line of the log made up", f"{forged}", not forged),
        Promise("no child has a key", ", ".join(run.leaks) or "none", not run.leaks),
        Promise("nothing left behind", ", ".join(left) or "nothing", not left),
    ]  # fmt: skip
    if "fuzz" in run.codes:
        words = fuzz.strip().splitlines()[0] if fuzz.strip() else "nothing was sent"
        promises.append(Promise("generated requests", words, run.codes["fuzz"] == 0))
    return promises


def _no_stall(what: str, calm: list[float], attacked: list[float]) -> Promise:
    most, now = max(calm, default=0.0), max(attacked, default=float("inf"))
    found = f"{most * 1000:.0f} -> {now * 1000:.0f} ms ({(now - most) * 1000:+.0f})"
    return Promise(f"{what}: at most {STALL_S * 1000:.0f} ms longer than in the calm", found, now - most <= STALL_S)


def show(run: Run, attacks: dict[str, Any], promises: list[Promise]) -> None:
    say(f"\n{'attack':<64}{'rounds':>7}{'slowest refusal':>17}  statuses (0: closed)")
    for row in attacks.values():
        statuses = " ".join(
            f"{status}×{count}" for status, count in sorted(row["statuses"].items(), key=lambda p: int(p[0]))
        )
        say(f"{row['subject'][:63]:<64}{row['rounds']:>7}{row['slowest_refusal']:>15.2f} s  {statuses}")
    say(f"\n{'honest streams':<16}{'answers':>8}{'first piece, ms':>28}{'longest gap, ms':>28}   (p50 / p99 / max)")
    for name, phase in (("calm", run.calm), ("attacked", run.attacked), ("afterwards", run.afterwards)):
        say(f"{name:<16}{phase.right:>8}{_cuts(phase.first):>28}{_cuts(phase.gap):>28}")
    for name, mib in run.before.items():
        slope = run.slopes.get(name, {}).get("slope_per_minute", 0.0)
        after = run.after.get(name, 0.0)
        say(f"memory {name}: {mib:.0f} -> {after:.0f} MiB, {slope:+.2f} MiB a minute in the last two thirds")
    say("")
    for promise in promises:
        say(f"{'held  ' if promise.held else 'BROKEN'}  {promise.words}: {promise.found}")
    for words in [*run.attacked.lost[:5], *run.attacked.wrong[:5]]:
        say(f"        {words}")
    for name, row in attacks.items():
        for words in row["broken"]:
            say(f"        {name}: {words}")


def _cuts(values: list[float]) -> str:
    if len(values) < 2:
        return "-"
    cuts = statistics.quantiles(values, n=100)
    return f"{cuts[49] * 1000:.0f} / {cuts[98] * 1000:.0f} / {max(values) * 1000:.0f}"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0, help="how long attacks go on")
    parser.add_argument("--calm", type=float, default=120.0, help="how long streams run without them before")
    parser.add_argument("--warm", type=float, default=60.0, help="how long attacks go on at first, without streams")
    parser.add_argument(
        "--settle", type=float, default=30.0, help="how long nothing is sent before memory is read again"
    )
    parser.add_argument("--streams", type=int, default=50, help="honest streams at once")
    parser.add_argument(
        "--max-tokens", type=int, default=24, help="most tokens of an honest answer; each asks for half to all"
    )
    parser.add_argument("--max-growth", type=float, default=128.0, help="MiB that all processes together may grow by")
    parser.add_argument("--max-slope", type=float, default=4.0, help="MiB a minute that a process may grow by")
    parser.add_argument("--kv-gib", type=float, default=0.5, help="size of the KV cache, which is filled once at first")
    parser.add_argument("--only", nargs="*", default=[], help="parts of names of attacks; the fuzzer then stays out")
    parser.add_argument("--into", help="file for everything, as JSON")
    parser.add_argument("--log", help="file for the server's log")
    parser.add_argument("--list", action="store_true", help="print the attacks and end")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    hostile_attacks.define_small()
    if args.list:
        for subject, _, _ in hostile_attacks.ATTACKS.values():
            say(subject)
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the server below goes with us
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with open(folder / "server.log", "w") as log:
            server, url = start(args, folder, log)
            try:
                run = asyncio.run(drive(args, server, url, folder))
            finally:
                server.send_signal(signal.SIGTERM)
                try:
                    server.wait(60)
                except subprocess.TimeoutExpired:
                    server.kill()
        left = [path.name for path in (folder / "tmp").iterdir()]
        written = (folder / "server.log").read_text(errors="replace")
        if args.log:
            Path(args.log).write_text(written)
        told = (folder / "attacks.out").read_text()
        attacks = json.loads(told) if told else {}
        fuzz_file = folder / "fuzz.out"
        promises = judge(args, run, attacks, written, fuzz_file.read_text() if fuzz_file.exists() else "", left)
        if not attacks:
            say((folder / "attacks.err").read_text()[-2000:])
        if run.codes.get("fuzz"):
            say((folder / "fuzz.err").read_text()[-2000:])
    show(run, attacks, promises)
    if args.into:
        found = {
            "promises": [asdict(one) for one in promises],
            "attacks": attacks,
            **asdict(run),
            "leaks": sorted(run.leaks),
        }
        Path(args.into).write_text(json.dumps(found, indent=1))
    return int(not all(promise.held for promise in promises))


if __name__ == "__main__":
    sys.exit(main())
