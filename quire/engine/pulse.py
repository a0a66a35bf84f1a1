"""The engine's pulse: when it last got anywhere, and whether it has work. Seen from other processes without asking it.

The loop beats once per step; a server reads it to tell a busy engine from a stuck one. 24 bytes of memory, which a file
may back, so that several processes see the same. Times are of the monotonic clock, which all processes share.
"""

from __future__ import annotations

import mmap
import os
import struct
from typing import NamedTuple

from quire.base.clock import now

_FORM = struct.Struct("<dQQ")
_BUSY, _PAUSED = 1, 2
FILE = "pulse"


class Beat(NamedTuple):
    time: float  # of the last progress
    busy: bool  # requests are waiting or running, deferred ones aside
    paused: bool  # new requests are deferred
    steps: int


class Pulse:
    def __init__(self, folder: str | None = None) -> None:
        """With a folder: the pulse kept in a file there (made by whoever comes first, for this user only)."""
        self._steps = 0
        self._memory: bytearray | mmap.mmap = bytearray(_FORM.size)
        if folder is not None:
            descriptor = os.open(os.path.join(folder, FILE), os.O_RDWR | os.O_CREAT, 0o600)
            try:
                if os.fstat(descriptor).st_size < _FORM.size:
                    os.ftruncate(descriptor, _FORM.size)
                self._memory = mmap.mmap(descriptor, _FORM.size)
            finally:
                os.close(descriptor)

    def beat(self, *, busy: bool, paused: bool) -> None:
        self._steps += 1
        _FORM.pack_into(self._memory, 0, now(), busy * _BUSY | paused * _PAUSED, self._steps)

    def copy(self, beat: Beat) -> None:
        """Of an engine on another machine, its time told by the clock of this one."""
        _FORM.pack_into(self._memory, 0, beat.time, beat.busy * _BUSY | beat.paused * _PAUSED, beat.steps)

    def read(self) -> Beat:
        time, flags, steps = _FORM.unpack_from(self._memory, 0)
        return Beat(time, bool(flags & _BUSY), bool(flags & _PAUSED), steps)

    def silence(self, waiting_since: float | None) -> float:
        """Seconds without progress although there is work; 0.0 when all is well.

        `waiting_since`: when this process began to wait for answers, if it does: an engine that was frozen while
        idle does not even know that it has work.
        """
        beat = self.read()
        if beat.busy:
            return max(0.0, now() - beat.time)
        if beat.paused or waiting_since is None:
            return 0.0
        return max(0.0, now() - max(beat.time, waiting_since))
