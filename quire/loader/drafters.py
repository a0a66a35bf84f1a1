"""Drafters that read a model's hidden states, made from their checkpoints; loader/load.py fills them.

In: the drafter's configuration, the method, and the model. Out: a drafter without its weights. Which optional tensors a
checkpoint has decides what is built, so their names are read first. Must not know: what a worker does with a drafter.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from quire.loader.files import read_directory
from quire.loader.load import naming, storage_for, weight_files
from quire.models.decoder import Decoder
from quire.models.draft_heads import MedusaHeads, MlpSpeculator
from quire.models.draft_layers import Eagle, Eagle3, FeatureDrafter, Mtp, Target
from quire.ops.op import Kernels
from quire.quant.shard import ALONE, ShardGroup
from quire.schema.errors import CheckpointError, NotBuiltError

if TYPE_CHECKING:
    from quire.config import EngineConfig
    from quire.models.build import Model

HeadDrafter = MedusaHeads | MlpSpeculator | FeatureDrafter
_PLACE = "speculative_config"


def make_head(
    method: str, config: EngineConfig, model: Model, kernels: Kernels, group: ShardGroup = ALONE
) -> HeadDrafter:
    """`config`: the drafter's own; of method mtp that of the model. `group`: the ranks that share it."""
    if not isinstance(model, Decoder):
        raise NotBuiltError(
            f"{_PLACE}: method {method!r} reads hidden states of Quire's own declarations, not of transformers' code",
            param=_PLACE,
        )
    about = config.model_config
    raw: dict[str, Any] = about.hf_config
    with naming(about.path):
        there = _names(config)
        if there and method != "mtp":
            _check_size(method, raw, weight_files(config).num_bytes)
    storage, width, vocab = storage_for(config, kernels, group), model.arch.width, model.arch.vocab
    match method:
        case "medusa":
            return MedusaHeads(raw, there, width, vocab, model.narrow_logits, storage)
        case "mlp_speculator":
            return MlpSpeculator(raw, width, vocab, storage)
        case "eagle":
            return Eagle(raw, there, Target.of(model), storage, about.max_model_len)
        case "eagle3":
            return Eagle3(raw, there, Target.of(model), storage, about.max_model_len)
        case "mtp":
            return Mtp(raw, there, model, storage, about.max_model_len)
    raise NotBuiltError(f"{_PLACE}: method {method!r} has no head", param=_PLACE)


def _check_size(method: str, raw: Mapping[str, Any], num_bytes: int) -> None:
    """Before a drafter is built that its files are too small for: no format needs less than a bit per weight."""
    keys = {
        "medusa": ("num_heads", "num_hidden_layers", "hidden_size", "hidden_size"),
        "mlp_speculator": ("vocab_size", "inner_dim"),
    }.get(method, ("num_hidden_layers", "hidden_size", "intermediate_size"))
    sizes = {key: raw.get(key) for key in keys}
    numbers = math.prod(value for key in keys if isinstance(value := sizes[key], int))
    if numbers > 8 * num_bytes:
        named = ", ".join(f"{key} = {value}" for key, value in sizes.items())
        raise CheckpointError(
            f"the drafter's configuration ({named}) describes at least {numbers} weights, but its files have "
            f"{num_bytes} bytes",
            param=_PLACE,
        )


def _names(config: EngineConfig) -> Collection[str]:
    """Of the checkpoint's tensors; of dummy weights none, and what is optional is then left out."""
    if config.load_config.load_format == "dummy":
        return ()
    files = weight_files(config)
    if files.kind == "gguf":
        raise NotBuiltError(
            f"{_PLACE}: {config.model_config.path} is a GGUF file, in which drafters of hidden states are not read; "
            "safetensors and torch files are",
            param=_PLACE,
        )
    return read_directory(files, config.load_config.pt_load_map_location)
