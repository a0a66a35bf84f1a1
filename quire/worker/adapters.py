"""WorkerAdapters: the adapters of one device: copies in host memory, read by a thread of their own, and its slots.

In: AdapterSource to read, AdapterPlacement of plans. Out: AdapterRead. The engine decides what is read, dropped and
placed (sched/adapter_slots.py). A slot holds what was placed there until another adapter is, whatever becomes of the
copy. Must not know: requests, file formats (a reader is handed in).
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import numpy as np

from quire.base.log import logger
from quire.schema.adapters import AdapterPlacement, AdapterRead, AdapterSource
from quire.schema.errors import QuireError

if TYPE_CHECKING:
    from quire.layers.adapters import StepAdapters
    from quire.layers.places import AdaptedLayer
    from quire.loader.adapter import HostAdapter
    from quire.worker.spread_adapters import SpreadAdapters

_log = logger(__name__)
CLOSE_PATIENCE_S = 5.0


class WorkerAdapters:
    def __init__(
        self, read: Callable[[str], HostAdapter], layers: Iterable[AdaptedLayer], step: StepAdapters,
        spread: SpreadAdapters | None = None,  # None: no experts are at other engines
    ) -> None:  # fmt: skip
        self._read, self._layers, self._spread = read, list(layers), spread
        self.step = step  # of these layers
        self._apart: set[int] = set()  # slots whose adapters no graph holds
        self._copies: dict[int, HostAdapter] = {}  # by serial
        self._wanted: set[int] = set()  # being read, or to be
        self._lock = threading.Lock()  # over the three above
        self._inbox: queue.SimpleQueue[AdapterSource | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[AdapterRead] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def begin(self, source: AdapterSource) -> None:
        self._wanted.add(source.serial)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="read adapters", daemon=True)
            self._thread.start()
        self._inbox.put(source)

    def poll(self, timeout: float) -> list[AdapterRead]:
        done: list[AdapterRead] = []
        try:
            if timeout > 0:
                done.append(self._done.get(timeout=timeout))
            while True:
                done.append(self._done.get_nowait())
        except queue.Empty:
            return done

    def drop(self, serial: int) -> None:
        with self._lock:
            self._wanted.discard(serial)
            self._copies.pop(serial, None)

    def place(self, placements: Iterable[AdapterPlacement]) -> None:
        for placement in placements:
            with self._lock:
                copy = self._copies.get(placement.serial)
            if copy is None:
                raise RuntimeError(f"a plan places adapter {placement.serial}, of which there is no copy")
            copy.fill(placement.slot, self._layers)
            if self._spread is not None:
                self._spread.place(placement.slot, copy)
            self._apart.discard(placement.slot)
            if not copy.in_graphs:
                self._apart.add(placement.slot)

    def in_graphs(self, slots: np.ndarray) -> bool:
        """Whether a step whose rows have these slots may be replayed as a graph."""
        return self._apart.isdisjoint(slots.tolist())

    def close(self) -> None:
        """What waits to be read is not read any more. A read that takes longer than CLOSE_PATIENCE_S is left alone."""
        if self._thread is None:
            return
        with self._lock:
            self._wanted.clear()
        self._inbox.put(None)
        self._thread.join(CLOSE_PATIENCE_S)
        if self._thread.is_alive():
            _log.warning("An adapter is still being read: it is left to its thread, which ends with the program")
        self._thread = None

    def _run(self) -> None:
        while (source := self._inbox.get()) is not None:
            self._done.put(self._read_one(source))

    def _read_one(self, source: AdapterSource) -> AdapterRead:
        if source.serial not in self._wanted:
            return AdapterRead(serial=source.serial, error="it was removed before it was read")
        try:
            adapter = self._read(source.path)
        except (QuireError, OSError) as wrong:
            return AdapterRead(serial=source.serial, error=f"LoRA adapter {source.name!r}: {wrong}")
        except Exception as wrong:  # noqa: BLE001  # files are others': whatever they do is an answer
            _log.exception("reading LoRA adapter %r failed", source.name)
            return AdapterRead(serial=source.serial, error=f"LoRA adapter {source.name!r} cannot be read: {wrong!r}")
        if source.digest and adapter.digest != source.digest:
            reason = (
                f"LoRA adapter {source.name!r}: the weights in {source.path} have changed since it was loaded, and its "
                "copy in memory had to make room for others (max_cpu_loras): load it again"
            )
            return AdapterRead(serial=source.serial, error=reason)
        with self._lock:
            if source.serial in self._wanted:
                self._copies[source.serial] = adapter
        return AdapterRead(serial=source.serial, num_bytes=adapter.num_bytes, digest=adapter.digest)
