"""LoadedAdapter: one load of one LoRA adapter, as requests and the scheduler share it. Must not know: gates, files."""

from __future__ import annotations

import enum

from quire.schema.adapters import AdapterSource


class AdapterState(enum.StrEnum):
    COLD = "cold"  # nothing but its path is known
    READING = "reading"
    READY = "ready"  # workers have a copy in host memory


class LoadedAdapter:
    """One load of one adapter. Compared by identity; `serial` never comes twice."""

    __slots__ = (
        "digest", "is_current", "is_pinned", "lora_id", "name", "num_live", "num_running", "path", "placed", "serial",
        "short_since", "slot", "state", "used", "wanted",
    )  # fmt: skip

    def __init__(self, serial: int, lora_id: int, name: str, path: str) -> None:
        self.serial, self.lora_id, self.name, self.path = serial, lora_id, name, path
        self.state = AdapterState.COLD
        self.digest = ""  # of its weights, once they were read
        self.slot = 0  # 0: none
        self.num_live = self.num_running = 0  # requests
        self.is_current = True  # False: removed or replaced, and gone with its last request
        self.is_pinned = False
        self.used = self.placed = self.wanted = 0  # steps
        self.short_since: int | None = None  # the step since which nothing but a slot is missing

    @property
    def source(self) -> AdapterSource:
        return AdapterSource(serial=self.serial, name=self.name, path=self.path, digest=self.digest)

    @property
    def lives_in_slot(self) -> bool:
        """Requests need it, there is no copy, and since it was removed or replaced its files may be others."""
        return not self.is_current and self.num_live > 0 and self.slot > 0 and self.state is not AdapterState.READY
