"""From a checkpoint's config.json to an empty model: finds the declaration, reads the config, builds the modules.

In: the raw config (a dict), dtype, device. Out: a Model whose parameters are not filled yet (loader/ fills them
through Model.table()). Must not know: files, quantization formats, the engine.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from quire.layers.batch import Batch, LayerCache
from quire.layers.table import WeightTable
from quire.models.arch import Arch
from quire.models.decoder import Decoder
from quire.models.limits import check_arch, reading
from quire.models.view import View
from quire.models.zoo import ALIASES, ZOO
from quire.models.zoo.defaults import DEFAULTS
from quire.ops.op import Kernels
from quire.quant.plain import plain_storage
from quire.quant.scheme import Storage
from quire.schema.errors import ConfigError, some
from quire.schema.kv import KVSpec


class Model(Protocol):
    """The interface of a model for the worker and the loader."""

    arch: Arch
    captures: bool  # whether a decode step may be captured in a graph

    def table(self) -> WeightTable: ...

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]: ...

    def finish_weights(self) -> None:
        """Call after filling parameters through table(); load_weights calls it."""
        ...

    def kv_specs(self, block_size: int, kv_dtype: str) -> list[KVSpec]: ...

    def bind_kv(self, caches: Mapping[str, LayerCache], groups: Mapping[str, int]) -> None: ...

    def forward(self, batch: Batch) -> Tensor: ...

    def logits(self, hidden: Tensor, slots: Tensor | None = None) -> Tensor:
        """`slots` [S]: of the rows' adapters; None: no row has one."""
        ...

    def narrow_logits(self, hidden: Tensor, slots: Tensor | None = None) -> Tensor:
        """Equal to `logits`, in the dtype of the head."""
        ...

    def named_parameters(self) -> Iterable[tuple[str, nn.Parameter]]: ...


def build_model(
    hf_config: Mapping[str, Any],
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    max_model_len: int | None = None,
    storage: Storage | None = None,
) -> Decoder:
    """`max_model_len` determines long-context rope tables (dynamic, longrope); None: the config's length.
    `storage` determines how weights are stored; None: plain tensors of `dtype` on `device`."""
    arch = read_arch(hf_config)
    storage = storage or plain_storage(dtype, Kernels.here(device))
    return Decoder(arch, storage, max_model_len=max_model_len or arch.max_positions)


def read_arch(hf_config: Mapping[str, Any]) -> Arch:
    """The declaration of the first declared name in config["architectures"], applied to the config."""
    name = architecture_name(hf_config)
    first = next((first for first, others in ALIASES.items() if name in others), name)
    with reading(hf_config, name):
        return check_arch(ZOO.get(name)(View(hf_config, DEFAULTS.get(first, {}), name)))


def architecture_name(hf_config: Mapping[str, Any]) -> str:
    names = hf_config.get("architectures") or []
    if not names:
        raise ConfigError("config.json has no architecture (the list 'architectures' is empty or absent)")
    for name in names:
        if name in ZOO:
            return name
    near = [hit for name in names[:8] for hit in difflib.get_close_matches(name, ZOO.names(), n=3, cutoff=0.5)]
    hint = f" Closest: {', '.join(dict.fromkeys(near))}." if near else ""
    raise ConfigError(
        f"architecture {some([repr(name) for name in names])} is not declared.{hint} model_impl='transformers' (or "
        "'auto') runs models without a declaration through transformers' code.",
        param="architectures",
        value=list(names),
    )
