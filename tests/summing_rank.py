"""A process that is one of several ranks: joins the others as a worker does, and sums what it draws by a seed."""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path

import torch

from quire.ops.cpu.rank_sums import NativeSum
from quire.worker.ranks import join, leave

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def drawn(seed: int, rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed * 100 + rank)
    scales = 10.0 ** torch.randint(-3, 4, (count,), generator=generator)
    return (torch.randn(count, generator=generator) * scales).to(dtype)


def main(boot: bytes) -> None:
    """`boot`: JSON; leaves a file of what it has found."""
    asked = json.loads(boot)
    rank, ranks, folder = asked["rank"], asked["ranks"], Path(asked["folder"])
    torch.set_num_threads(1)
    joined = join(rank, ranks, f"file://{folder}/meeting", torch.device("cpu"), asked["stages"])
    group = joined.group
    names = os.listdir("/proc/self/fd")
    left = [name for name in names if "quire-sums" in os.path.realpath(f"/proc/self/fd/{name}")]
    maps = sum("memfd:quire-sums" in line for line in Path("/proc/self/maps").read_text().splitlines())
    (folder / f"{rank}.joined").write_text(
        json.dumps({"native": isinstance(group.reduce, NativeSum), "descriptors": len(left), "maps": maps})
    )
    wrong, late = [], random.Random(rank)
    others = [peer + group.size * group.stage for peer in range(group.size)]
    for turn in range(asked["turns"]):
        choose = random.Random(1000 * asked["seed"] + turn)  # the same on all
        dtype, count = choose.choice(DTYPES), choose.choice((1, 7, 600, 2048, 70_001, 400_000))
        x = drawn(turn, rank, count, dtype)
        total = drawn(turn, others[0], count, dtype).float()
        for peer in others[1:]:
            total += drawn(turn, peer, count, dtype).float()
        if late.random() < 0.2:
            time.sleep(late.random() * 5e-3)
        if not torch.equal(group.reduce(x), total.to(dtype)):
            wrong.append(turn)
        if turn % 7 == 0:  # gloo's between ours
            whole = group.reduce(torch.tensor([turn, rank]))
            if whole.tolist() != [turn * group.size, sum(others)]:
                wrong.append(-turn)
    (folder / f"{rank}.done").write_text(json.dumps(wrong))
    if asked.get("stays"):
        group.reduce(torch.ones(8)) if rank == 0 else time.sleep(600)  # the first waits for the others
    leave()
