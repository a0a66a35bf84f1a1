"""Drafters that are models: loaded beside the model they draft for, with their own share of its KV memory.

In: the resolved configuration, and how the worker makes models. Out: a Drafter, which becomes a Proposer once the KV
layout is known. Must not know: how a proposer works, budgets of a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from quire.base.log import logger
from quire.config.engine import replace
from quire.drafting.proposer import Proposer
from quire.ops.op import Kernels
from quire.quant.shard import ALONE
from quire.schema.kv import KVLayout, KVSpec
from quire.worker.draft_memory import DraftMemory
from quire.worker.draft_model import DraftModel
from quire.worker.kv_scales import kv_dtype_of

if TYPE_CHECKING:
    from quire.config import EngineConfig
    from quire.models.build import Model
    from quire.worker.worker import WorkerParts

_log = logger(__name__)


class Drafter:
    """A loaded draft model."""

    def __init__(self, model: Model, config: EngineConfig, parts: WorkerParts, device: torch.device) -> None:
        """`config`: the draft model's own."""
        self.model, self._config, self._parts, self._device = model, config, parts, device
        cache = config.cache_config
        self.specs = tuple(model.kv_specs(cache.block_size, kv_dtype_of(config)))

    def leave(self, num_bytes: int, specs: Sequence[KVSpec]) -> int:
        """What is left of a budget for the KV of the model: both get memory for the same number of tokens."""
        ours, theirs = _token_bytes(self.specs), _token_bytes(specs)
        return num_bytes * theirs // max(1, ours + theirs)

    def proposer(self, layout: KVLayout, max_model_len: int) -> Proposer:
        """`layout`: of the model that is drafted for, whose KV memory ours is measured by."""
        config, theirs = self._config, max(1, _token_bytes(layout.specs))
        block_bytes = sum(spec.page_bytes for spec in self.specs)
        max_len = min(config.model_config.max_model_len, max_model_len)
        max_rows = config.scheduler_config.max_num_seqs
        most = max_rows * -(-(max_len + 1) // config.cache_config.block_size)
        num_bytes = layout.total_bytes * _token_bytes(self.specs) // theirs
        num_blocks = min(most, num_bytes // max(1, block_bytes))
        _log.info("Draft model: %d KV blocks, %.2f GiB", num_blocks, num_blocks * block_bytes / 2**30)
        backend = self._parts.select_backend(self._device.type, self.specs, config.attention_config.backend)
        memory = DraftMemory(
            self.model, self.specs, backend, num_blocks=num_blocks, max_rows=max_rows, max_len=max_len,
            device=self._device,
        )  # fmt: skip
        return DraftModel(self.model, memory, config.scheduler_config.max_num_batched_tokens)


def _token_bytes(specs: Sequence[KVSpec]) -> int:
    return sum(spec.token_bytes for spec in specs)


def load_drafter(config: EngineConfig, kernels: Kernels, parts: WorkerParts) -> Drafter | None:
    """None: the method has no model."""
    speculative = config.speculative_config
    if speculative is None or speculative.drafter is None:
        return None
    changes = {
        "model_config": speculative.drafter.model_config,
        "load_config": speculative.drafter.load_config,
        "cache_config.cache_dtype": speculative.drafter.cache_dtype,
        "speculative_config": None,
        "lora_config": None,
    }
    own = replace(config, **changes)
    model = parts.make_model(own, kernels, ALONE)
    parts.reload_weights(model, own)
    return Drafter(model, own, parts, kernels.device)
