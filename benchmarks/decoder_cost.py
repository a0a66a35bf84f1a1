"""Processor time of a Llama-shaped forward pass (135M) on CPU: this tree beside another commit's, in turns.

    python benchmarks/decoder_cost.py --base COMMIT [--rounds 8] [--rows 1 8] [--layers 30]

The other commit's `quire` is unpacked from git into a temporary folder. Each tree runs in a child of its own that
waits between rounds; a round is a number of decode steps over paged KV, measured by the processor time of the process,
so that other programs on the machine count little. Printed is the median of the ratios of neighbouring rounds. The
compiled kernels are off on both sides: what is compared is the decoder, not the kernels of one tree with none.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CONFIG: dict[str, Any] = dict(
    architectures=["LlamaForCausalLM"], vocab_size=49152, hidden_size=576, intermediate_size=1536,
    num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=2048, rms_norm_eps=1e-5,
    tie_word_embeddings=True, rope_theta=100000.0,
)  # fmt: skip


def serve(layers: int) -> None:
    """In the child: one line in (rows, steps), one line out (seconds of processor time)."""
    import torch

    from quire.attention.select import select_backend
    from quire.layers.batch import Batch, GroupStep
    from quire.models.build import build_model
    from quire.schema.kv import KVGroup, KVKind

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = build_model(CONFIG | {"num_hidden_layers": layers}, dtype=torch.bfloat16)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.02)
    model.finish_weights()
    size, blocks, context = 16, 256, 128
    specs = model.kv_specs(size, "bfloat16")
    backend = select_backend("cpu", specs)
    group = KVGroup(kind=KVKind.FULL, block_size=size, window=0, layers=tuple(spec.layer for spec in specs))
    caches = {}
    for spec in specs:
        caches[spec.layer] = backend.make_cache(spec, blocks, torch.zeros((blocks, spec.page_bytes), dtype=torch.uint8))
    model.bind_kv(caches, dict.fromkeys(group.layers, 0))
    per = context // size
    for line in sys.stdin:
        rows, steps = json.loads(line)
        tables = torch.arange(rows * per, dtype=torch.int32).view(rows, per)
        starts = torch.arange(rows + 1, dtype=torch.int32)
        slots = tables[:, -1].long() * size + size - 1
        began = time.process_time()
        for _ in range(steps):
            plan = backend.plan(GroupStep(tables, starts, [context] * rows, [1] * rows, slots), group)
            ids, positions = torch.full((rows,), 17), torch.full((rows,), context - 1)
            batch = Batch(ids, positions, [plan], torch.arange(rows), rows)
            with torch.inference_mode():
                model.logits(model.forward(batch))
        print(json.dumps(time.process_time() - began), flush=True)


def start(tree: Path, layers: int) -> subprocess.Popen:
    command = [sys.executable, str(Path(__file__).resolve()), "--serve", "--layers", str(layers)]
    env = dict(os.environ, PYTHONPATH=str(tree), OMP_NUM_THREADS="1", QUIRE_CPU_KERNELS="off")
    return subprocess.Popen(command, cwd=tree, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def ask(child: subprocess.Popen, rows: int, steps: int) -> float:
    assert child.stdin is not None and child.stdout is not None
    child.stdin.write(json.dumps([rows, steps]) + "\n")
    child.stdin.flush()
    return float(child.stdout.readline())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--base", default="HEAD", help="the other commit")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8], help="requests that decode at once")
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--steps", type=int, default=12, help="decode steps of a round")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve(args.layers)
    with tempfile.TemporaryDirectory() as folder:
        pack = subprocess.run(["git", "archive", args.base, "quire"], cwd=ROOT, check=True, stdout=subprocess.PIPE)
        subprocess.run(["tar", "x", "-C", folder], input=pack.stdout, check=True)
        ours, base = start(ROOT, args.layers), start(Path(folder), args.layers)
        try:
            for rows in args.rows:
                ask(ours, rows, 2), ask(base, rows, 2)
                pairs = [(ask(ours, rows, args.steps), ask(base, rows, args.steps)) for _ in range(args.rounds)]
                ratio = statistics.median(a / b for a, b in pairs)
                a, b = (statistics.median(times) / args.steps * 1e3 for times in zip(*pairs, strict=True))
                best = min(a for a, _ in pairs) / min(b for _, b in pairs)
                times = f"{a:7.2f} ms a step, {args.base}: {b:7.2f} ms"
                print(f"{rows:3} rows: {times}, ratio {ratio:.3f}, of the shortest rounds {best:.3f}", flush=True)
        finally:
            for child in (ours, base):
                child.kill()
                child.wait()


if __name__ == "__main__":
    main()
