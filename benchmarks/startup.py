"""Times what a user waits for before the first token, each beside the floor it stands on.

    python benchmarks/startup.py [--repeats 7] [--model MODEL]

Every figure is the median of `repeats` fresh processes, alternating between the rows so that a machine's drift hits all
of them alike; beside each is its processor time, which others on the machine change less. The floor of the last rows is
a process that imports torch and reads the same weight files. The very last row maps the packed weights that an earlier
start kept (QUIRE_CPU_PACKED_CACHE), the one before packs them; the phases of one such start follow.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

from quire.checkpoint import embedded

QUIRE = str(Path(sys.executable).parent / "quire")
PACKING, MAPPING = "quire complete, packing", "quire complete, one token"
READ = """
import sys, torch
for path in sys.argv[1:]:
    with open(path, "rb") as file:
        while file.read(1 << 24):
            pass
"""


def weight_files(model: str | None) -> list[str]:
    if model is None:
        return [embedded.find()]
    path = Path(model)
    return [str(path)] if path.is_file() else [str(p) for p in path.iterdir() if p.suffix in (".safetensors", ".bin")]


def rows(model: str | None) -> dict[str, list[str]]:
    python = sys.executable
    named = [model] if model else []
    complete = [QUIRE, "complete", "--local", *named, "-q", "The sky is", "--max-tokens", "1"]
    return {
        "python -c pass": [python, "-c", "pass"],
        "import quire": [python, "-c", "import quire"],
        "quire --help": [QUIRE, "--help"],
        "import torch + read weights": [python, "-c", READ, *weight_files(model)],
        PACKING: ["env", "QUIRE_CPU_PACKED_CACHE=0", *complete],
        MAPPING: complete,
    }


def run(command: list[str]) -> tuple[float, float, str]:
    """Seconds, of these processor time, and what it said."""
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        sys.exit(f"{' '.join(command[:4])} … failed:\n{done.stderr}")
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done.stderr


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--model", default=None, help="folder or GGUF file; the embedded model if not given")
    args = parser.parse_args()
    table = rows(args.model)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in table}
    for command in table.values():
        run(command)  # once unmeasured: files in the page cache, bytecode written, weights packed
    for _ in range(args.repeats):
        for name, command in table.items():
            times[name].append(run(command)[:2])
    medians = {name: statistics.median(wall for wall, _ in found) for name, found in times.items()}
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, {args.repeats} runs each")
    print(f"{'':<30}{'median s':>9}{'min':>8}{'max':>8}{'processor s':>13}")
    for name, found in times.items():
        walls = [wall for wall, _ in found]
        used = statistics.median(used for _, used in found)
        print(f"{name:<30}{medians[name]:>9.3f}{min(walls):>8.3f}{max(walls):>8.3f}{used:>13.3f}")
    floor = medians["python -c pass"]
    print(f"\nimport quire above python:      {medians['import quire'] - floor:.3f} s")
    print(f"quire --help above python:      {medians['quire --help'] - floor:.3f} s")
    print(f"quire complete above its floor: {medians[MAPPING] - medians['import torch + read weights']:.3f} s")
    _, _, said = run(["env", "QUIRE_LOGGING_LEVEL=INFO", *table[MAPPING]])
    for line in said.splitlines():
        if "Engine ready" in line or "Packed weights" in line:
            print(line.partition("] ")[2])


if __name__ == "__main__":
    main()
