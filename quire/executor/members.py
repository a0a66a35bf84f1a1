"""Members: what the workers of an executor live and die with: processes of this host, other machines, actors of Ray.

In: how a worker is started (`WorkerBoot`, by rank). Out: members, each with a descriptor that turns readable when it is
gone (`notice`), and the reason in words. Must not know: verbs, or what a worker computes.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from quire.base.clock import now
from quire.base.procs import Child

MAIN = "quire.executor.remote:main"
SAID = 1  # exit code of a worker that has said why
_DEATH_NOTICE_S = 0.5  # how much later than its peers' complaints the notice of a worker's death may come


class WorkerBoot(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker is started with."""

    rank: int
    num_workers: int
    meeting: str  # a URL at which the workers find each other, for what they exchange among themselves; "": one alone
    folder: str  # of the mailboxes; of no use where they have addresses
    mine: str
    theirs: str
    secret: bytes | None
    worker: str  # import path of what makes the worker
    config_type: str
    config: msgspec.Raw
    beat_s: float = 0.0  # seconds between two signs of life; 0: it shows none
    step_limit_s: float = 0.0  # after which a step that has not ended is worth the stacks of all threads; 0: never


class Member(Protocol):
    """One of them, with one worker or several."""

    notice: int  # a descriptor that turns readable once it is gone
    notice_s: float  # how much later than its peers' complaints that may be

    @property
    def alive(self) -> bool: ...

    @property
    def is_lost(self) -> bool:
        """Gone, and no worker of it has said why."""

    def why_dead(self) -> str:
        """In words that name it."""

    def stop(self, patience: float) -> None:
        """Wait so many seconds for it to leave by itself, then make it."""

    def close(self) -> None:
        """Stop it and give the descriptor back."""


Launch = Callable[[Sequence[WorkerBoot], Sequence[str]], Sequence[Member]]  # boots and names, both by rank


class WorkerProcess(Child):
    """A process of this host for one worker."""

    notice_s = _DEATH_NOTICE_S

    def __init__(self, boot: WorkerBoot, name: str) -> None:
        super().__init__(MAIN, msgspec.msgpack.encode(boot), name=name)

    @property
    def is_lost(self) -> bool:
        return self.exit_code not in (None, 0, SAID)


def on_this_host(boots: Sequence[WorkerBoot], names: Sequence[str]) -> list[WorkerProcess]:
    """A Launch."""
    return [WorkerProcess(boot, name) for boot, name in zip(boots, names, strict=True)]


class Departure:
    """A notice and its reason, for members that are no processes of ours."""

    def __init__(self) -> None:
        self.notice, self._closing = os.pipe()
        self._lock = threading.Lock()
        self._reason: str | None = None
        self._is_lost = False
        self._is_closed = False

    @property
    def reason(self) -> str | None:
        """None: it has not ended."""
        return self._reason

    @property
    def is_lost(self) -> bool:
        return self._is_lost

    def end(self, reason: str, *, is_lost: bool) -> None:
        """The first reason stays."""
        with self._lock:
            if self._reason is None:
                self._reason, self._is_lost = reason, is_lost
                os.close(self._closing)

    def close(self) -> None:
        self.end("it was closed", is_lost=False)
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                os.close(self.notice)


def why_dead(members: Sequence[Member]) -> str:
    return "; ".join(member.why_dead() for member in members if not member.alive)


def why_lost(members: Sequence[Member]) -> str:
    """Of members that went without a word, if some did: that breaks the connections of their peers, which may be heard
    before the notice of the death."""
    began = now()
    patience = max(member.notice_s for member in members) if len(members) > 1 else 0.0
    while not (lost := [member for member in members if member.is_lost]):
        if now() >= began + patience:
            return ""
        time.sleep(0.01)
    return "; ".join(member.why_dead() for member in lost)
