"""base/collector.py: no collections while much is made that stays, none of it young afterwards, all else as before."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Iterator

import pytest

from quire.base import collector
from quire.base.collector import no_collections

pytestmark = pytest.mark.usefixtures("frozen_afterwards")


class Node:
    """Tracked by the collector."""


@pytest.fixture(autouse=True)
def _collector_as_it_was() -> Iterator[None]:
    was_on, threshold = gc.isenabled(), gc.get_threshold()
    gc.unfreeze()  # others of this process may have frozen theirs
    collector._pause.someone_freezes = False
    gc.set_threshold(1 << 24)  # none by chance
    gc.enable()
    yield
    gc.unfreeze()
    gc.set_threshold(*threshold)
    (gc.enable if was_on else gc.disable)()


def is_in(node: Node, generation: int) -> bool:
    return any(one is node for one in gc.get_objects(generation))


def test_what_is_made_is_old_without_a_collection() -> None:
    with no_collections():
        made = Node()
        assert not gc.isenabled() and is_in(made, 0)
    assert is_in(made, 2) and gc.get_freeze_count() == 0


def test_it_is_on_again_afterwards_and_after_an_error() -> None:
    with pytest.raises(RuntimeError), no_collections():
        raise RuntimeError
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    with no_collections():
        pass
    assert not gc.isenabled()


def test_the_last_of_several_threads_turns_it_on() -> None:
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with no_collections():
            entered.set()
            leave.wait(60)

    thread = threading.Thread(target=other)
    with no_collections():
        thread.start()
        assert entered.wait(60)
    assert not gc.isenabled()
    leave.set()
    thread.join(60)
    assert gc.isenabled()


def test_a_finalizer_may_pause_collections_while_a_pause_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first collection after a pause may come while its end still has the lock."""
    ended = threading.Event()

    def collect() -> bool:
        monkeypatch.undo()
        with no_collections():
            ended.set()
        return True

    def pause() -> None:
        with no_collections():
            pass

    monkeypatch.setattr(collector, "_age", collect)
    thread = threading.Thread(target=pause, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive() and ended.is_set() and gc.isenabled()


def test_a_fork_collects_whatever_other_threads_were_doing() -> None:
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with no_collections(), collector._pause._lock:
            entered.set()
            leave.wait(60)

    thread = threading.Thread(target=other)
    thread.start()
    assert entered.wait(60)
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        is_on = gc.isenabled()
        with no_collections():
            is_off = not gc.isenabled()
        os._exit(0 if is_on and is_off and gc.isenabled() else 1)
    _, status = os.waitpid(child, 0)
    leave.set()
    thread.join(60)
    assert status == 0 and gc.isenabled()


def test_frozen_objects_stay_frozen() -> None:
    mine = Node()
    assert any(one is mine for one in gc.get_objects())
    gc.freeze()
    with no_collections():
        pass
    assert not any(one is mine for one in gc.get_objects())  # which leaves out what is frozen


def test_frozen_objects_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """To count them is to visit them all."""
    counts = iter([1])
    monkeypatch.setattr(gc, "get_freeze_count", lambda: next(counts))
    for _ in range(3):
        with no_collections():
            pass
    assert next(counts, None) is None and gc.isenabled()


def test_garbage_is_still_found() -> None:
    with no_collections():
        node = Node()
        node.itself = node  # type: ignore[attr-defined]
        alive = threading.Event()
        node.told = _Teller(alive)  # type: ignore[attr-defined]
        del node
    assert not alive.is_set()
    gc.collect()
    assert alive.is_set()


class _Teller:
    def __init__(self, event: threading.Event) -> None:
        self._event = event

    def __del__(self) -> None:
        self._event.set()
