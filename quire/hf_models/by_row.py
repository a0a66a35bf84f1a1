"""Rows of a step one after another, each with transformers' own cache filled from Quire's blocks.

For models whose attention does not use transformers' table of attention functions, or that derive positions from the
length of the cache: they run unmodified, one request at a time, and what they append to the cache is
copied to the request's blocks. Slower than taps.py, but correct for every model that caches only keys and values.
Must not know: which model it is, how blocks are laid out in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from quire.hf_models.taps import CallShape, RefusalError
from quire.layers.batch import Batch, GroupStep, LayerCache
from quire.schema.kv import KVKind


class RowSpan(NamedTuple):
    """One row's tokens in a step: its index, the first position computed, their number and their offset."""

    row: int
    start: int
    num_tokens: int
    first: int


def spans_of(step: GroupStep) -> list[RowSpan]:
    spans, first = [], 0
    for row, (context, count) in enumerate(zip(step.context_lens, step.query_lens, strict=True)):
        if count:
            spans.append(RowSpan(row, context - count, count, first))
        first += count
    return spans


class RowMemory(Protocol):
    """Keys and values of rows, by layer."""

    def read(self, layer: str, span: RowSpan) -> tuple[Tensor, Tensor]:
        """Keys and values before the span: [1, Hkv, start, size] each."""
        ...

    def write(self, layer: str, span: RowSpan, k: Tensor, v: Tensor) -> None:
        """The span's own: [1, Hkv, count, size] each."""
        ...


@runtime_checkable
class RowCache(Protocol):
    """A layer's cache whose tokens can be read and written by slot."""

    def read(self, slots: Tensor, batch: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]: ...

    def write(self, slots: Tensor, k: Tensor, v: Tensor) -> None: ...


class PagedRows:
    """A step's rows in the blocks of the KV cache. `steps` by KV group, `groups`: the group of each layer."""

    def __init__(
        self,
        steps: Sequence[GroupStep],
        caches: Mapping[str, LayerCache],
        groups: Mapping[str, int],
        dtype: torch.dtype,
    ) -> None:
        self._steps, self._caches, self._groups, self._dtype = steps, caches, groups, dtype
        self._slots: dict[tuple[int, int], Tensor] = {}

    def read(self, layer: str, span: RowSpan) -> tuple[Tensor, Tensor]:
        return self._cache(layer).read(self._before(layer, span), 1, self._dtype)

    def write(self, layer: str, span: RowSpan, k: Tensor, v: Tensor) -> None:
        slots = self._steps[self._groups[layer]].slots[span.first : span.first + span.num_tokens]
        self._cache(layer).write(slots, k[0].transpose(0, 1), v[0].transpose(0, 1))

    def _cache(self, layer: str) -> RowCache:
        cache = self._caches[layer]
        if not isinstance(cache, RowCache):
            raise RefusalError(f"rows cannot be read one by one from a cache of type {type(cache).__name__}")
        return cache

    def _before(self, layer: str, span: RowSpan) -> Tensor:
        """Slots of the positions before the span; the same for every layer of a group."""
        group = self._groups[layer]
        if (group, span.row) not in self._slots:
            size, step = self._caches[layer].spec.block_size, self._steps[group]
            at = torch.arange(span.start, device=step.block_tables.device)
            line = span.row if step.row_index is None else step.row_index[span.row].long()
            self._slots[group, span.row] = step.block_tables[line][at // size].long() * size + at % size
        return self._slots[group, span.row]


class KeysOnly(DynamicCache):
    """transformers' cache for a model that caches only keys and values; a model that needs more is refused."""

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise RefusalError(
            "some of its layers have a recurrent state (state space, convolution, linear attention or an index)"
        )

    get_conv_state = update_conv_state = get_recurrent_state = update_recurrent_state = _refuse
    has_previous_state = update_indexer = _refuse


class ByRow:
    """`call(ids, positions, cache)` runs the model on one row and returns its hidden states [T, width]."""

    def __init__(self, call: Callable[[Tensor, Tensor, Any], Tensor]) -> None:
        self._call = call
        self.shapes: dict[str, CallShape] = {}  # by layer; filled by `record`

    def record(self, token_ids: Tensor, positions: Tensor) -> None:
        """Record what the model caches, from a row that starts with an empty cache."""
        cache = KeysOnly()
        self._call(token_ids, positions, cache)
        for index, layer in enumerate(cache.layers):
            if type(layer) is not DynamicLayer:
                raise RefusalError(f"layer {index} keeps a {type(layer).__name__}, not keys and values")
            if not layer.is_initialized:
                continue
            k, v = layer.keys, layer.values
            assert k is not None and v is not None  # it is initialized
            if k.ndim != 4 or v.ndim != 4 or k.shape[:3] != v.shape[:3] or k.shape[2] != len(token_ids):
                raise RefusalError(
                    f"layer {index} keeps tensors {list(k.shape)} and {list(v.shape)} for {len(token_ids)} tokens"
                )
            self.shapes[str(index)] = CallShape(k.shape[1], k.shape[3], v.shape[3], KVKind.FULL, 0)
        if not self.shapes:
            raise RefusalError("it stores no keys and values in its cache")

    def run(self, batch: Batch, spans: list[RowSpan], memory: RowMemory) -> Tensor:
        rows = []
        for span in spans:
            here = slice(span.first, span.first + span.num_tokens)
            cache = KeysOnly()
            if span.start:
                self._fill(cache, span, memory)
            rows.append(self._call(batch.token_ids[here], batch.positions[here], cache))
            for name in self.shapes:
                layer: Any = cache.layers[int(name)]
                memory.write(name, span, layer.keys[:, :, span.start :], layer.values[:, :, span.start :])
        return torch.cat(rows)

    def _fill(self, cache: DynamicCache, span: RowSpan, memory: RowMemory) -> None:
        for name in self.shapes:
            cache.update(*memory.read(name, span), int(name))
