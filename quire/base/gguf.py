"""The GGUF container: key/value metadata and a directory of tensors over one memory map.

Owns: reading the file's structure, fast (a 50,000-entry vocabulary in tens of milliseconds) and safely (every length
is checked against the file, so a truncated or hostile file is an error, never a crash or an endless loop).
Must not know: what the keys mean, or how a tensor type is decoded (loader/gguf_types.py).

    "GGUF" version:u32 num_tensors:u64 num_kv:u64 | kv… | tensor infos… | pad to alignment | tensor data
"""

from __future__ import annotations

import functools
import math
import os
import struct
from typing import Any, NamedTuple

from quire.base.mapped import MappedFile

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_F32 = 0  # the tensor type of plain float32
_MAX_COUNT = 1 << 24  # entries in one array, keys or tensors: far above any real file
_MAX_DEPTH = 4  # arrays inside arrays
_MAX_ALIGNMENT = 1 << 20
_MAX_NUMBERS = 1 << 48  # of a tensor


class GGUFError(ValueError):
    """The file is not a readable GGUF file."""


class TensorInfo(NamedTuple):
    name: str
    shape: tuple[int, ...]  # row-major, outermost first (the file stores it the other way round)
    type_id: int
    offset: int  # from the start of the file


def shared(path: str) -> GGUFFile:
    """The file, parsed once per process: configuration, tokenizer and weights all read the same one.

    Read only: callers must not change what `metadata` and `tensors` hold.
    """
    facts = os.stat(path)
    return _parsed(os.path.abspath(path), facts.st_mtime_ns, facts.st_size)


@functools.lru_cache(maxsize=2)
def _parsed(path: str, _changed: int, _size: int) -> GGUFFile:
    return GGUFFile(path)


class GGUFFile:
    """Open file; `metadata` is read eagerly, tensor bytes are views into the map."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}
        size = os.path.getsize(path)
        if size < 24:
            raise GGUFError(f"{path}: {size} bytes is too short for a GGUF file")
        self.file = MappedFile(path)
        self._map = self.file.map
        self._at = 0
        try:
            self._read()
        except (struct.error, IndexError) as wrong:
            raise GGUFError(f"{path}: truncated or corrupt GGUF file at byte {self._at} of {size} ({wrong})") from None

    def data(self, info: TensorInfo, num_bytes: int) -> memoryview:
        """`num_bytes` of a tensor, checked against the end of the file."""
        if info.offset + num_bytes > len(self._map):
            raise GGUFError(
                f"{self.path}: truncated: tensor {info.name!r} needs bytes {info.offset} to {info.offset + num_bytes}, "
                f"the file has {len(self._map)}"
            )
        return self.file.view(info.offset, num_bytes)

    def floats(self, name: str) -> list[float] | None:
        """The values of a small float32 tensor (rope factors), without a tensor library; None if there is none."""
        info = self.tensors.get(name)
        if info is None:
            return None
        if info.type_id != _F32 or len(info.shape) != 1:
            raise GGUFError(f"{self.path}: tensor {name!r} should be a float32 vector; it has type {info.type_id}")
        return list(struct.unpack(f"<{info.shape[0]}f", self.data(info, 4 * info.shape[0])))

    def _read(self) -> None:
        if self._map[:4] != b"GGUF":
            raise GGUFError(f"{self.path}: not a GGUF file (it starts with {self._map[:4]!r})")
        self._at = 4
        (version,) = self._take("I")
        if version not in (2, 3):
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            hint = " (written for big-endian machines)" if swapped in (2, 3) else ""
            raise GGUFError(
                f"{self.path}: GGUF version {version}{hint}; versions 2 and 3, little-endian, are supported"
            )
        num_tensors, num_keys = self._take("QQ")
        self._check_count(max(num_tensors, num_keys))
        for _ in range(num_keys):
            key = self._string()
            (kind,) = self._take("I")
            if key in self.metadata:
                raise GGUFError(f"{self.path}: the key {key!r} is there twice")
            self.metadata[key] = self._value(kind)
        raw = [self._tensor_info() for _ in range(num_tensors)]
        align = self.metadata.get("general.alignment", 32)
        if not isinstance(align, int) or not 1 <= align <= _MAX_ALIGNMENT:
            raise GGUFError(f"{self.path}: alignment {align!r} is not a number from 1 to {_MAX_ALIGNMENT}")
        start = -(-self._at // align) * align
        for info in raw:
            if info.name in self.tensors:
                raise GGUFError(f"{self.path}: the tensor {info.name!r} is there twice")
            self.tensors[info.name] = info._replace(offset=info.offset + start)

    def _tensor_info(self) -> TensorInfo:
        name = self._string()
        (num_dims,) = self._take("I")
        if num_dims > 8:
            raise GGUFError(f"{self.path}: tensor {name!r} claims {num_dims} dimensions")
        shape = self._take(f"{num_dims}Q")
        if math.prod(max(size, 1) for size in shape) > _MAX_NUMBERS:  # one of them may be 0
            raise GGUFError(f"{self.path}: tensor {name[:80]!r} claims the sizes {list(shape)}")
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

    def _value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array(depth + 1)
        if kind not in _SCALARS:
            raise GGUFError(f"{self.path}: unknown metadata type {kind} at byte {self._at}")
        return self._take(_SCALARS[kind])[0]

    def _array(self, depth: int) -> list[Any]:
        if depth > _MAX_DEPTH:
            raise GGUFError(f"{self.path}: arrays nested deeper than {_MAX_DEPTH} at byte {self._at}")
        (kind,) = self._take("I")
        (count,) = self._take("Q")
        self._check_count(count)
        if kind == _STRING:
            return self._strings(count)
        if kind in _SCALARS:
            return list(self._take(f"{count}{_SCALARS[kind]}"))
        return [self._value(kind, depth) for _ in range(count)]

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
