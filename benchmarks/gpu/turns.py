"""Engines that are alive at once and take turns with the same requests: on one GPU, figures that may be divided.

    python benchmarks/gpu/turns.py SPECS.json [--turns 2] [--starts 0]

SPECS: a list of engines, each an object with

    name        what it is called in the results
    model       a folder of benchmarks/gpu/models.py
    works       workloads of workloads.py, a list
    options     keywords of LLM, laid over the defaults there
    package     "quire" or "vllm"                                   (default: quire)
    path        put first on PYTHONPATH, where a package lies       (default: as it is)
    env         environment variables                               (default: none)

Each engine is a process, and all are started at once; memory must be divided by their options. Then every workload
runs once uncounted and `--turns` times counted, in alternating order of the engines that have it. Prints output tokens
a second (of all tokens, for `prefill`) and their ratio to the first engine with that workload. With `--starts`, every
engine is first started alone so many times, in turns; one more start before is not counted, since it reads libraries
from disk.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

Spec = dict[str, Any]


def serve(spec: Spec) -> None:
    """The child: says when it is ready, then runs the workload of every line that comes in."""
    sys.path.insert(0, str(Path(__file__).parent))
    from workloads import DEFAULTS, VOCABULARY, WORKLOADS, run

    answers = os.fdopen(os.dup(1), "w")  # whatever else is printed goes to stderr
    os.dup2(2, 1)
    package = __import__(spec.get("package", "quire"))
    llm = package.LLM(model=spec["model"], **DEFAULTS | spec.get("options", {}))
    print("ready", file=answers, flush=True)
    for turn, line in enumerate(sys.stdin):
        rng = random.Random(turn)

        def ids(count: int, rng: random.Random = rng) -> list[int]:
            return [rng.randrange(*VOCABULARY) for _ in range(count)]

        work = line.strip()
        found = [run(llm, package.SamplingParams, requests) for requests in WORKLOADS[work](ids, rng)]
        kind = "tokens_per_s" if work == "prefill" else "output_tokens_per_s"
        print(json.dumps(found[-1][kind]), file=answers, flush=True)


class EngineEndedError(Exception):
    pass


class Engine:
    def __init__(self, spec: Spec) -> None:
        self.name, self._began = spec["name"], time.perf_counter()
        environment = os.environ | spec.get("env", {})
        if "path" in spec:
            environment["PYTHONPATH"] = spec["path"]
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--serve", json.dumps(spec)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip

    def wait(self) -> float:
        """Seconds until it was ready, which it may be long since."""
        self._answer()
        return time.perf_counter() - self._began

    def turn(self, work: str) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(work + "\n")
        self._process.stdin.flush()
        return float(self._answer())

    def _answer(self) -> str:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise EngineEndedError(f"{self.name} ended with status {self._process.wait()}")
        return line

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def time_starts(specs: list[Spec], count: int) -> None:
    def once(spec: Spec) -> float:
        engine = Engine(spec)
        seconds = engine.wait()
        engine.close()
        return seconds

    once(specs[0])
    ready: dict[str, list[float]] = {spec["name"]: [] for spec in specs}
    for _ in range(count):
        for spec in specs:
            ready[spec["name"]].append(once(spec))
    first = median(next(iter(ready.values())))
    for name, seconds in ready.items():
        listed = ", ".join(f"{second:.2f}" for second in seconds)
        print(f"start {name}: {listed} s ({median(seconds) - first:+.2f} s)", flush=True)


def has_started(engine: Engine) -> bool:
    """One that cannot is left out, so that a run of many is not lost."""
    try:
        print(f"{engine.name}: ready after {engine.wait():.1f} s", flush=True)
    except EngineEndedError as ended:
        print(ended, flush=True)
        return False
    return True


def take_turns(engines: list[Engine], work: str, count: int) -> None:
    speeds: dict[str, list[float]] = {engine.name: [] for engine in engines}
    for turn in range(count + 1):
        for engine in engines[:: -1 if turn % 2 else 1]:
            speed = engine.turn(work)
            if turn:
                speeds[engine.name].append(speed)
    first = next(iter(speeds.values()), [])
    for name, found in speeds.items():
        ratios = [one / other for one, other in zip(found, first, strict=True)]
        print(
            f"{work} {name}: {', '.join(f'{speed:,.0f}' for speed in found)} tokens/s; of {engines[0].name}: "
            f"{', '.join(f'{ratio:.3f}' for ratio in ratios)}, median {median(ratios):.3f}", flush=True,
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("specs", nargs="?", type=Path)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--starts", type=int, default=0)
    parser.add_argument("--serve", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve(args.serve)
    if args.specs is None:
        parser.error("a file with SPECS is needed")
    specs: list[Spec] = json.loads(args.specs.read_text())
    if args.starts:
        time_starts(specs, args.starts)
    engines = [Engine(spec) for spec in specs]
    started = {engine.name for engine in engines if has_started(engine)}
    for work in dict.fromkeys(work for spec in specs for work in spec["works"]):
        having = [engine for engine, spec in zip(engines, specs, strict=True) if work in spec["works"]]
        having = [engine for engine in having if engine.name in started]
        take_turns(having, work, args.turns)
    for engine in engines:
        engine.close()
    return None


if __name__ == "__main__":
    main()
