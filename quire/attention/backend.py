"""AttentionBackend: the interface of an attention implementation, and the table of those that exist.

A backend turns one step of one KV group into a plan (all index work, once per step) that every layer of the group
then runs. It owns the inside of the caches it makes. It must not know models, requests or the scheduler.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from quire.base.registry import Registry
from quire.layers.batch import AttentionPlan, GroupStep, LayerCache
from quire.schema.kv import KVGroup, KVSpec


class AttentionBackend(Protocol):
    name: str

    def supports(self, spec: KVSpec) -> str | None:
        """None if this backend supports the layer, else the reason why not."""
        ...

    def reads_pages(self, spec: KVSpec) -> bool:
        """Whether queries can attend to what such a layer's cache holds without bringing keys of their own."""
        ...

    def make_cache(self, spec: KVSpec, num_blocks: int, memory: Tensor) -> LayerCache:
        """Views of `memory`, uint8 [num_blocks, page_bytes]; page_bytes may exceed spec.page_bytes. Copies nothing."""
        ...

    def plan(self, step: GroupStep, group: KVGroup) -> AttentionPlan:
        """Index work for one step of one group; valid until the step is done."""
        ...

    def prepare(self, tokens: int, longest: int) -> None:
        """Called once, after the first steps and before requests arrive: the most tokens of a step, and of a row."""
        ...


BACKENDS = Registry(
    "attention backend",
    {"CPU_ATTN": "quire.attention.cpu:CpuAttention", "TRITON_ATTN": "quire.attention.triton:TritonAttention"},
)
