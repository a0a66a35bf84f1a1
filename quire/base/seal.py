"""Seal: proof that a message comes from somebody who knows this run's secret, unchanged, once and in its turn.

A sealed message has one frame more: its number on its channel (uint64, from 0) and HMAC-SHA256 over channel, number and
every frame, each with its length before it. A channel is one sender's messages to one receiver, so nothing can be sent
back to where it came from. It does not hide what is said: a network that may be listened to needs a tunnel.
Must not know what carries the frames, or what they mean.
"""

from __future__ import annotations

import hmac
import secrets
import struct
from collections import defaultdict
from collections.abc import Sequence
from hashlib import sha256

from quire.base.codec import Frame

_NUMBER = struct.Struct("<Q")
_LENGTH = struct.Struct("<Q")
_TAG_BYTES = _NUMBER.size + sha256().digest_size


class SealError(ValueError):
    """A message without a valid seal, or one that was seen before."""


class MissedError(SealError):
    """A valid message, and at least one before it never came."""


def new_secret() -> bytes:
    return secrets.token_bytes(32)


class Seal:
    def __init__(self, secret: bytes) -> None:
        if len(secret) < 16:
            raise ValueError(f"a secret of {len(secret)} bytes is too short; at least 16 are needed")
        self._secret = secret
        self._sent: defaultdict[bytes, int] = defaultdict(int)
        self._received: defaultdict[bytes, int] = defaultdict(int)

    def close(self, channel: bytes, frames: Sequence[Frame]) -> list[Frame]:
        """The frames of the channel's next message, and its seal."""
        number = self._sent[channel]
        self._sent[channel] = number + 1
        return [*frames, _NUMBER.pack(number) + self._code(channel, number, frames)]

    def open(self, channel: bytes, frames: Sequence[Frame]) -> list[Frame]:
        """The frames without their seal. SealError: it is not the next message of this channel."""
        if not frames or len(frames[-1]) != _TAG_BYTES:
            raise SealError("a message has no seal")
        tag, inner = bytes(frames[-1]), list(frames[:-1])
        (number,) = _NUMBER.unpack_from(tag)
        if not hmac.compare_digest(self._code(channel, number, inner), tag[_NUMBER.size :]):
            raise SealError("a message was sealed with another secret, or was changed on its way")
        if number != self._received[channel]:
            kind = MissedError if number > self._received[channel] else SealError
            raise kind(f"message {number} came where message {self._received[channel]} was due")
        self._received[channel] = number + 1
        return inner

    def _code(self, channel: bytes, number: int, frames: Sequence[Frame]) -> bytes:
        code = hmac.new(self._secret, digestmod=sha256)
        for part in (channel, _NUMBER.pack(number), *frames):
            code.update(_LENGTH.pack(len(part)))
            code.update(part)
        return code.digest()
