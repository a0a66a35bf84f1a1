"""How far the log probability of every token is from that of the decoded model, asked alone and in a batch.

    python benchmarks/cpu/logprob_errors.py [--llama LLAMA_PYTHON] [--sets neon dotprod] [--dtype bfloat16] [--rows 1]

The text is quality.txt beside this file, in windows of 512 tokens with no token before the first. The embedded model is
run as it is stored (or in a dtype), so many tokens at a time as --rows says: 1 is what a stream asked alone goes
through, 512 a batch. What it says of each token is compared with torch alone in float32 on the same file. LLAMA_PYTHON
is the interpreter of an environment that holds `llama-cpp-python`; its numbers come from the same windows, each as one
batch.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

import numpy as np
from quality import HERE, Bench, Found

from quire.ops.cpu.native import kernels


def line(name: str, rows: str, found: Found, exact: Found) -> str:
    wrong = np.abs(found.logprobs - exact.logprobs)
    figures = (wrong.max(), np.quantile(wrong, 0.99), np.median(wrong), np.sqrt(np.mean(wrong**2)))
    return f"| {name} | {rows} | " + " | ".join(f"{figure:.4f}" for figure in figures) + f" | {np.sum(wrong > 0.15)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama", help="an interpreter that can import llama_cpp")
    parser.add_argument("--sets", nargs="*", default=[""], help="instruction sets; default: the one that Quire takes")
    parser.add_argument("--dtype", help="decode the model to it; default: as stored")
    parser.add_argument("--rows", nargs="*", type=int, default=[1, 512], help="tokens in a step")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    asked = parser.parse_args()
    library = kernels()
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(Path(scratch), asked.llama, asked.threads, (HERE / "quality.txt",))
        exact = bench.decoded("Q4_1")
        print(f"{exact.logprobs.size} tokens, absolute errors in nats")
        print("| | rows | largest | 99 % | median | rms | above 0.15 |\n|---|---|---|---|---|---|---|", flush=True)
        options = {"dtype": asked.dtype} if asked.dtype else {}
        for name in asked.sets:
            if name:
                os.environ["QUIRE_CPU_KERNELS"] = name
            shown = name or (library.qc_isa().decode() if library else "torch")
            for rows in asked.rows:
                found = bench.quire(f"{shown} {rows}", model=bench.file_of("Q4_1"), max_num_batched_tokens=rows,
                                    max_num_seqs=1, **options)  # fmt: skip
                print(line(shown, str(rows), found, exact), flush=True)
        if asked.llama:
            print(line("llama.cpp", "512", bench.llama_cpp("Q4_1"), exact), flush=True)


if __name__ == "__main__":
    main()
