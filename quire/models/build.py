"""From a checkpoint's config.json to an empty model: finds the declaration, reads the config, builds the modules.

In: the raw config (a dict), dtype, device. Out: a Model whose parameters are not filled yet (loader/ fills them
through Model.table()). Must not know: files, quantization formats, the engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from quire.layers.batch import Batch, LayerCache
from quire.layers.table import WeightTable
from quire.models.arch import Arch
from quire.schema.kv import KVSpec


class Model(Protocol):
    """What the worker and the loader ask of a model."""

    arch: Arch

    def table(self) -> WeightTable: ...

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]: ...

    def kv_specs(self, block_size: int, kv_dtype: str) -> list[KVSpec]: ...

    def bind_kv(self, caches: Mapping[str, LayerCache], groups: Mapping[str, int]) -> None: ...

    def forward(self, batch: Batch) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...

    def named_parameters(self) -> Iterable[tuple[str, nn.Parameter]]: ...


def build_model(
    hf_config: dict[str, Any],
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    max_model_len: int | None = None,
) -> Model:
    """`max_model_len` decides long-context rope tables (dynamic, longrope); None: the config's own length."""
    raise NotImplementedError
