"""KVMemory: the pages of the KV cache. The worker's runner owns it; layers see it through views that a backend makes.

In: a layout and a device. One tensor of pages per memory slot; block b is page b of every slot, so a block can be
copied within the memory, out to the host and back by whoever knows nothing of layers. A layout without layers has no
pages. Memory costs nothing until it is written: on CPU it is an anonymous map, so a laptop that never fills its cache
never pays for it. Must not know: what is written there, whose blocks these are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from quire.attention.backend import AttentionBackend
from quire.layers.batch import LayerCache
from quire.ops.copy import upload
from quire.quant.arena import NO_MEMORY, new_map
from quire.schema.errors import ConfigError
from quire.schema.kv import KVLayout
from quire.worker.gpu_memory import does_not_fit

_COPY_BYTES = 1 << 26  # largest temporary of a copy between device and host


class BindsKV(Protocol):
    """A model, as its memory knows it."""

    def bind_kv(self, caches: Mapping[str, LayerCache], groups: Mapping[str, int]) -> None: ...


class KVMemory:
    def __init__(self, layout: KVLayout, device: torch.device, num_spare: int = 0) -> None:
        """`num_spare`: blocks behind those of the layout, of which plans know nothing."""
        self.layout, self.device, self.num_spare = layout, device, num_spare
        self.num_blocks = layout.num_blocks + num_spare
        num_slots = len(layout.slots)
        self.slots = [allocate(self.num_blocks, layout.page_bytes, device, num_slots) for _ in layout.slots]
        # copies move words, not bytes, where a page is made of whole words
        self._word = next(word for word in (torch.int64, torch.int32, torch.uint8) if not _rest(layout, word))
        self._pages = [slot.view(self._word) for slot in self.slots]

    def bind(self, backend: AttentionBackend, model: BindsKV) -> dict[str, LayerCache]:
        """Hand every layer its cache, views of this memory; by the layer's name."""
        specs = {spec.layer: spec for spec in self.layout.specs}
        caches = {
            layer: backend.make_cache(specs[layer], self.num_blocks, pages)
            for layers, pages in zip(self.layout.slots, self.slots, strict=True)
            for layer in layers
        }
        groups = {layer: index for index, group in enumerate(self.layout.groups) for layer in group.layers}
        model.bind_kv(caches, groups)
        return caches

    @property
    def block_bytes(self) -> int:
        """Of one block, over all slots."""
        return len(self.slots) * self.layout.page_bytes

    # --- copies: each is launched in the order of the device's stream, and nobody waits for it

    def copy_within(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Block sources[i] to targets[i], all at once: a block that is a source and a target is read before it is
        written."""
        if len(sources) != len(targets):
            raise RuntimeError(f"{len(sources)} blocks cannot be copied to {len(targets)}")
        self._check(sources)
        self._check(targets, written=True)
        if sources:
            index = upload(np.array((sources, targets), np.int64), self.device)
            for pages in self._pages:
                pages.index_copy_(0, index[1], pages.index_select(0, index[0]))

    def copy_out(self, blocks: Sequence[int], into: Tensor) -> None:
        """`into` uint8 [blocks, block_bytes] on the host: it holds them once the device has passed this point."""
        self._check(blocks)
        self._check_host(blocks, into)
        for index, host in self._pieces(blocks, into):
            gathered = torch.stack([pages.index_select(0, index) for pages in self._pages], 1)
            host.copy_(gathered.view(len(index), -1).view(torch.uint8), non_blocking=True)

    def copy_in(self, blocks: Sequence[int], host_blocks: Tensor) -> None:
        """`host_blocks` as `copy_out` filled it; not to be changed before the device has passed this point."""
        self._check(blocks, written=True)
        self._check_host(blocks, host_blocks)
        for index, host in self._pieces(blocks, host_blocks):
            sent = host.to(self.device, non_blocking=True).view(self._word).view(len(index), len(self.slots), -1)
            for at, pages in enumerate(self._pages):
                pages.index_copy_(0, index, sent[:, at])

    def on_host(self, num_blocks: int) -> Tensor:
        """Host memory for `copy_out` and `copy_in`, pinned where a device reads it; not filled."""
        shape = (num_blocks, self.block_bytes)
        return torch.empty(shape, dtype=torch.uint8, pin_memory=self.device.type == "cuda")

    def _pieces(self, blocks: Sequence[int], host: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """(blocks on the device, their part of the host's memory), each small enough for a temporary."""
        if not blocks or not self.slots:
            return
        index, count = upload(np.array(blocks, np.int64), self.device), max(1, _COPY_BYTES // self.block_bytes)
        for first in range(0, len(blocks), count):
            yield index[first : first + count], host[first : first + count]

    def _check(self, blocks: Sequence[int], *, written: bool = False) -> None:
        wrong = [block for block in blocks if not 0 <= block < self.num_blocks]
        if wrong:
            raise RuntimeError(f"block {wrong[0]} is not among the {self.layout.num_blocks} of the KV cache")
        if written and len(set(blocks)) < len(blocks):
            raise RuntimeError(f"one of {len(blocks)} blocks would be written twice by one copy")

    def _check_host(self, blocks: Sequence[int], host: Tensor) -> None:
        expected = (len(blocks), self.block_bytes)
        if host.shape != expected or host.dtype is not torch.uint8 or not host.is_contiguous():
            raise RuntimeError(
                f"host memory {host.dtype} {list(host.shape)} does not hold {expected[0]} blocks of {expected[1]} bytes"
            )


def _rest(layout: KVLayout, word: torch.dtype) -> int:
    return layout.page_bytes % word.itemsize


def allocate(num_blocks: int, page_bytes: int, device: torch.device, num_slots: int = 1) -> Tensor:
    """uint8 [num_blocks, page_bytes], zero, for one of so many slots."""
    if device.type != "cpu":
        try:
            return torch.zeros((num_blocks, page_bytes), dtype=torch.uint8, device=device)
        except torch.cuda.OutOfMemoryError as wrong:
            raise does_not_fit(device, f"a KV cache of {num_blocks} blocks", wrong) from None
    try:
        memory = new_map(num_blocks * page_bytes)
    except NO_MEMORY as wrong:
        block_bytes = num_slots * page_bytes
        raise ConfigError(
            f"cannot allocate {num_blocks * block_bytes / 2**30:.2f} GiB for the KV cache ({num_blocks} blocks of "
            f"{block_bytes} bytes): {wrong}; lower kv_cache_memory_bytes or QUIRE_CPU_KVCACHE_SPACE"
        ) from None
    return torch.frombuffer(memory, dtype=torch.uint8).view(num_blocks, page_bytes)
