"""Slots for adapters in a loaded model, for workers of an engine that serves adapters; no other imports this module.

In: a model with its weights, and the options. Out: WorkerAdapters, which fill the slots. Must not know: plans.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from quire.layers.adapters import StepAdapters
from quire.layers.places import AdapterPlaces, attach
from quire.loader.adapter import read_adapter
from quire.loader.adapter_config import AdapterLimits
from quire.models.decoder import Decoder
from quire.models.encoder import Encoder
from quire.models.pooled import PoolingModel
from quire.ops.lora_shards import AdapterShards
from quire.ops.op import Kernels
from quire.schema.errors import NotBuiltError
from quire.worker.adapters import WorkerAdapters

if TYPE_CHECKING:
    from quire.config.extras import LoRAConfig
    from quire.models.arch import Arch
    from quire.models.build import Model
    from quire.worker.spread_adapters import SpreadAdapters


def _ends_of(arch: Arch, rank: int) -> int:
    """Numbers of an adapter of embedding and head, copies of both included."""
    return 2 * arch.vocab * (arch.width + rank) + 2 * arch.width * rank


def give_slots(model: Model, lora: LoRAConfig, dtype: torch.dtype, kernels: Kernels) -> WorkerAdapters:
    """Every layer of the model gets slots. `dtype`: of the adapters' numbers."""
    trunk = model.trunk if isinstance(model, PoolingModel) else model
    if not isinstance(trunk, Decoder | Encoder):
        raise NotBuiltError(
            f"enable_lora: {type(model).__name__} takes no adapters in this version", param="enable_lora"
        )
    group, shards = trunk.storage.group, None
    if lora.fully_sharded_loras and group.size > 1:
        shards = AdapterShards(group.rank, group.size, group.reduce)
    step = trunk.adapters = StepAdapters(is_sharded=shards is not None)
    like = torch.empty(0, dtype=dtype, device=kernels.device)
    layers = attach(trunk, step, lora.max_loras, lora.max_lora_rank, like, kernels, shards)
    most, ends = 1, 0
    if isinstance(trunk, Decoder) and trunk.stage.count > 1:
        most, ends = len(trunk.arch.layers), _ends_of(trunk.arch, lora.max_lora_rank)
    # of a pooling model's head of the language model, rows are used at most
    places = AdapterPlaces(trunk, model.table(), most=most, ends=ends, has_head=trunk is model, shards=shards)
    model.finish_weights()  # a table opens matrices that lie in panels
    limits = AdapterLimits(lora.max_lora_rank, dtype, lora.target_modules)
    spread: SpreadAdapters | None = None
    if group.spread is not None:
        from quire.worker.spread_adapters import SpreadAdapters  # lazy

        spread = group.spread.news = SpreadAdapters(layers, group.spread, dtype)
    return WorkerAdapters(partial(read_adapter, places=places, limits=limits), layers, step, spread)
