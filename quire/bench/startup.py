"""`quire bench startup`: where every second goes between starting a process and its first token.

In: flags and engine options. Out: a table of phases, cold and warm, and JSON where asked. Every start is a fresh
process (bench/startup_child.py). Cold starts get an empty folder for everything Quire and Triton keep, so that kernels
are compiled again; the user's own caches are left alone. Weights may be dropped from the page cache as well.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from quire.base.clock import now
from quire.base.env import child_environment
from quire.bench.latency import PERCENTILES
from quire.bench.report import percentile
from quire.bench.result_file import check_place, write_json
from quire.config import EngineArgs, FlexibleArgumentParser
from quire.schema.errors import ConfigError, InputError, QuireError

CHILD = "quire.bench.startup_child"
_WEIGHTS = (".safetensors", ".gguf", ".bin", ".pt", ".pth")
_TAIL = 12  # lines of a failed child


class Start(NamedTuple):
    phases: list[tuple[str, float, str]]  # name, seconds, the phase around it
    total: float
    ready: float
    weights: str


def main(arguments: Sequence[str], program: str) -> int:
    args, engine_options = parse(arguments, program)
    starts: dict[str, list[Start]] = {}
    with tempfile.TemporaryDirectory(prefix="quire-startup-") as folder:
        run = Runner(engine_options, Path(folder))
        if args.num_iters_cold:
            starts["cold"] = [run.cold(evict=args.evict_weights) for _ in numbered("cold", args.num_iters_cold)]
        if args.num_iters_warm:
            for _ in numbered("warm-up", args.num_iters_warmup):
                run.warm()
            starts["warm"] = [run.warm() for _ in numbered("warm", args.num_iters_warm)]
    print("\n".join(table(starts)))
    write_json(args.output_json, result(starts))
    return 0


def parse(arguments: Sequence[str], program: str) -> tuple[argparse.Namespace, list[str]]:
    """Our flags, and the rest for the engine, which is checked here and passed on as it was written."""
    parser = FlexibleArgumentParser(prog=program, description="Time a start, phase by phase.")
    add = parser.add_argument
    add("--num-iters-cold", type=int, default=3, help="starts with empty kernel caches (default: 3)")
    add("--num-iters-warmup", type=int, default=1, help="starts before the warm ones (default: 1)")
    add("--num-iters-warm", type=int, default=3, help="starts with caches as they are (default: 3)")
    add("--cold", action="store_true", help="cold starts only")
    add("--warm", action="store_true", help="warm starts only")
    add("--evict-weights", action="store_true", help="before a cold start, drop the weight files from the page cache")
    add("--output-json", default=None, help="file for the result")
    EngineArgs.add_cli_args(parser)
    args = parser.parse_args(arguments)
    for name in ("num_iters_cold", "num_iters_warmup", "num_iters_warm"):
        if vars(args)[name] < 0:
            raise InputError(f"--{name.replace('_', '-')} must be at least 0, got {vars(args)[name]}", param=name)
    if args.cold and args.warm:
        raise ConfigError("--cold and --warm exclude each other; without either, both are run")
    if args.cold:
        args.num_iters_warm = 0
    if args.warm:
        args.num_iters_cold = 0
    if not args.num_iters_cold and not args.num_iters_warm:
        raise InputError("nothing to do: both numbers of starts are 0")
    check_place("--output-json", args.output_json)
    EngineArgs.from_cli_args(args).create_engine_config()  # what is wrong is said once, here
    return args, _without_ours(arguments)


def _without_ours(arguments: Sequence[str]) -> list[str]:
    ours = FlexibleArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("--num-iters-cold", "--num-iters-warmup", "--num-iters-warm", "--output-json"):
        ours.add_argument(name)
    for name in ("--cold", "--warm", "--evict-weights"):
        ours.add_argument(name, action="store_true")
    # argparse's own way of leaving the rest: ours would take --config for itself
    return argparse.ArgumentParser.parse_known_args(ours, [_dashed(a) for a in arguments])[1]


def _dashed(argument: str) -> str:
    name, equals, value = argument.partition("=")
    return f"{name.replace('_', '-')}{equals}{value}" if name.startswith("--num_iters") else argument


class Runner:
    """Starts children and reads what they report."""

    def __init__(self, engine_options: list[str], folder: Path) -> None:
        self._options, self._folder = engine_options, folder
        self._count = 0
        self._weights = ""

    def warm(self) -> Start:
        return self._run({})

    def cold(self, *, evict: bool) -> Start:
        if evict:
            for path in weight_files(self._weights or self._locate()):
                evict_file(path)
        with tempfile.TemporaryDirectory(dir=self._folder) as empty:
            caches = {"QUIRE_CACHE_ROOT": "quire", "TRITON_CACHE_DIR": "triton", "CUDA_CACHE_PATH": "cuda"}
            return self._run({name: os.path.join(empty, subfolder) for name, subfolder in caches.items()})

    def _locate(self) -> str:
        parser = FlexibleArgumentParser()
        EngineArgs.add_cli_args(parser)
        return EngineArgs.from_cli_args(parser.parse_args(self._options)).create_engine_config().model_config.path

    def _run(self, changes: dict[str, str]) -> Start:
        self._count += 1
        report = self._folder / f"start-{self._count}.json"
        environment = child_environment(changes)
        command = [sys.executable, "-m", CHILD, str(report), repr(now()), *self._options]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode or not report.exists():
            tail = "\n".join(done.stdout.strip().splitlines()[-_TAIL:])
            raise QuireError(f"a start failed with exit status {done.returncode}:\n{tail}")
        facts = json.loads(report.read_text())
        self._weights = facts["weights"]
        phases = [(str(name), float(seconds), str(around)) for name, seconds, around in facts["phases"]]
        return Start(phases, facts["total"], facts["ready"], facts["weights"])


def weight_files(path: str) -> list[Path]:
    location = Path(path)
    return [location] if location.is_file() else [file for file in location.iterdir() if file.suffix in _WEIGHTS]


def evict_file(path: Path) -> None:
    """Ask the system to forget what it holds of a file; unwritten data is not touched."""
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def numbered(label: str, count: int) -> Iterator[int]:
    for index in range(count):
        print(f"{label} start {index + 1} of {count} …", file=sys.stderr, flush=True)
        yield index


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def phase_names(starts: Sequence[Start]) -> list[tuple[str, str]]:
    """(name, phase around it), each outer phase before its parts."""
    names = list(dict.fromkeys((name, around) for start in starts for name, _, around in start.phases))
    outer = [pair for pair in names if not pair[1]]
    return [pair for one in outer for pair in (one, *(inner for inner in names if inner[1] == one[0]))]


def seconds_of(start: Start, name: str, around: str) -> float:
    return sum(seconds for phase, seconds, outside in start.phases if (phase, outside) == (name, around))


def table(starts: dict[str, list[Start]]) -> list[str]:
    """Phases down, cold and warm across, average seconds."""
    kinds = list(starts)
    lines = [f"{'phase, average seconds':<28}" + "".join(f"{f'{kind} ({len(starts[kind])})':>12}" for kind in kinds)]
    every = [start for group in starts.values() for start in group]
    for name, around in phase_names(every):
        shown = f"  {name}" if around else name
        values = (mean([seconds_of(start, name, around) for start in starts[kind]]) for kind in kinds)
        lines.append(f"{shown:<28}" + "".join(f"{value:>12.3f}" for value in values))
    rows: list[tuple[str, Callable[[list[float]], float], Callable[[Start], float]]] = [
        ("ready", mean, lambda start: start.ready),
        ("to the first token", mean, lambda start: start.total),
        ("  least", min, lambda start: start.total),
        ("  most", max, lambda start: start.total),
    ]
    lines.append("-" * len(lines[0]))
    for label, fold, value in rows:
        lines.append(f"{label:<28}" + "".join(f"{fold([value(s) for s in starts[kind]]):>12.3f}" for kind in kinds))
    return lines


def result(starts: dict[str, list[Start]]) -> dict[str, Any]:
    summary: dict[str, Any] = {}
    for kind, runs in starts.items():
        totals = [start.ready for start in runs]
        summary |= {
            f"avg_{kind}_startup_time": mean(totals),
            f"{kind}_startup_times": totals,
            f"{kind}_startup_percentiles": {str(p): percentile(sorted(totals), p) for p in PERCENTILES},
            f"avg_{kind}_first_token_time": mean([start.total for start in runs]),
            f"{kind}_first_token_times": [start.total for start in runs],
            f"{kind}_phases": {
                f"{around}/{name}" if around else name: mean([seconds_of(start, name, around) for start in runs])
                for name, around in phase_names(runs)
            },
        }
    return summary
