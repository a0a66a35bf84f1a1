"""EngineAdapters: adds that wait for a read, and what they are told when it fails or nobody wants it any more."""

from __future__ import annotations

from typing import Any

import pytest

from quire.engine.adapters import EngineAdapters
from quire.sched.adapter import AdapterState
from quire.sched.adapter_slots import AdapterSlots
from quire.schema.adapters import AdapterRead, AdapterSource, LoRARequest
from quire.schema.errors import InputError


class Reader:
    """An executor that reads when told to; a path in `broken` is an error."""

    def __init__(self) -> None:
        self.begun: list[AdapterSource] = []
        self.broken: set[str] = set()

    def ask(self, verb: Any, *args: Any) -> list[Any]:
        return [getattr(self, verb.__name__)(*args)]

    def read_adapter(self, source: AdapterSource) -> None:
        self.begun.append(source)

    def poll_adapters(self, timeout: float) -> list[AdapterRead]:
        begun, self.begun = self.begun, []
        return [
            AdapterRead(serial=one.serial, error="it is broken" if one.path in self.broken else None, digest=one.path)
            for one in begun
        ]

    def drop_adapter(self, serial: int) -> None:
        pass


def make() -> tuple[EngineAdapters, Reader]:
    executor: Any = Reader()
    return EngineAdapters(executor, AdapterSlots(1, 1)), executor


def known_and_cold(adapters: EngineAdapters) -> LoRARequest:
    """One that was read, and whose copy has made room for another."""
    lora = LoRARequest("a", 1, "/a")
    for one in (lora, LoRARequest("b", 2, "/b")):
        adapters.slots.step += 2
        is_over, finish = adapters.add(one)
        adapters.begin_reads()
        adapters.take_read(0.0)
        assert is_over() and finish()
    adapters.slots.step += 2
    assert adapters._by_id[1].state is AdapterState.COLD
    return lora


def test_two_adds_of_one_adapter_are_both_told_that_it_cannot_be_read() -> None:
    adapters, reader = make()
    lora = known_and_cold(adapters)
    reader.broken.add("/a")
    waiters = [adapters.add(lora), adapters.add(lora)]
    adapters.begin_reads()
    adapters.take_read(0.0)
    for is_over, finish in waiters:
        assert is_over()
        with pytest.raises(InputError, match="it is broken"):
            finish()
    assert not adapters._loads


def test_an_add_ends_when_its_adapter_is_removed_meanwhile() -> None:
    adapters, _ = make()
    lora = known_and_cold(adapters)
    is_over, finish = adapters.add(lora)
    adapters.begin_reads()
    assert not is_over()
    adapters.remove(1)
    adapters.take_read(0.0)
    assert is_over()
    with pytest.raises(InputError, match="'a' was removed or replaced before it was read"):
        finish()
    assert list(adapters._by_id) == [2] and not adapters._loads


def test_a_second_read_names_the_weights_of_the_first() -> None:
    adapters, reader = make()
    lora = known_and_cold(adapters)
    adapters.add(lora)
    adapters.begin_reads()
    assert [source.digest for source in reader.begun] == ["/a"]


class OtherFiles(Reader):
    """Two ranks on two machines, whose folders of that path have other files."""

    differ = True

    def ask(self, verb: Any, *args: Any) -> list[Any]:
        answers = super().ask(verb, *args)[0]
        if verb.__name__ != "poll_adapters":
            return [answers] * 2
        others = [AdapterRead(serial=one.serial, digest=one.digest + "other" * self.differ) for one in answers]
        return [answers, others]


def test_an_adapter_must_be_the_same_for_all_ranks() -> None:
    """Else they would change other layers, and capture other steps."""
    executor: Any = OtherFiles()
    adapters = EngineAdapters(executor, AdapterSlots(1, 1))
    for differ in (True, False):
        executor.differ = differ
        is_over, finish = adapters.add(LoRARequest("a", 1, "/a"))
        adapters.begin_reads()
        adapters.take_read(0.0)
        assert is_over()
        if differ:
            with pytest.raises(InputError, match="LoRA adapter 'a' in /a is not the same for all ranks"):
                finish()
        else:
            assert finish()
