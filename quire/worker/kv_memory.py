"""KV memory: one tensor per slot of a KVLayout, seen by each layer through its backend's views, bound to the model.

In: a layout, a backend, a model. The memory is asked for at once and costs nothing until it is written: on CPU it is an
anonymous map, so a laptop that never fills its cache never pays for it. Must not know: what is written there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quire.attention.backend import AttentionBackend
from quire.layers.batch import LayerCache
from quire.quant.arena import new_map
from quire.schema.errors import ConfigError
from quire.schema.kv import KVLayout
from quire.worker.gpu_memory import does_not_fit

if TYPE_CHECKING:
    from quire.models.build import Model


def bind_kv(layout: KVLayout, backend: AttentionBackend, model: Model, device: torch.device) -> None:
    """Allocate and hand every layer its cache. The model then holds the only references: dropping it frees all."""
    specs = {spec.layer: spec for spec in layout.specs}
    caches: dict[str, LayerCache] = {}
    for layers in layout.slots:
        memory = allocate(layout.num_blocks, layout.page_bytes, device)
        for layer in layers:
            caches[layer] = backend.make_cache(specs[layer], layout.num_blocks, memory)
    groups = {layer: index for index, group in enumerate(layout.groups) for layer in group.layers}
    model.bind_kv(caches, groups)


def allocate(num_blocks: int, page_bytes: int, device: torch.device) -> Tensor:
    """uint8 [num_blocks, page_bytes], zero."""
    if device.type != "cpu":
        try:
            return torch.zeros((num_blocks, page_bytes), dtype=torch.uint8, device=device)
        except torch.cuda.OutOfMemoryError as wrong:
            raise does_not_fit(device, f"a KV cache of {num_blocks} blocks", wrong) from None
    size = num_blocks * page_bytes
    try:
        memory = new_map(size)
    except (OSError, OverflowError, ValueError) as wrong:
        raise ConfigError(
            f"cannot allocate {size / 2**30:.2f} GiB for the KV cache ({num_blocks} blocks of {page_bytes} bytes): "
            f"{wrong}; lower kv_cache_memory_bytes or QUIRE_CPU_KVCACHE_SPACE"
        ) from None
    return torch.frombuffer(memory, dtype=torch.uint8).view(num_blocks, page_bytes)
