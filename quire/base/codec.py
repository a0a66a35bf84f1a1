"""Messages to frames and back: msgspec MessagePack, large bytes beside the message instead of inside it.

In: a message of one declared type. Out: frames; frame 0 is the message, each further frame is one Buffer's bytes,
sent without a copy. Nothing is pickled, so bytes from a peer can at worst be refused: a frame that cannot be read is
a CodecError. Must not know: which messages exist, or what carries the frames.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec

Message = TypeVar("Message")
Frame = bytes | bytearray | memoryview

_INLINE, _BESIDE = 1, 2  # extension codes: bytes in place, or the number of a further frame
_INLINE_LIMIT = 4096  # a smaller buffer is cheaper to copy than to send as a frame of its own
_MAX_FRAMES = 4096
MAX_BYTES = 1 << 31
_reading = threading.Lock()  # of annotations


class CodecError(ValueError):
    """Frames that are no message of the expected type, or a value that has no plain form."""


class Buffer:
    """Bytes that travel beside the message when they are large. `data` is read-only for whoever receives it."""

    __slots__ = ("data",)

    def __init__(self, data: Frame) -> None:
        self.data = memoryview(data).cast("B")

    def __len__(self) -> int:
        return len(self.data)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Buffer) and self.data == other.data

    def __hash__(self) -> int:
        return hash(bytes(self.data))


class Codec(Generic[Message]):
    """Encodes anything plain; decodes `kind` (a struct, or a union of tagged structs) and nothing else."""

    def __init__(self, kind: Any, *, max_bytes: int = MAX_BYTES) -> None:
        self._kind = kind
        self._max_bytes = max_bytes
        self._is_known = False  # to msgspec

    def encode(self, message: Message) -> list[Frame]:
        frames: list[Frame] = [b""]

        def place(value: Any) -> Any:
            if not isinstance(value, Buffer):
                raise CodecError(
                    f"a {type(value).__module__}.{type(value).__qualname__} cannot cross to another process: "
                    "only None, numbers, strings, bytes, lists, tuples, sets and dicts of these can"
                )
            if len(value) <= _INLINE_LIMIT:
                return msgspec.msgpack.Ext(_INLINE, bytes(value.data))
            frames.append(value.data)
            return msgspec.msgpack.Ext(_BESIDE, (len(frames) - 1).to_bytes(4, "little"))

        try:
            frames[0] = msgspec.msgpack.encode(message, enc_hook=place)
        except CodecError:
            raise
        except (TypeError, ValueError, OverflowError, RecursionError) as wrong:
            raise CodecError(f"{type(message).__name__} cannot be encoded: {wrong}") from wrong
        self._check(frames)
        return frames

    def decode(self, frames: Sequence[Frame]) -> Message:
        if not frames:
            raise CodecError("an empty message has no frames to read")
        self._check(frames)
        if not self._is_known:
            self._make_known()

        def find(code: int, data: memoryview) -> Buffer:
            if code == _INLINE:
                return Buffer(bytes(data))
            index = int.from_bytes(data, "little")
            if code != _BESIDE or not 0 < index < len(frames):
                raise CodecError(f"extension {code} names frame {index} of {len(frames)}")
            return Buffer(frames[index])

        try:
            message: Message = msgspec.msgpack.decode(frames[0], type=self._kind, ext_hook=find, dec_hook=_as_is)
        except CodecError:
            raise
        except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as wrong:
            raise CodecError(f"{len(frames[0])} bytes are not a message: {wrong}") from wrong
        return message

    def _make_known(self) -> None:
        """One thread at a time: msgspec reads the annotations of a struct when it is first decoded, and a second thread
        that uses what the first has half read ends the process (msgspec 0.22)."""
        with _reading:
            msgspec.msgpack.Decoder(self._kind)
            self._is_known = True

    def _check(self, frames: Sequence[Frame]) -> None:
        if len(frames) > _MAX_FRAMES:
            raise CodecError(f"a message has {len(frames)} frames; at most {_MAX_FRAMES} are allowed")
        total = sum(len(frame) for frame in frames)
        if total > self._max_bytes:
            raise CodecError(f"a message has {total} bytes; at most {self._max_bytes} are allowed")


def _as_is(kind: type, value: Any) -> Any:
    if isinstance(value, kind):
        return value
    raise CodecError(f"wanted {kind.__name__}, found {type(value).__name__}")
