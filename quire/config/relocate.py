"""A model's files on another machine than the one whose options name them.

In: a resolved EngineConfig of another machine. Out: the same with the path that the model has here: the same one, if it
is there, else what this machine fetches from the hub. Nobody's token is sent around: a machine has its own (HF_TOKEN in
its environment). Must not know: who starts workers, or what they do.
"""

from __future__ import annotations

import os

from quire.checkpoint.source import locate
from quire.config.engine import EngineConfig, replace
from quire.schema.errors import ModelNotFoundError


def find_files_here(config: EngineConfig, where: str) -> EngineConfig:
    """ModelNotFoundError names the machine (`where`)."""
    model, files = config.model_config, config.load_config
    if os.path.exists(model.path):
        return config
    try:
        located = locate(model.model, model.revision, files.download_dir, None, files.ignore_patterns)
    except ModelNotFoundError as absent:
        raise not_found_there(absent, where) from None
    changes = {"model_config.path": located.path}
    if model.tokenizer == model.path:
        changes["model_config.tokenizer"] = located.path
    moved: EngineConfig = replace(config, **changes)
    return moved


def not_found_there(absent: ModelNotFoundError, where: str) -> ModelNotFoundError:
    """Said by a machine that finds its files for itself."""
    return ModelNotFoundError(
        f"{where}: {absent}. Every machine of an engine finds the model's files for itself: have them in the same "
        "folder everywhere, or set HF_TOKEN in the environment of each machine, because tokens are not sent to others",
        param=absent.param,
        value=absent.value,
    )
