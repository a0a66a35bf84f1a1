"""Worker: one device's end of the executor's wire. The verbs, each a few lines; the work is in the runner.

Also what documented programs reach for: `worker.model_runner.model`, `device`, `model_config`, and the methods that
collective_rpc names (update_config, reload_weights, get_model, apply_model, or those of a worker_extension_cls).
Must not know: concrete loaders or backends (main.py hands them in), scheduling, sockets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from quire.attention.backend import AttentionBackend
from quire.base.clock import now
from quire.sampling.sampler import Sampler
from quire.schema.kv import KVLayout, KVSpec, ModelInfo
from quire.schema.params import SamplingParams
from quire.schema.step import Grant, Mask, NewRow, StepPlan
from quire.worker.kv_memory import bind_kv
from quire.worker.memory import kv_bytes
from quire.worker.rows import Rows
from quire.worker.runner import ModelRunner, Pending

if TYPE_CHECKING:
    from quire.config import EngineConfig
    from quire.models.build import Model


@dataclass(frozen=True)
class Parts:
    """What a worker is put together from."""

    load_model: Callable[[EngineConfig, torch.device], Model]
    reload_weights: Callable[[Model, EngineConfig], Any]
    update_config: Callable[[EngineConfig, Mapping[str, Any]], EngineConfig]
    select_backend: Callable[[str, Sequence[KVSpec], str | None], AttentionBackend]


class Worker:
    rank = 0
    local_rank = 0

    def __init__(self, config: EngineConfig, device: torch.device, parts: Parts) -> None:
        self.config, self.device = config, device
        self._parts = parts
        self._model: Model | None = None
        self._specs: tuple[KVSpec, ...] = ()
        self._runner: ModelRunner | None = None

    # --- what an executor calls, in this order

    def load(self) -> ModelInfo:
        """Build the model and read its weights."""
        began = now()
        model = self._model = self._parts.load_model(self.config, self.device)
        model_config, cache_config = self.config.model_config, self.config.cache_config
        kv_dtype = model_config.dtype if cache_config.cache_dtype == "auto" else cache_config.cache_dtype
        self._specs = tuple(model.kv_specs(cache_config.block_size, kv_dtype))
        weights = {id(p): p for _, p in model.named_parameters()}.values()  # tied ones count once
        return ModelInfo(
            specs=self._specs,
            vocab_size=model.arch.vocab,
            max_positions=model_config.facts.max_positions,
            num_parameters=sum(p.numel() for p in weights),
            weight_bytes=sum(p.numel() * p.element_size() for p in weights),
            load_seconds=now() - began,
        )

    def free_bytes(self) -> int:
        """Bytes for the KV cache; asked once the weights are in."""
        return kv_bytes(self.config.cache_config.kv_cache_memory_bytes)

    def init_kv(self, layout: KVLayout) -> None:
        """Allocate the KV cache and everything whose size depends on it."""
        model = self.get_model()
        backend = self._parts.select_backend(self.device.type, self._specs, self.config.attention_config.backend)
        bind_kv(layout, backend, model, self.device)
        max_rows = self.config.scheduler_config.max_num_seqs
        rows = Rows(layout.groups, max_rows, self.config.model_config.max_model_len, self.device)
        sampler = Sampler(self.config, model.arch.vocab, rows.tokens)
        self._runner = ModelRunner(model, rows, sampler, backend)

    def warm_up(self) -> None:
        """One tiny step, so that the first request does not pay for what only a first step pays. Leaves no trace: the
        block it writes belongs to nobody yet."""
        blocks = tuple((0,) for _ in self.model_runner.rows.tables)
        row = NewRow(
            request_id="warm-up", epoch=0, token_ids=(0,), num_prompt_tokens=1,
            params=SamplingParams(temperature=0.0), seed=0, blocks=blocks,
        )  # fmt: skip
        grant = Grant("warm-up", 0, 1, True, 0)
        self.forward(StepPlan(step=0, grants=(grant,), joined=(row,), total_tokens=1))
        self.sample(None).result()
        self.forward(StepPlan(step=0, grants=(), left=("warm-up",)))

    def forward(self, plan: StepPlan) -> None:
        self.model_runner.forward(plan)

    def sample(self, mask: Mask | None) -> Pending:
        return self.model_runner.sample(mask)

    def shutdown(self) -> None:
        """Let go of model and cache; their memory is free as soon as nobody else holds them."""
        self._model = self._runner = None

    # --- what users reach for

    @property
    def model_runner(self) -> ModelRunner:
        if self._runner is None:
            raise RuntimeError("the worker has no KV cache yet, or was shut down")
        return self._runner

    @property
    def model_config(self) -> Any:
        return self.config.model_config

    @property
    def vllm_config(self) -> EngineConfig:
        return self.config

    def get_model(self) -> Model:
        if self._model is None:
            raise RuntimeError("the worker has no model: load() comes first, and nothing comes after shutdown()")
        return self._model

    def apply_model(self, function: Callable[[Model], Any]) -> Any:
        return function(self.get_model())

    def update_config(self, overrides: Mapping[str, Any]) -> None:
        """{"load_config": {"load_format": "auto"}}: what a later reload_weights should do."""
        self.config = self._parts.update_config(self.config, overrides)

    def reload_weights(self) -> None:
        """Read the weights again, in place. Whoever caches results of the old ones must forget them."""
        self._parts.reload_weights(self.get_model(), self.config)
