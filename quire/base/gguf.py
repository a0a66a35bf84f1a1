"""The GGUF container: key/value metadata and a directory of tensors over one memory map.

Owns: reading the file's structure, fast (a 50,000-entry vocabulary in tens of milliseconds) and safely (every length
is checked against the file, so a truncated or hostile file is an error, never a crash or an endless loop).
Must not know: what the keys mean, or how a tensor type is decoded (loader/gguf_types.py).

    "GGUF" version:u32 num_tensors:u64 num_kv:u64 | kv… | tensor infos… | pad to alignment | tensor data
"""

from __future__ import annotations

import mmap
import os
import struct
from typing import Any, NamedTuple

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_COUNT = 1 << 28  # entries in one array, keys or tensors: far above any real file


class GGUFError(ValueError):
    """The file is not a readable GGUF file."""


class TensorInfo(NamedTuple):
    name: str
    shape: tuple[int, ...]  # row-major, outermost first (the file stores it the other way round)
    type_id: int
    offset: int  # from the start of the file


class GGUFFile:
    """Open file; `metadata` is read eagerly, tensor bytes are views into the map."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}
        size = os.path.getsize(path)
        if size < 24:
            raise GGUFError(f"{path}: {size} bytes is too short for a GGUF file")
        with open(path, "rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._at = 0
        try:
            self._read()
        except (struct.error, IndexError, UnicodeDecodeError) as wrong:
            raise GGUFError(f"{path}: truncated or corrupt GGUF file at byte {self._at} of {size} ({wrong})") from None

    def data(self, info: TensorInfo, num_bytes: int) -> memoryview:
        """`num_bytes` of a tensor, checked against the end of the file."""
        if info.offset + num_bytes > len(self._map):
            raise GGUFError(
                f"{self.path}: truncated: tensor {info.name!r} needs bytes {info.offset} to {info.offset + num_bytes}, "
                f"the file has {len(self._map)}"
            )
        return memoryview(self._map)[info.offset : info.offset + num_bytes]

    def _read(self) -> None:
        if self._map[:4] != b"GGUF":
            raise GGUFError(f"{self.path}: not a GGUF file (it starts with {self._map[:4]!r})")
        self._at = 4
        (version,) = self._take("I")
        if version not in (2, 3):
            raise GGUFError(f"{self.path}: GGUF version {version}; versions 2 and 3 are supported")
        num_tensors, num_keys = self._take("QQ")
        self._check_count(max(num_tensors, num_keys))
        for _ in range(num_keys):
            key = self._string()
            (kind,) = self._take("I")
            self.metadata[key] = self._value(kind)
        raw = [self._tensor_info() for _ in range(num_tensors)]
        align = self.metadata.get("general.alignment", 32)
        if not isinstance(align, int) or align < 1:
            raise GGUFError(f"{self.path}: alignment {align!r} is not a positive number")
        start = -(-self._at // align) * align
        self.tensors = {t.name: t._replace(offset=t.offset + start) for t in raw}

    def _tensor_info(self) -> TensorInfo:
        name = self._string()
        (num_dims,) = self._take("I")
        if num_dims > 8:
            raise GGUFError(f"{self.path}: tensor {name!r} claims {num_dims} dimensions")
        shape = self._take(f"{num_dims}Q")
        type_id, offset = self._take("IQ")
        return TensorInfo(name, tuple(reversed(shape)), type_id, offset)

    def _take(self, form: str) -> tuple[Any, ...]:
        values = struct.unpack_from("<" + form, self._map, self._at)
        self._at += struct.calcsize("<" + form)
        return values

    def _string(self) -> str:
        (length,) = self._take("Q")
        if self._at + length > len(self._map):
            raise GGUFError(f"{self.path}: truncated: a string of {length} bytes runs past the end of the file")
        text = self._map[self._at : self._at + length].decode("utf-8", "surrogateescape")
        self._at += length
        return text

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array()
        if kind not in _SCALARS:
            raise GGUFError(f"{self.path}: unknown metadata type {kind} at byte {self._at}")
        return self._take(_SCALARS[kind])[0]

    def _array(self) -> list[Any]:
        (kind,) = self._take("I")
        (count,) = self._take("Q")
        self._check_count(count)
        if kind == _STRING:
            return self._strings(count)
        if kind in _SCALARS:
            return list(self._take(f"{count}{_SCALARS[kind]}"))
        return [self._value(kind) for _ in range(count)]

    def _strings(self, count: int) -> list[str]:
        """The hot loop of start-up: hundreds of thousands of short strings."""
        data, at, unpack = self._map, self._at, struct.Struct("<Q").unpack_from
        end, out = len(data), []
        for _ in range(count):
            (length,) = unpack(data, at)
            at += 8
            if at + length > end:
                raise GGUFError(f"{self.path}: truncated: a string of {length} bytes runs past the end of the file")
            out.append(data[at : at + length].decode("utf-8", "surrogateescape"))
            at += length
        self._at = at
        return out

    def _check_count(self, count: int) -> None:
        if count > _MAX_COUNT or count > len(self._map):
            raise GGUFError(f"{self.path}: a count of {count} cannot be right in a file of {len(self._map)} bytes")
