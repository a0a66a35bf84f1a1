"""Start-up of this checkout beside another one's, alternating, so that a machine's drift hits both alike.

    python benchmarks/startup_beside.py OTHER [--repeats 9] [--no-bytecode]

OTHER is a checkout with its kernels built. Two starts of the embedded model: `LLM()` in one process, and `quire serve`
until /health answers 200. Of each the least and the median of wall time and of processor time, which is summed over all
processes of the start and changes less where others use the machine. Every process begins in an empty folder, with a
cache and bytecode of its own; --no-bytecode compiles every module of Quire at each start, as PYTHONDONTWRITEBYTECODE
does in a checkout that never ran without it.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parents[1]
_TICKS = os.sysconf("SC_CLK_TCK")
_OFFLINE = """
import resource, sys
from quire import LLM
llm = LLM()
times = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
print("ready", sum(one.ru_utime + one.ru_stime for one in times), sum(name.startswith("quire") for name in sys.modules))
sys.stdout.flush()
"""
_SERVE = "import sys; from quire.cli.main import main; sys.exit(main(sys.argv[1:]))"


class Start(NamedTuple):
    wall: float
    processor: float  # seconds
    modules: int  # of Quire; 0: not counted


class Tree(NamedTuple):
    root: Path
    scratch: Path
    bytecode: bool

    def environment(self) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "QUIRE_"))}
        own = {"PYTHONPATH": str(self.root), "QUIRE_CACHE_ROOT": str(self.scratch / "cache")}
        written = {"PYTHONPYCACHEPREFIX": str(self.scratch / "bytecode")}
        return kept | own | (written if self.bytecode else {"PYTHONDONTWRITEBYTECODE": "1"})

    def begin(self, code: str, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", code, *arguments], env=self.environment(), cwd=self.scratch, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip


def offline(tree: Tree) -> Start:
    began = time.perf_counter()
    with tree.begin(_OFFLINE) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("ready "):
                _, processor, modules = line.split()
                wall = time.perf_counter() - began
                process.stdout.read()
                return Start(wall, float(processor), int(modules))
    sys.exit(f"{tree.root}: LLM() failed with exit code {process.returncode}")


def served(tree: Tree) -> Start:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    began = time.perf_counter()
    with tree.begin(_SERVE, "serve", "--host", "127.0.0.1", "--port", str(port)) as process:
        while not is_healthy(port):
            if process.poll() is not None:
                sys.exit(f"{tree.root}: quire serve left with exit code {process.returncode}")
            time.sleep(0.01)
        start = Start(time.perf_counter() - began, processor_seconds(process.pid), 0)
        process.send_signal(signal.SIGINT)
    return start


def is_healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def processor_seconds(root: int) -> float:
    """Of a process and all its descendants, those included that have ended and were waited for."""
    children: dict[int, list[int]] = {}
    used: dict[int, float] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
            except OSError:
                continue
            children.setdefault(int(fields[1]), []).append(int(folder.name))
            used[int(folder.name)] = sum(map(int, fields[11:15])) / _TICKS
    total, rest = 0.0, [root]
    while rest:
        one = rest.pop()
        total += used.get(one, 0.0)
        rest += children.get(one, [])
    return total


def compare(name: str, start: Callable[[Tree], Start], trees: dict[str, Tree], repeats: int) -> None:
    taken: dict[str, list[Start]] = {label: [] for label in trees}
    for tree in trees.values():
        start(tree)  # once unmeasured: bytecode written, weights packed, files in the page cache
    for turn in range(repeats):
        for label in trees if turn % 2 == 0 else reversed(trees):
            taken[label].append(start(trees[label]))
    for label, starts in taken.items():
        walls, processors = [one.wall for one in starts], [one.processor for one in starts]
        modules = f"{starts[0].modules:>9}" if starts[0].modules else ""
        print(
            f"{name:<9}{label:<7}{min(walls):>9.3f}{statistics.median(walls):>9.3f}"
            f"{min(processors):>12.3f}{statistics.median(processors):>9.3f}{modules}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("other", type=Path, help="another checkout, with its kernels built")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--no-bytecode", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        trees = {}
        for label, root in (("other", args.other.resolve()), ("this", HERE)):
            scratch = Path(folder) / label
            scratch.mkdir()
            trees[label] = Tree(root, scratch, not args.no_bytecode)
        print(f"{'':<16}{'wall min':>9}{'median':>9}{'cpu s min':>12}{'median':>9}{'modules':>9}")
        compare("LLM()", offline, trees, args.repeats)
        compare("serve", served, trees, args.repeats)


if __name__ == "__main__":
    main()
