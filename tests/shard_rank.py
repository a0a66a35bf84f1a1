"""One of several ranks that hold models together, as a process: `python -m tests.shard_rank RANK SIZE FOLDER`.

FOLDER holds `models`, a folder for each checkpoint, whose name says how it is loaded: NAME (plain), NAME.turned (the
toy scheme), NAME.state (what this rank saved is loaded again, instead). Ranks meet through a file in FOLDER, by gloo.
Writes `RANK.pt`: by model, the logits of some steps and how many numbers its parameters have.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed

from quire.config import EngineArgs
from quire.loader.load import load_model, reload_weights
from quire.loader.sharded import save
from quire.models.build import build_model
from quire.ops.op import Kernels
from quire.quant.shard import ShardGroup
from tests.paged import Paged
from tests.toy_scheme import turned_storage

PROMPTS = [[7, 9, 30, 4, 11, 80, 21, 6, 45, 3, 12], [5, 6, 99]]


def loaded(folder: Path, group: ShardGroup) -> Any:
    def config_of(path: Path, form: str = "auto") -> Any:
        args = EngineArgs(
            model=str(path), dtype="float32", max_model_len=64, skip_tokenizer_init=True, device="cpu", load_format=form
        )
        return args.create_engine_config()

    if folder.name.endswith(".turned"):
        config = config_of(folder)
        storage = turned_storage(Kernels.here("cpu"), group)
        made = build_model(config.model_config.hf_config, dtype=torch.float32, max_model_len=64, storage=storage)
        reload_weights(made, config)
        return made
    model = load_model(config_of(folder), "cpu", group)
    if folder.name.endswith(".state") and not group.is_alone:
        state = folder.parents[1] / "state" / folder.name
        state.mkdir(parents=True, exist_ok=True)
        save(model, str(state), group.rank, max_size=20_000)
        shutil.copy(folder / "config.json", state / "config.json")
        distributed.barrier()
        model = load_model(config_of(state, "sharded_state"), "cpu", group)
    return model


def steps(model: Any) -> list[Tensor]:
    """Prompts in chunks, then a token of each: logits of every position."""
    paged = Paged(model, PROMPTS, block_size=4)
    return [row for grants in ([(0, 6)], [(0, 4), (1, 2)], [(0, 1), (1, 1)]) for row in paged.step(grants)]


def size_of(model: Any) -> int:
    return sum(parameter.numel() for parameter in {id(p): p for p in model.parameters()}.values())


def main(rank: int, size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", f"file://{folder / 'meet'}", rank=rank, world_size=size)

    def reduce(x: Tensor) -> Tensor:
        distributed.all_reduce(x)
        return x

    found = {}
    for path in sorted((folder / "models").iterdir()):
        model = loaded(path, ShardGroup(rank, size, reduce))
        found[path.name] = (steps(model), size_of(model))
    torch.save(found, folder / f"{rank}.pt")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
