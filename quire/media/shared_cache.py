"""SharedCache: ProcessedItems in memory that several processes share; the oldest makes room for the newest.

The memory is a file without a name: who has its descriptor shares it, and it is gone with the last of them. It begins
with a table of the items in the order in which they came, behind which lie their bytes in a ring. A lock of the file
guards both; what a process that dies holds, the system lets go, and an item counts only once all of it is written.
Must not know: what a key is made of.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from quire.base.memory_file import memory_file
from quire.media.families.base import ProcessedItem, array_data
from quire.schema.errors import ConfigError
from quire.schema.media import ArrayData

_SLOTS = 4096  # items at most
_KEY = 32  # bytes
_ROW = _KEY + 16  # a key, where its bytes begin counted over all rounds of the ring, how many they are
_HEAD = 24  # the number of the oldest item, that of the next one, where the next one begins
_TABLE = _HEAD + _SLOTS * _ROW


class _Entry(msgspec.Struct, array_like=True):
    text: str
    num_vectors: int
    arrays: dict[str, ArrayData]


def shared_memory(max_bytes: int) -> int:
    """A descriptor of so much memory, and room for the table. Nothing is used before it is written."""
    try:
        descriptor = memory_file("quire-media")
    except OSError as wrong:
        raise _unshared(wrong) from None
    try:
        os.ftruncate(descriptor, _TABLE + max_bytes)
    except OSError as wrong:
        os.close(descriptor)
        raise _unshared(wrong) from None
    return descriptor


def _unshared(wrong: Exception) -> ConfigError:
    return ConfigError(
        f"mm_processor_cache_type='shm' needs memory that processes can share: {wrong}", param="mm_processor_cache_type"
    )


class SharedCache:
    def __init__(self, descriptor: int, most_bytes: int) -> None:
        """`most_bytes`: of one item."""
        self.max_bytes = os.fstat(descriptor).st_size - _TABLE
        self.hits = self.misses = 0
        self._most = min(most_bytes, self.max_bytes)
        self._descriptor = descriptor
        try:
            self._memory = mmap.mmap(descriptor, _TABLE + self.max_bytes)
        except (OSError, OverflowError, ValueError) as wrong:
            os.close(descriptor)
            raise ConfigError(
                f"mm_processor_cache_gb: {self.max_bytes} bytes of shared memory cannot be mapped: {wrong}",
                param="mm_processor_cache_gb",
            ) from None
        self._lock = threading.Lock()  # locks of files are those of processes, not of their threads

    def get(self, key: str) -> ProcessedItem | None:
        with self._held(fcntl.LOCK_SH):
            number = self._find(bytes.fromhex(key))
            if number is None:
                self.misses += 1
                return None
            self.hits += 1
            begin, size = self._place_of(number)
            start = _TABLE + begin % self.max_bytes
            data = self._memory[start : start + size]
        entry = msgspec.msgpack.decode(data, type=_Entry)
        return ProcessedItem(dict(entry.arrays), entry.text, entry.num_vectors)

    def put(self, key: str, item: ProcessedItem) -> None:
        arrays = {
            name: array if isinstance(array, ArrayData) else array_data(array) for name, array in item.arrays.items()
        }
        data = msgspec.msgpack.encode(_Entry(item.text, item.num_vectors, arrays))
        if len(data) > self._most:
            return
        name = bytes.fromhex(key)
        with self._held(fcntl.LOCK_EX):
            if self._find(name) is not None:
                return  # another process was faster
            first, last, begin = self._head()
            if begin % self.max_bytes + len(data) > self.max_bytes:  # an item lies in one piece
                begin += -begin % self.max_bytes
            while first < last and (
                last - first == _SLOTS or begin + len(data) - self._place_of(first)[0] > self.max_bytes
            ):
                first += 1
            self._set_head(first, last, begin)  # what is overwritten now is forgotten first
            start = _TABLE + begin % self.max_bytes
            self._memory[start : start + len(data)] = data
            row = _HEAD + last % _SLOTS * _ROW
            self._memory[row : row + _ROW] = name + _pack(begin, len(data))
            self._set_head(first, last + 1, begin + len(data))

    def clear(self) -> None:
        with self._held(fcntl.LOCK_EX):
            _, last, begin = self._head()
            self._set_head(last, last, begin)

    def close(self) -> None:
        self._memory.close()
        os.close(self._descriptor)

    def __len__(self) -> int:
        with self._held(fcntl.LOCK_SH):
            first, last, _ = self._head()
            return last - first

    @contextmanager
    def _held(self, kind: int) -> Iterator[None]:
        with self._lock:
            fcntl.lockf(self._descriptor, kind)
            try:
                yield
            finally:
                fcntl.lockf(self._descriptor, fcntl.LOCK_UN)

    def _find(self, name: bytes) -> int | None:
        """The number of the item."""
        first, last, _ = self._head()
        at = _HEAD
        while (at := self._memory.find(name, at, _TABLE)) >= 0:
            slot, rest = divmod(at - _HEAD, _ROW)
            number = last - 1 - (last - 1 - slot) % _SLOTS  # the newest that can be there
            if rest == 0 and number >= first:
                return number
            at += 1
        return None

    def _place_of(self, number: int) -> tuple[int, int]:
        row = _HEAD + number % _SLOTS * _ROW + _KEY
        begin, size = (int.from_bytes(self._memory[at : at + 8], "little") for at in (row, row + 8))
        return begin, size

    def _head(self) -> tuple[int, int, int]:
        first, last, begin = (int.from_bytes(self._memory[at : at + 8], "little") for at in (0, 8, 16))
        return first, last, begin

    def _set_head(self, first: int, last: int, begin: int) -> None:
        self._memory[:_HEAD] = _pack(first, last, begin)


def _pack(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(8, "little") for number in numbers)
