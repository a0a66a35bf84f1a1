"""The launcher of torchrun with ranks that are forks of this program: its agent, its meeting of ranks and the variables
that it sets, without an import of torch for each rank. Arguments: how many ranks, a program, and what it is given."""

from __future__ import annotations

import runpy
import sys
import uuid

from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def rank(program: str, *arguments: str) -> None:
    sys.argv = [program, *arguments]
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    count, program, *words = sys.argv[1:]
    # As `torchrun --standalone` settles it.
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=int(count), start_method="fork", run_id=str(uuid.uuid4()),
        rdzv_backend="c10d", rdzv_endpoint="localhost:0", max_restarts=0,
    )  # fmt: skip
    elastic_launch(config, rank)(program, *words)
