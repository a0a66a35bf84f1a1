"""ProcessedItem items kept by key, the least recently used dropped first when their bytes exceed the limit.

Threads may share one. Must not know: what a key is made of.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

from quire.media.families.base import ProcessedItem
from quire.schema.media import ArrayData


class ProcessorCache:
    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = self.hits = self.misses = 0
        self._entries: OrderedDict[str, tuple[ProcessedItem, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: str) -> ProcessedItem | None:
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                self.misses += 1
                return None
            self.hits += 1
            self._entries.move_to_end(key)
            return entry[0]

    def put(self, key: str, item: ProcessedItem) -> None:
        size = sum(map(_num_bytes, item.arrays.values())) + len(item.text) + len(key) + 512
        if size > self.max_bytes:
            return
        with self._lock:
            self._drop(key)
            self._entries[key] = item, size
            self.num_bytes += size
            while self.num_bytes > self.max_bytes:
                self._drop(next(iter(self._entries)))

    def _drop(self, key: str) -> None:
        if (entry := self._entries.pop(key, None)) is not None:
            self.num_bytes -= entry[1]

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()
            self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)


def _num_bytes(array: Any) -> int:
    return len(array.data) if isinstance(array, ArrayData) else int(array.nbytes)
