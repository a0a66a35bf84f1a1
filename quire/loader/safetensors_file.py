"""One .safetensors file: its directory, checked completely before any tensor is touched, and its tensors.

In: a path. Out: names, sizes and tensors. Lazily the file is mapped: tensors are views of it, paged in on use, and
must not be written to. Eagerly it is read whole, which network file systems prefer.
Must not know: which tensors a model wants.

    header length:u64 | JSON header: {name: {dtype, shape, data_offsets}} | data, without holes or overlaps
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quire.base.mapped import MappedFile
from quire.checkpoint.limits import shown
from quire.loader.raw import as_bytes, cut
from quire.schema.errors import CheckpointError

_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "U16": torch.uint16,
    "I32": torch.int32, "U32": torch.uint32, "I64": torch.int64, "U64": torch.uint64,
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.uint8,  # powers of two, as other writers' U8 has them: exponents
}  # fmt: skip
_MAX_HEADER = 100_000_000  # the format's own limit
_MAX_NUMBERS = 1 << 48  # of a tensor
_MAX_AXES = 64  # of a tensor in torch
_READ = 256 << 20  # bytes per read call


class TensorEntry(NamedTuple):
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  # from the start of the file
    num_bytes: int


class SafetensorsFile:
    def __init__(self, path: str, *, eager: bool = False) -> None:
        self.path = path
        self.size = os.path.getsize(path)
        self.metadata: dict[str, str] = {}  # what its writer says about it
        self.entries = self._directory()  # in file order
        self._mapped = None if eager else MappedFile(path)
        self._whole = as_bytes(self._read() if self._mapped is None else self._mapped.map)

    def expect(self, entry: TensorEntry) -> None:
        """It is read soon: let the system fetch it and what follows."""
        if self._mapped is not None:
            self._mapped.expect(entry.start, entry.num_bytes)

    def read(self, entry: TensorEntry) -> Iterator[tuple[str, Tensor]]:
        """Its name and a view of its bytes; its pages are given back once the next item is asked for."""
        yield entry.name, cut(self._whole, entry.start, entry.num_bytes, entry.dtype, entry.shape)
        if self._mapped is not None:
            self._mapped.forget(entry.start, entry.num_bytes)

    def _read(self) -> bytearray:
        buffer, at = bytearray(self.size), 0
        with open(self.path, "rb", buffering=0) as file:
            while at < self.size and (count := file.readinto(memoryview(buffer)[at : at + _READ])):
                at += count
        if at < self.size:
            raise self._wrong(f"the file became shorter while it was read: {at} of {self.size} bytes")
        return buffer

    def _wrong(self, reason: str) -> CheckpointError:
        return CheckpointError(f"{self.path} is not a usable safetensors file: {reason}")

    def _directory(self) -> list[TensorEntry]:
        if self.size < 8:
            raise self._wrong(f"{self.size} bytes are too few for a header")
        with open(self.path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > min(self.size - 8, _MAX_HEADER):
                raise self._wrong(f"it claims a header of {length} bytes, the file has {self.size}")
            raw = file.read(length)
        try:
            header = json.loads(raw)
        except (ValueError, RecursionError) as wrong:
            raise self._wrong(f"its header is not JSON ({wrong})") from None
        if not isinstance(header, dict):
            raise self._wrong(f"its header is a {type(header).__name__}, not a mapping")
        notes = header.pop("__metadata__", None)
        if isinstance(notes, dict):
            self.metadata = {name: text for name, text in notes.items() if isinstance(text, str)}
        entries = sorted(
            (self._entry(n, i, 8 + length) for n, i in header.items()), key=lambda e: (e.start, e.num_bytes)
        )
        self._check_places(entries, 8 + length)
        return entries

    def _entry(self, name: str, info: Any, data_start: int) -> TensorEntry:
        try:
            kind, shape, (start, end) = info["dtype"], info["shape"], info["data_offsets"]
        except (TypeError, KeyError, ValueError):
            raise self._wrong(f"tensor {name!r} has no proper dtype, shape and data_offsets: {info!r}") from None
        numbers = [*shape, start, end] if isinstance(shape, list) else [None]
        if not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in numbers):
            raise self._wrong(f"tensor {name!r} has shape {shape!r} and data_offsets {[start, end]!r}")
        if not isinstance(kind, str) or kind not in _DTYPES:
            raise self._wrong(f"tensor {name!r} has dtype {kind!r}; known are {', '.join(_DTYPES)}")
        # One size may be 0. Before the product, which would have more digits than can be printed.
        if len(shape) > _MAX_AXES or math.prod(max(size, 1) for size in shape) > _MAX_NUMBERS:
            raise self._wrong(f"tensor {name!r} has shape {shown(shape)}")
        num_bytes = math.prod(shape) * _DTYPES[kind].itemsize
        if end - start != num_bytes:
            raise self._wrong(f"tensor {name!r} ({kind} {shape}) needs {num_bytes} bytes, its place has {end - start}")
        return TensorEntry(name, _DTYPES[kind], tuple(shape), data_start + start, num_bytes)

    def _check_places(self, entries: list[TensorEntry], data_start: int) -> None:
        at, before = data_start, "the header"
        for entry in entries:
            if entry.start != at:
                how = "overlaps" if entry.start < at else "leaves a hole after"
                raise self._wrong(f"tensor {entry.name!r} {how} {before}")
            at, before = entry.start + entry.num_bytes, repr(entry.name)
        if at > self.size:
            raise self._wrong(f"it is truncated: its tensors end at byte {at}, the file has {self.size}")
        if at < self.size:
            raise self._wrong(f"{self.size - at} bytes follow the last tensor")
