"""Adapters in the scheduler: which of them are known, which lie in host memory, and which in a slot of the device.

A request with an adapter may join once the adapter has a slot. A slot is free when nobody that runs uses it; the one
used longest ago is taken first. Adapters are read into host memory in the order in which waiting requests want them;
a copy that a request waits for is not dropped before it was placed. A slot that others have waited for longer than
PATIENCE steps takes no new requests until it is empty, so that no adapter keeps its slot for ever. An adapter that was
removed or replaced while only its slot had its weights keeps the slot until its last request ends.

    COLD ──take_reads──▶ READING ──read──▶ READY (a copy in host memory) ──take──▶ has a slot
      ▲──────────────── the copy is dropped ──────┘

Must not know: files, tensors, who loads and unloads.
"""

from __future__ import annotations

from quire.sched.adapter import AdapterState, LoadedAdapter
from quire.sched.gates import Gate, SchedulerLoad
from quire.sched.request import Request
from quire.schema.adapters import AdapterPlacement

PATIENCE = 32  # steps


class AdapterSlots(Gate):
    """max_loras, max_cpu_loras: the gate that a request passes once its adapter has a slot, or can have one."""

    def __init__(self, num_slots: int, num_copies: int) -> None:
        self.num_slots, self.num_copies = num_slots, max(num_copies, num_slots)
        self.by_serial: dict[int, LoadedAdapter] = {}
        self.slots: list[LoadedAdapter | None] = [None] * num_slots  # slot n is entry n - 1
        self.step = 0
        self.num_reading = 0
        self.dropped: list[int] = []  # serials whose copies workers may forget
        self._live: dict[LoadedAdapter, None] = {}  # those that requests have
        self._demand: dict[LoadedAdapter, None] = {}  # to be read, in order
        # who has waited for a slot too long -> whose slot is being emptied
        self._draining: dict[LoadedAdapter, LoadedAdapter] = {}
        self._placed: list[AdapterPlacement] = []
        self._last_serial = 0

    # ---- adapters come and go

    def add(self, lora_id: int, name: str, path: str) -> LoadedAdapter:
        self._last_serial += 1
        adapter = self.by_serial[self._last_serial] = LoadedAdapter(self._last_serial, lora_id, name, path)
        return adapter

    def retire(self, adapter: LoadedAdapter) -> None:
        """No new request will name it; those that it has go on with it."""
        adapter.is_current = adapter.is_pinned = False
        self._forget_if_over(adapter)

    def admit_request(self, request: Request) -> None:
        """A request came in that names an adapter."""
        request.adapter = adapter = self.by_serial[request.source.lora_generation]
        adapter.num_live += 1
        self._live[adapter] = None

    def end_request(self, request: Request) -> None:
        """It ended, wherever it was; if it ran, `leave` was called before."""
        assert request.adapter is not None
        request.adapter.num_live -= 1
        if not request.adapter.num_live:
            del self._live[request.adapter]
        self._forget_if_over(request.adapter)

    def leave(self, request: Request) -> None:
        """It runs no longer: it ended or was preempted."""
        assert request.adapter is not None
        request.adapter.num_running -= 1

    def names_in_use(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Of adapters that running requests have, and of those that waiting ones have."""
        running = sorted({adapter.name for adapter in self._live if adapter.num_running})
        return tuple(running), tuple(sorted({a.name for a in self._live if a.num_live > a.num_running}))

    def _forget_if_over(self, adapter: LoadedAdapter) -> None:
        if adapter.is_current or adapter.num_live or self.by_serial.pop(adapter.serial, None) is None:
            return
        self._demand.pop(adapter, None)
        if adapter.slot:
            self.slots[adapter.slot - 1], adapter.slot = None, 0
        if adapter.state is not AdapterState.COLD:
            self._drop_copy(adapter)

    # ---- host memory

    def want(self, adapter: LoadedAdapter) -> None:
        """It is to be read, whether a request waits for it or not."""
        if adapter.state is AdapterState.COLD:
            adapter.wanted = self.step + 1
            self._demand[adapter] = None

    def take_reads(self) -> list[LoadedAdapter]:
        """Adapters to read now; room was made for their copies."""
        reads = []
        for adapter in list(self._demand):
            if not self._make_room():
                break
            del self._demand[adapter]
            adapter.state, adapter.used = AdapterState.READING, self.step
            self.num_reading += 1
            reads.append(adapter)
        return reads

    @property
    def has_demand(self) -> bool:
        return bool(self._demand)

    def take_dropped(self) -> list[int]:
        dropped, self.dropped = self.dropped, []
        return dropped

    def finish_read(self, serial: int, *, failed: bool) -> LoadedAdapter | None:
        """None: nobody wants it any more."""
        self.num_reading -= 1
        adapter = self.by_serial.get(serial)
        if adapter is not None:
            adapter.state = AdapterState.COLD if failed else AdapterState.READY
        return adapter

    def _make_room(self) -> bool:
        """One copy more fits, if need be without the one that was used longest ago."""
        copies = [adapter for adapter in self.by_serial.values() if adapter.state is not AdapterState.COLD]
        if len(copies) < self.num_copies:
            return True
        spare = [adapter for adapter in copies if self._may_drop(adapter)]
        if not spare:
            return False
        oldest = min(spare, key=lambda adapter: (adapter.slot > 0, adapter.used, adapter.serial))
        oldest.state = AdapterState.COLD
        self._drop_copy(oldest)
        return True

    def _may_drop(self, adapter: LoadedAdapter) -> bool:
        """Not one that is being read, that is on its way to a slot, or that files could not bring back."""
        if adapter.state is not AdapterState.READY or adapter.is_pinned or not adapter.is_current:
            return False
        return adapter.slot > 0 or adapter.wanted < self.step

    def _drop_copy(self, adapter: LoadedAdapter) -> None:
        self.dropped.append(adapter.serial)

    # ---- slots

    def open(self, load: SchedulerLoad) -> None:
        self.step += 1
        self._draining.clear()

    def bars(self, request: Request) -> bool:
        adapter = request.adapter
        if adapter is None:
            return False
        adapter.wanted = self.step
        if adapter.slot:
            return adapter in self._draining.values()
        if adapter.state is not AdapterState.READY:
            self.want(adapter)
            return True
        if self._free_slot() is not None:
            return False
        if adapter.short_since is None:
            adapter.short_since = self.step
        elif self.step - adapter.short_since >= PATIENCE:
            self._drain_for(adapter)
        return True

    def take(self, request: Request, count: int) -> None:
        adapter = request.adapter
        if adapter is None:
            return
        adapter.used = self.step
        if request.running:
            return
        adapter.num_running += 1
        if not adapter.slot:
            self._place(adapter)

    def take_placements(self) -> tuple[AdapterPlacement, ...]:
        placed, self._placed = tuple(self._placed), []
        return placed

    def _place(self, adapter: LoadedAdapter) -> None:
        slot = self._free_slot()
        assert slot is not None, f"adapter {adapter.name} joins without a slot"
        before = self.slots[slot - 1]
        if before is not None:
            before.slot = 0
        self.slots[slot - 1] = adapter
        adapter.slot, adapter.placed, adapter.short_since = slot, self.step, None
        self._placed.append(AdapterPlacement(adapter.serial, slot))

    def _free_slot(self) -> int | None:
        """An empty one, else the one used longest ago of those that nobody uses."""
        best: LoadedAdapter | None = None
        for index, adapter in enumerate(self.slots):
            if adapter is None:
                return index + 1
            if adapter.num_running or adapter.is_pinned or adapter.lives_in_slot:
                continue
            if best is None or adapter.used < best.used:
                best = adapter
        return None if best is None else best.slot

    def _drain_for(self, waiting: LoadedAdapter) -> None:
        if waiting in self._draining:
            return
        emptied = self._draining.values()
        movable = [a for a in self.slots if a is not None and not a.is_pinned and not a.lives_in_slot]
        holders = [adapter for adapter in movable if adapter not in emptied]
        if holders:
            self._draining[waiting] = min(holders, key=lambda adapter: (adapter.placed, adapter.slot))
