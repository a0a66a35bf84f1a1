"""The tensors of a GGUF file as the gguf package reads them, without its vocabulary.

The package makes two arrays of every token, which takes seconds for the embedded model and is of no use to those who
want its weights: arrays of the file's description are stepped over. Nothing of Quire is on this path.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
from gguf import GGUFValueType as Type

_LENGTH = struct.Struct("<Q")


class _Tensors(gguf.GGUFReader):
    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[Type]]:
        if raw_type != Type.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        kind, count = struct.unpack_from("<IQ", self.data, orig_offs)
        end = orig_offs + 12
        if kind == Type.STRING:
            for _ in range(count):
                end += 8 + _LENGTH.unpack_from(self.data, end)[0]
        else:
            end += count * self.gguf_scalar_to_np[Type(kind)]().itemsize
        return end - orig_offs, [], [], [Type.ARRAY, Type(kind)]


def tensors_of(path: str | Path) -> list[gguf.gguf_reader.ReaderTensor]:
    return _Tensors(path).tensors
