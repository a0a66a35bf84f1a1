"""Scales of an fp8 KV cache: from a checkpoint's numbers to the layers' caches.

In: what the loader read, by the number of a layer, and the caches a backend made, by its name. Must not know: files,
how caches are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from quire.base.log import logger
from quire.layers.batch import LayerCache, ScaledCache
from quire.loader.kv_scales import LayerScales, layer_number

if TYPE_CHECKING:
    from quire.config import EngineConfig

_DTYPES = {  # option -> what a KVSpec says
    "int8_per_token_head": "int8",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}
_log = logger(__name__)


def kv_dtype_of(config: EngineConfig) -> str:
    """As a KVSpec says it."""
    chosen = config.cache_config.cache_dtype
    return config.model_config.dtype if chosen == "auto" else _DTYPES.get(chosen, chosen)


def is_scaled(kv_dtype: str) -> bool:
    return kv_dtype.startswith("float8")


def scaled_caches(caches: Mapping[str, LayerCache]) -> dict[str, ScaledCache]:
    return {
        layer: cache
        for layer, cache in caches.items()
        if isinstance(cache, ScaledCache) and cache.layer_scales is not None
    }


def set_scales(caches: Mapping[str, ScaledCache], scales: Mapping[int, LayerScales]) -> None:
    """In place: captured steps read them too. A layer that the checkpoint does not name has 1.0."""
    for layer, cache in caches.items():
        assert cache.layer_scales is not None
        cache.layer_scales.copy_(torch.tensor(scales.get(layer_number(layer), LayerScales())))


def report(caches: Mapping[str, ScaledCache], scales: Mapping[int, LayerScales], *, measured: bool) -> None:
    """Where the scales come from, in one line."""
    if not caches:
        return
    known = sum(layer_number(layer) in scales for layer in caches)
    if measured:
        _log.info("KV cache: the first step measures the scales of %d layers (calculate_kv_scales)", len(caches))
    elif known == len(caches):
        _log.info("KV cache: scales of %d layers are the checkpoint's", known)
    else:
        _log.warning(
            "KV cache in fp8: the checkpoint has scales for %d of %d layers; the others use 1.0, which may cost "
            "accuracy (calculate_kv_scales=True measures them)", known, len(caches),
        )  # fmt: skip
