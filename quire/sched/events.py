"""KV events: what an outside router may want to know of the prefix cache. Recorded only when asked for.

Kept by the block pool and the KV cache, in order; `Scheduler.take_events` hands them on, and observe/kv_events.py sends
them. As msgpack each is an array: its name, then its fields in this order.
"""

from __future__ import annotations

import msgspec

MEDIUM_GPU = "GPU"  # the documented word for device memory, whatever the device


class KVCacheEvent(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Something changed in the prefix cache."""


class BlockStored(KVCacheEvent, frozen=True):
    """Consecutive blocks of one prefix can be found from now on."""

    block_hashes: list[bytes]
    parent_block_hash: bytes | None  # of the block before the first; None at the beginning of a prompt
    token_ids: list[int]  # of all these blocks, in order
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None
    group: int = 0  # of layers, in the KV layout


class BlockRemoved(KVCacheEvent, frozen=True):
    """These blocks were taken for something else."""

    block_hashes: list[bytes]
    medium: str
    group: int = 0


class AllBlocksCleared(KVCacheEvent, frozen=True):
    """The cache was reset."""


Event = BlockStored | BlockRemoved | AllBlocksCleared
