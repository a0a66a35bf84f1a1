"""EngineAdapters: the adapters that requests may name, by id and by name; and the reading of their files meanwhile.

In: what callers load and unload, and the adapters that requests bring along. Out: requests that know which load they
mean, reads begun on the workers, requests whose adapter could not be read. Slots and copies are the scheduler's
(sched/adapter_slots.py); files are the workers', who read them in a thread of their own: the loop only asks whether
they are done. Must not know: tensors, sockets.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from quire.executor.base import Executor, WorkerProtocol
from quire.sched.adapter import AdapterState, LoadedAdapter
from quire.schema.adapters import AdapterRead, LoRARequest
from quire.schema.errors import InputError
from quire.schema.messages import EngineRequest

if TYPE_CHECKING:
    from quire.sched.adapter_slots import AdapterSlots

NOT_ENABLED = "this engine serves no adapters: start with enable_lora=True (--enable-lora)"


class AdapterLoad:
    """One caller that waits until an adapter is read, and why it could not be."""

    def __init__(self, adapter: LoadedAdapter) -> None:
        self.adapter = adapter
        self.error: str | None = None

    @property
    def is_over(self) -> bool:
        adapter = self.adapter
        is_read = adapter.state is AdapterState.READY or adapter.slot > 0
        return is_read or self.error is not None or not adapter.is_current


class EngineAdapters:
    def __init__(self, executor: Executor, slots: AdapterSlots) -> None:
        self._executor, self.slots = executor, slots
        self._by_id: dict[int, LoadedAdapter] = {}
        self._by_name: dict[str, LoadedAdapter] = {}
        self._loads: list[AdapterLoad] = []  # that somebody waits for
        self._reads: dict[int, list[AdapterRead]] = {}  # by serial: what some of several ranks have read

    # ---- requests

    def resolve(self, request: EngineRequest) -> EngineRequest:
        """The same request, which knows the load that it means."""
        if request.lora_name is None:
            return request
        if request.lora_path is not None:
            adapter = self._known(request.lora_id, request.lora_name, request.lora_path)
        elif (named := self._by_name.get(request.lora_name)) is not None:
            adapter = named
        else:
            raise InputError(f"no adapter is loaded under the name {request.lora_name!r}", param="model")
        return msgspec.structs.replace(
            request, lora_id=adapter.lora_id, lora_name=adapter.name, lora_generation=adapter.serial
        )

    def _known(self, lora_id: int, name: str, path: str) -> LoadedAdapter:
        """As it is, or a new load if this id meant another adapter until now."""
        adapter = self._by_id.get(lora_id)
        if adapter is not None and (adapter.name, adapter.path) == (name, path):
            return adapter
        return self._register(lora_id, name, path)

    def _register(self, lora_id: int, name: str, path: str) -> LoadedAdapter:
        before = self._by_id.get(lora_id)
        adapter = self._by_id[lora_id] = self.slots.add(lora_id, name, path)
        if before is not None:
            self._forget_name(before)
            self.slots.retire(before)
        self._by_name[name] = adapter
        return adapter

    def _forget_name(self, adapter: LoadedAdapter) -> None:
        if self._by_name.get(adapter.name) is adapter:
            del self._by_name[adapter.name]

    # ---- verbs

    def add(self, lora: LoRARequest) -> tuple[Callable[[], bool], Callable[[], bool]]:
        """Begin to read it; (whether that is over, what answers then). What was loaded under its id stays in use until
        the new one is there."""
        before = self._by_id.get(lora.lora_int_id)
        same = before is not None and (before.name, before.path) == (lora.lora_name, lora.lora_path)
        if before is not None and same and not lora.load_inplace:
            adapter = before
        else:
            adapter = self.slots.add(lora.lora_int_id, lora.lora_name, lora.lora_path)
        load = AdapterLoad(adapter)
        self._loads.append(load)
        self.slots.want(adapter)

        def finish() -> bool:
            self._loads.remove(load)
            if load.error is not None:
                self.slots.retire(adapter)
                raise InputError(load.error, param="lora_path")
            if not adapter.is_current:
                raise InputError(
                    f"LoRA adapter {adapter.name!r} was removed or replaced before it was read", param="lora_path"
                )
            if self._by_id.get(adapter.lora_id) is not adapter:
                self._enter(adapter)
            return True

        return (lambda: load.is_over), finish

    def _enter(self, adapter: LoadedAdapter) -> None:
        before = self._by_id.get(adapter.lora_id)
        if before is not None:
            self._forget_name(before)
            self.slots.retire(before)
        self._by_id[adapter.lora_id] = self._by_name[adapter.name] = adapter

    def remove(self, lora_id: int) -> bool:
        adapter = self._by_id.pop(lora_id, None)
        if adapter is None:
            return False
        self._forget_name(adapter)
        self.slots.retire(adapter)
        return True

    def pin(self, lora_id: int) -> bool:
        adapter = self._by_id.get(lora_id)
        if adapter is None:
            raise InputError(f"no adapter has lora_int_id {lora_id}: add_lora comes first", param="lora_id")
        pinned = sum(one.is_pinned for one in self._by_id.values())
        if not adapter.is_pinned and pinned + 1 >= self.slots.num_slots:
            raise InputError(
                f"{pinned} adapters are pinned and max_loras is {self.slots.num_slots}: one slot must stay for others",
                param="lora_id",
                value=lora_id,
            )
        adapter.is_pinned = True
        return True

    def list_ids(self) -> list[int]:
        """Of those in memory."""
        loaded = [one for one in self._by_id.values() if one.state is AdapterState.READY or one.slot]
        return sorted(one.lora_id for one in loaded)

    # ---- reading

    @property
    def is_busy(self) -> bool:
        """Something is being read, or shall be."""
        return self.slots.num_reading > 0 or self.slots.has_demand

    def begin_reads(self) -> None:
        """What requests wait for, as far as there is room in host memory."""
        for adapter in self.slots.take_reads():
            self._executor.ask(WorkerProtocol.read_adapter, adapter.source)
        for serial in self.slots.take_dropped():
            self._executor.ask(WorkerProtocol.drop_adapter, serial)

    def take_read(self, timeout: float) -> list[tuple[LoadedAdapter, str]]:
        """Note what workers have read; those that could not be, and why."""
        failed = []
        for read in self._read_by_all(self._executor.ask(WorkerProtocol.poll_adapters, timeout)):
            adapter = self.slots.finish_read(read.serial, failed=read.error is not None)
            if adapter is None:
                continue
            if read.error is None:
                adapter.digest = read.digest
                continue
            failed.append((adapter, read.error))
            for load in self._loads:
                if load.adapter is adapter:
                    load.error = read.error
            if self._by_id.get(adapter.lora_id) is adapter:
                self.remove(adapter.lora_id)
        return failed

    def _read_by_all(self, by_rank: list[list[AdapterRead]]) -> Iterator[AdapterRead]:
        """Each read once, when every rank is done with it; the first error of any."""
        for read in (read for reads in by_rank for read in reads):
            done = self._reads.setdefault(read.serial, [])
            done.append(read)
            if len(done) == len(by_rank):
                del self._reads[read.serial]
                yield next((one for one in done if one.error is not None), self._alike(done))

    def _alike(self, done: list[AdapterRead]) -> AdapterRead:
        """What all ranks have read: the same, which on several machines may not be so. Ranks with other weights would
        have other layers changed, and other steps captured."""
        if len({read.digest for read in done}) == 1:
            return done[0]
        adapter = self.slots.by_serial.get(done[0].serial)
        which = "an adapter" if adapter is None else f"LoRA adapter {adapter.name!r} in {adapter.path}"
        return AdapterRead(serial=done[0].serial, error=f"{which} is not the same for all ranks of the engine")


def media_adapters(folders: Mapping[str, str] | None) -> dict[str, LoRARequest]:
    """Those of default_mm_loras, by kind of media: named after it, with ids from 1 in the order of these names."""
    return {
        kind: LoRARequest(kind, number, absolute(folder))
        for number, (kind, folder) in enumerate(sorted((folders or {}).items()), 1)
    }


def lora_request_of(value: Any) -> LoRARequest:
    """What a caller gave, in this process or over a wire; one error for whatever is wrong with it."""
    if isinstance(value, LoRARequest):
        return value
    try:
        return msgspec.convert(value, LoRARequest, from_attributes=True)
    except (msgspec.ValidationError, ValueError) as wrong:
        raise InputError(f"lora_request must be a LoRARequest: {wrong}", param="lora_request") from None


def absolute(path: str) -> str:
    """As the caller's process means it: the engine may have another working directory."""
    expanded = os.path.expanduser(path)
    return os.path.abspath(expanded) if os.path.exists(expanded) else path


def located(value: Any) -> LoRARequest:
    """The same adapter with its absolute path, so that loading it and using it mean one folder."""
    lora = lora_request_of(value)
    return msgspec.structs.replace(lora, lora_path=absolute(lora.lora_path))


def pair_adapters(value: Any, num_prompts: int) -> list[LoRARequest | None]:
    """One adapter for all prompts, or one for each, of which any may be None."""
    if value is None or not isinstance(value, list | tuple):
        return [None if value is None else lora_request_of(value)] * num_prompts
    if len(value) != num_prompts:
        raise InputError(f"{len(value)} lora_request were given for {num_prompts} prompts", param="lora_request")
    return [None if one is None else lora_request_of(one) for one in value]
