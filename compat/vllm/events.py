"""vllm.distributed.kv_events, for programs that subscribe to KV events: what a message of theirs decodes to.

`msgspec.msgpack.decode(payload, type=KVEventBatch)` reads what docs/server/kv_events.md describes.
"""

from __future__ import annotations

import msgspec

from quire.sched.events import Event

ExternalBlockHash = bytes


class KVEventBatch(msgspec.Struct, array_like=True, gc=False):
    """EventBatch (quire/observe/kv_events.py) with the types of its events."""

    ts: float  # wall-clock seconds
    events: list[Event]
    data_parallel_rank: int | None = None  # of the engine, if there are several
