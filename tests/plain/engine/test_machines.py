"""engine/machines.py and engine/connect.py, without other machines: limits, what is given back, threads that fail."""

from __future__ import annotations

import gc
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.base import env
from quire.base.lifeline import Lifeline, LostError, free_port
from quire.config import EngineArgs, EngineConfig
from quire.engine import connect, machines
from quire.engine.machines import EnginesHello, EnginesRefused, Machines, Seat, _RemoteMachine
from quire.schema.errors import ConfigError
from tests.fake_engine import use_fake, write_model

HOST = "127.0.0.2"


class Line(Lifeline):
    """To a machine that says these things; without a connection."""

    def __init__(self, *said: Any) -> None:
        self.peer = "10.0.0.2"
        self._said, self.sent, self.closed = iter(said), list[Any](), threading.Event()

    def receive(self) -> bytes:
        word = next(self._said)
        if isinstance(word, Exception):
            raise word
        return machines._encode(word)

    def send(self, message: bytes) -> None:
        self.sent.append(machines._TO.decode(message))

    def hide(self, secret: bytes) -> bytes:
        return secret

    def close(self) -> None:
        self.closed.set()


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Where private folders are made: a path short enough for sockets, which that of tmp_path may not be."""
    with tempfile.TemporaryDirectory(prefix="q") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield folder


@pytest.fixture
def config(tmp_path: Path, temporary: str, monkeypatch: pytest.MonkeyPatch) -> EngineConfig:
    use_fake(monkeypatch)
    monkeypatch.setenv("QUIRE_NODE_KEY", "a key that all machines know")
    env.forget_all()
    args = EngineArgs(
        model=write_model(tmp_path / "model"), data_parallel_size=3, data_parallel_size_local=1,
        data_parallel_address=HOST, data_parallel_rpc_port=free_port(HOST),
    )  # fmt: skip
    return args.create_engine_config()


@pytest.fixture
def waiting(config: EngineConfig) -> Iterator[Machines]:
    made = Machines(config)
    yield made
    for member in made.members:
        member.close()


def in_use(temporary: str) -> tuple[int, list[str]]:
    gc.collect()  # pulses, which are mapped files
    return len(os.listdir("/proc/self/fd")), os.listdir(temporary)


def check_given_back(temporary: str, before: tuple[int, list[str]]) -> None:
    """Threads that read sockets close them when they end, maybe a moment later, and maybe of a test before this one."""
    deadline = time.monotonic() + 60
    while (now := in_use(temporary))[0] > before[0] and time.monotonic() < deadline:
        time.sleep(0.02)
    assert now[0] <= before[0] and now[1] == before[1]


def test_silence_may_last_longer_than_between_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert machines._limit() == 10.0 > env.NODE_TIMEOUT_S.get()
    monkeypatch.setenv("QUIRE_NODE_TIMEOUT_S", "2.5")
    env.forget_all()
    assert machines._limit() == 2.5


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (LostError("gone"), "machine 10.0.0.2 with engines 1, 2 is lost: gone"),
        (RuntimeError("ours"), "hearing from machine 10.0.0.2 with engines 1, 2 failed: ours"),
    ],
)
def test_however_a_machine_is_no_longer_heard_its_engines_end(wrong: Exception, said: str) -> None:
    seats, line = [Seat(1), Seat(2)], Line(wrong)
    machine = _RemoteMachine(line, seats)
    machine.follow(b"secret")
    assert line.closed.is_set() and machine.left.is_set()
    for seat in seats:
        assert seat.settled.is_set() and seat.departure.reason is not None and said in seat.departure.reason
        seat.close()


def test_a_machine_that_cannot_be_admitted_is_let_go(waiting: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    line = Line(EnginesHello("0", 3, 1, 2, {}))
    waiting._welcome(line)
    assert line.closed.is_set() and isinstance(line.sent[0], EnginesRefused)
    assert line.sent[0].reason.startswith("Quire is 0 there")

    def fail(*args: Any) -> str:
        raise RuntimeError("ours")

    monkeypatch.setattr(waiting, "_why_not", fail)
    line = Line(EnginesHello("0", 3, 1, 2, {}))
    waiting._welcome(line)
    assert line.closed.is_set() and not line.sent
    assert not any(seat.machine for seat in waiting._seats.values())


def test_machines_are_told_why(waiting: Machines) -> None:
    line = Line(LostError("gone"))
    waiting._machines.append(_RemoteMachine(line, []))
    waiting.members[0].begin_close("engine 0: no memory")
    waiting.members[1].begin_close()  # they know
    waiting._machines[0].left.set()
    assert [word.reason for word in line.sent] == ["engine 0: no memory"]


def test_a_port_that_is_taken_leaves_nothing(waiting: Machines, config: EngineConfig, temporary: str) -> None:
    before = in_use(temporary)
    with pytest.raises(ConfigError, match="cannot listen"):
        Machines(config)
    check_given_back(temporary, before)


@pytest.mark.parametrize("name", ["ProcessClient", "begin_engine"])
def test_a_start_that_fails_gives_all_back(
    name: str, config: EngineConfig, temporary: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise MemoryError("no more")

    for member in Machines(config).members:  # a process opens some files once, for all sockets
        member.close()
    monkeypatch.setattr(f"quire.engine.process_client.{name}", fail)
    before = in_use(temporary)
    with pytest.raises(MemoryError):
        connect.start_several(config)
    check_given_back(temporary, before)
    for member in (again := Machines(config)).members:  # the port is free
        member.close()
    assert again._is_left
