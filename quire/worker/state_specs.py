"""What a configuration decides about running states: how often they are saved, and in which precision.

In: the specs of a model's layers. Out: the same, those of kind STATE changed. Without prefix caching nobody ever asks
for an earlier state, so a request has one block per group of state layers, whatever its length.
Must not know: layers, blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from quire.schema.kv import KVKind, KVSpec

if TYPE_CHECKING:
    from quire.config.groups import CacheConfig

WHOLE = 1 << 30  # tokens: longer than any request


def settle_states(specs: Sequence[KVSpec], config: CacheConfig) -> tuple[KVSpec, ...]:
    size = (config.mamba_block_size or config.block_size) if config.enable_prefix_caching else WHOLE
    return tuple(
        replace(spec, block_size=size, state_dtypes=_dtypes(spec, config)) if spec.kind is KVKind.STATE else spec
        for spec in specs
    )


def _dtypes(spec: KVSpec, config: CacheConfig) -> tuple[str, ...]:
    """A layer names its running state first, if it has one, and its window of inputs last."""
    window = spec.state_dtypes[-1] if config.mamba_cache_dtype == "auto" else config.mamba_cache_dtype
    dtype = config.mamba_ssm_cache_dtype if config.mamba_ssm_cache_dtype != "auto" else config.mamba_cache_dtype
    return (*(own if dtype == "auto" else dtype for own in spec.state_dtypes[:-1]), window)
