"""Weights out of a worker: the verb save_sharded_state, called by import path between steps.

In: a worker and where to write. Out: the files' names. Must not know: requests, steps, file formats.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from quire.layers.stored import reopen_matrices
from quire.loader.sharded import save
from quire.schema.errors import NotBuiltError

if TYPE_CHECKING:
    from quire.worker.worker import Worker


def save_sharded_state(
    worker: Worker, path: str | os.PathLike[str], pattern: str | None = None, max_size: int | None = None
) -> list[str]:
    """This rank's parameters as they lie in memory; load_format='sharded_state' reads them."""
    form = worker.config.model_config.weight_form
    if form != "plain":
        raise NotBuiltError(
            f"saving weights that are stored in {form} blocks is not built; load with dtype=float32 or bfloat16 first"
        )
    if worker.group.spread is not None:
        raise NotBuiltError(
            "save_sharded_state: the engine has some of the experts, and other engines the rest; save without "
            "enable_expert_parallel, or with data_parallel_size 1"
        )
    if worker.group.broadcast is not None:
        raise NotBuiltError("save_sharded_state: experts may have moved to other ranks; save without enable_eplb")
    model = worker.get_model()
    were_laid = reopen_matrices(model)
    try:
        return save(model, os.fspath(path), worker.rank, pattern, max_size)
    finally:
        if were_laid:
            model.finish_weights()
