"""SharedCounts: unfinished requests by engine, of all processes that share several engines.

A file of one row of numbers per process, mapped by each. A process writes only its own row, so nothing is locked;
whoever reads sees what every process has under way at this moment, which no engine could report sooner. The row of a
process that died is cleared by whoever replaces it. Must not know: requests, how an engine is chosen.
"""

from __future__ import annotations

import mmap
import os

_FILE = "unfinished"
_CELL_BYTES = 8


class SharedCounts:
    def __init__(self, folder: str, *, num_engines: int, num_rows: int, row: int) -> None:
        """`row`: this process's own, which begins at zero."""
        self._num_engines, self._row = num_engines, row
        size = num_engines * num_rows * _CELL_BYTES
        descriptor = os.open(os.path.join(folder, _FILE), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if os.fstat(descriptor).st_size < size:
                os.ftruncate(descriptor, size)
            self._cells = memoryview(mmap.mmap(descriptor, size)).cast("q")
        finally:
            os.close(descriptor)
        self.clear(row)

    def add(self, engine: int, amount: int) -> None:
        self._cells[self._row * self._num_engines + engine] += amount

    def read(self) -> list[int]:
        cells, number = self._cells.tolist(), self._num_engines
        return [sum(cells[engine::number]) for engine in range(number)]

    def clear(self, row: int) -> None:
        """Its process is gone, and so are its requests."""
        first = row * self._num_engines
        for cell in range(first, first + self._num_engines):
            self._cells[cell] = 0
