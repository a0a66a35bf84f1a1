"""What a layer keeps between steps (KVSpec) and how all of it is placed in memory (KVLayout).

Made by: KVSpec by the model's layers (worker, at start); KVLayout by sched/kv_layout.py from specs and free bytes.
Read by: the scheduler's KV cache (groups, policies) and worker/kv_memory.py (tensors). No torch: dtypes are names.

    pool of num_blocks pages ──┬── group 0: layers a0 a1 a2 …   one block table per request and group
                               └── group 1: layers b0 b1 b2 …   page p belongs to at most one group at a time
    memory slot i is one tensor of num_blocks pages, used by layer i of every group.
"""

from __future__ import annotations

import enum
from collections.abc import Collection

import msgspec

DTYPE_BYTES = {
    "float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "int32": 4, "int64": 8,
}  # fmt: skip


class KVKind(enum.StrEnum):
    """Which blocks a layer may read again, and so what a prefix hit is."""

    FULL = "full"  # every earlier token
    WINDOW = "window"  # the last `window` tokens, the current one included
    CHUNK = "chunk"  # tokens of the current chunk of `window` tokens
    STATE = "state"  # one running state; blocks hold snapshots at block ends
    CROSS = "cross"  # an encoder's output: fixed length, filled once


class KVSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What one layer keeps per block. `layer` is its name in the model (unique)."""

    layer: str
    kind: KVKind
    block_size: int  # tokens per block
    context_ranks: int = 1  # ranks that keep an equal number of a block's tokens each, with context parallelism
    num_kv_heads: int = 0
    head_size: int = 0
    v_head_size: int = -1  # -1: same as head_size; 0: values are a slice of the keys (latent attention)
    dtype: str = "float32"
    window: int = 0  # WINDOW and CHUNK: in tokens; CROSS: the encoder's longest output, 0 if it need not be reserved
    state_shapes: tuple[tuple[int, ...], ...] = ()  # STATE only
    state_dtypes: tuple[str, ...] = ()

    @property
    def token_bytes(self) -> int:
        """Bytes of one token, where tokens are kept: keys, values, and with int8 a float32 scale for each head. (float8
        has scales per layer, which are not kept here.)"""
        values = self.head_size if self.v_head_size < 0 else self.v_head_size
        scales = 4 * (1 + (values > 0)) if self.dtype == "int8" else 0
        return self.num_kv_heads * ((self.head_size + values) * DTYPE_BYTES[self.dtype] + scales)

    @property
    def page_bytes(self) -> int:
        """Bytes of one block of this layer, on one rank."""
        if self.kind is KVKind.STATE:
            total = 0
            for shape, dtype in zip(self.state_shapes, self.state_dtypes, strict=True):
                size = DTYPE_BYTES[dtype]
                for n in shape:
                    size *= n
                total += size
            return total
        return self.block_size // self.context_ranks * self.token_bytes


class KVGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Layers that share one block table: same kind, window and block size."""

    kind: KVKind
    block_size: int
    window: int
    layers: tuple[str, ...]


class KVLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Every layer placed. slots[i] names the layers (at most one per group) that share memory slot i."""

    num_blocks: int
    page_bytes: int  # of one block in one slot; a smaller layer leaves the rest of its page unused
    groups: tuple[KVGroup, ...]
    slots: tuple[tuple[str, ...], ...]
    specs: tuple[KVSpec, ...]

    @property
    def total_bytes(self) -> int:
        return self.num_blocks * self.page_bytes * len(self.slots)

    def only(self, layers: Collection[str]) -> KVLayout:
        """The same for a pipeline stage that has these layers: memory of its own slots, the tables of all groups."""
        if len(layers) == len(self.specs):
            return self
        slots = (tuple(layer for layer in slot if layer in layers) for slot in self.slots)
        groups = [
            msgspec.structs.replace(group, layers=tuple(layer for layer in group.layers if layer in layers))
            for group in self.groups
        ]
        return msgspec.structs.replace(
            self,
            groups=tuple(groups),
            slots=tuple(slot for slot in slots if slot),
            specs=tuple(spec for spec in self.specs if spec.layer in layers),
        )


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker reports once its model is loaded."""

    specs: tuple[KVSpec, ...]
    vocab_size: int
    max_positions: int
    num_parameters: int
    weight_bytes: int
    load_seconds: float = 0.0
    stage: int = 0  # of a pipeline
    stages: tuple[tuple[str, ...], ...] = ()  # of all workers together: the layers in `specs` that each stage has
