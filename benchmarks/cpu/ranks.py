"""Strong scaling of tensor parallelism on CPUs: one model, 1, 2 and 4 ranks, each kept on processors of its own.

    python benchmarks/cpu/ranks.py --cpus 0-11 --ranks 1,2,4            # all processors divided among the ranks
    python benchmarks/cpu/ranks.py --cpus 0-3 --ranks 1,2,4 --each 1    # one processor for each rank
    python benchmarks/cpu/ranks.py --cpus 0-1 --ranks 1,2 --sums shared,gloo --rounds 2    # both ways to sum, in turns

A model of the shape of Llama 3.2 1B, random weights (load_format=dummy; --layers for fewer). Each number of ranks is an
engine of its own, one after another. Prints for each: tokens a second of one stream and of a batch, prompt tokens a
second, and these over those of the first; and the processor time of a token, of all of its processes together.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SHAPE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256,
    "max_position_embeddings": 8192, "rope_theta": 500000.0, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "tie_word_embeddings": True, "dtype": "bfloat16", "bos_token_id": 128000, "eos_token_id": 128001,
}  # fmt: skip
STREAM, BATCH, PROMPT = 48, 16, 512  # tokens of one stream; streams of a batch; tokens of a prompt


def processors(text: str) -> list[int]:
    """0-2,8 -> [0, 1, 2, 8]"""
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def measure(folder: str, ranks: int, dtype: str) -> dict[str, float]:
    """In a process of its own, whose environment says where ranks run."""
    from quire import LLM, SamplingParams  # after main() has decided where

    began = time.perf_counter()
    llm = LLM(
        folder, load_format="dummy", skip_tokenizer_init=True, device="cpu", dtype=dtype, max_model_len=1024,
        tensor_parallel_size=ranks, distributed_executor_backend="mp", max_num_seqs=BATCH, seed=0,
        enable_prefix_caching=False, kv_cache_memory_bytes=(256 << 20) // ranks,
    )  # fmt: skip
    start = time.perf_counter() - began
    drawn = random.Random(0)

    def cost(count: int, length: int, written: int) -> tuple[float, float]:
        """Seconds, and those of processors."""
        prompts = [{"prompt_token_ids": [drawn.randrange(10, 100_000) for _ in range(length)]} for _ in range(count)]
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=written, detokenize=False)
        before, worked = time.perf_counter(), processor_seconds(pids)
        llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - before, processor_seconds(pids) - worked

    pids = [os.getpid(), *children_of(os.getpid())]
    cost(1, 16, 4)  # the first steps of a process are slower
    found = {"start_s": start}
    for name, tokens, many, few in (
        ("stream", STREAM - 1, (1, 16, STREAM), (1, 16, 1)),
        ("batch", BATCH * 31, (BATCH, 16, 32), (BATCH, 16, 1)),
        ("prompt", 2 * PROMPT, (2, PROMPT, 1), None),
    ):
        wall, work = cost(*many)
        if few is not None:
            less = cost(*few)
            wall, work = wall - less[0], work - less[1]
        found |= {name: tokens / wall, f"{name}_ms": 1000 * work / tokens}
    llm.close()
    return found


def children_of(pid: int) -> list[int]:
    """Of this process, and theirs."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += [int(child), *children_of(int(child))]
    return found


def processor_seconds(pids: list[int]) -> float:
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def run(folder: str, ranks: int, dtype: str, cpus: list[int], sums: str) -> dict[str, float]:
    share = len(cpus) // ranks
    lists = [cpus[rank * share : (rank + 1) * share] for rank in range(ranks)]
    threads = {"QUIRE_CPU_NUM_THREADS": str(share), "OMP_NUM_THREADS": str(share)}
    bound = {"QUIRE_CPU_OMP_THREADS_BIND": "|".join(",".join(map(str, one)) for one in lists)}
    command = ["taskset", "-c", ",".join(map(str, cpus)), sys.executable, __file__, "--child", folder, "--dtype", dtype,
               "--ranks", str(ranks)]  # fmt: skip
    way = {"QUIRE_SHARED_SUMS": str(int(sums == "shared"))}
    done = subprocess.run(command, env=os.environ | threads | bound | way, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        sys.exit(f"{ranks} ranks ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return dict(json.loads(lines[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cpus", default=",".join(map(str, sorted(os.sched_getaffinity(0)))), help="as in 0-5,8")
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--each", type=int, default=0, help="processors of each rank; 0: all are divided among them")
    parser.add_argument("--sums", default="shared", help="shared, gloo, or both: how several ranks sum")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure(args.child, int(args.ranks), args.dtype)))
        return
    cpus, first = processors(args.cpus), dict[str, float]()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPE | {"num_hidden_layers": args.layers}))
        ways = [(ranks, sums) for ranks in map(int, args.ranks.split(",")) for sums in args.sums.split(",")]
        for ranks, sums in args.rounds * [way for way in ways if way[0] > 1 or way[1] == args.sums.split(",")[0]]:
            used = cpus[: ranks * args.each] if args.each else cpus
            found = run(folder, ranks, args.dtype, used, sums)
            first = first or found
            what = f"{ranks} ranks x {len(used) // ranks} processors{f', {sums} sums' if ranks > 1 else ''}"
            parts = [
                f"{one} {found[one]:.1f} ({found[one] / first[one]:.2f}; {found[f'{one}_ms']:.1f} ms)"
                for one in ("stream", "batch", "prompt")
            ]
            print(f"{what}: {', '.join(parts)} tokens/s; start {found['start_s']:.1f} s", flush=True)


if __name__ == "__main__":
    main()
