"""How vectors are written: numbers, base64, or bytes. In: Pooled, whose bytes are little-endian float32.

A result may have millions of numbers, and one call that writes them all would hold the interpreter: they are written
piece by piece. Must not know: routes.
"""

from __future__ import annotations

import base64
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from quire.schema.step import Pooled
from quire.server.pooling.protocol import EncodingFields

_PIECE = 1 << 14  # numbers that are written at once
_encode = msgspec.json.Encoder().encode


def raw_bytes(pooled: Pooled, request: EncodingFields) -> bytes:
    """The values in the requested dtype and byte order."""
    dtype, order = request.embed_dtype or "float32", request.endianness or "little"
    big = order == "big" or (order == "native" and sys.byteorder == "big")
    if dtype == "float32" and not big:
        return pooled.data
    import numpy as np  # lazy

    values = np.frombuffer(pooled.data, "<f4")
    if dtype == "bfloat16":  # the upper half of each number, rounded to nearest, ties to even
        bits = values.view("<u4").astype(np.uint64)
        words = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
        return bytes(words.astype(">u2" if big else "<u2").tobytes())
    kind = "f2" if dtype == "float16" else "f4"
    return bytes(values.astype(f"{'>' if big else '<'}{kind}").tobytes())


def json_value(pooled: Pooled, request: EncodingFields) -> bytes:
    """JSON: lists of numbers, or base64."""
    if request.encoding_format == "base64":
        return json_base64(raw_bytes(pooled, request))
    return json_numbers(pooled)


def json_numbers(pooled: Pooled) -> bytes:
    """Lists of the result's shape."""
    if 0 in pooled.shape:
        return _encode([[] for _ in range(pooled.shape[0])] if len(pooled.shape) > 1 else [])
    *_, width = pooled.shape
    row_shape = (width,) if len(pooled.shape) > 1 else ()
    row_size = width if row_shape else 1
    values, pieces = memoryview(pooled.data), []
    step = max(1, _PIECE // row_size) * row_size * 4
    for start in range(0, len(values), step):
        part = values[start : start + step]
        shape = (len(part) // (4 * row_size), *row_shape)
        pieces.append(_encode(part.cast("f", shape).tolist())[1:-1])
    return b"[%b]" % b",".join(pieces)


def json_base64(data: bytes) -> bytes:
    step = 12 * _PIECE  # of a multiple of 3 bytes, the encoding can be continued
    pieces = [base64.b64encode(data[start : start + step]) for start in range(0, len(data), step)]
    return b'"%b"' % b"".join(pieces)


def json_answer(head: Mapping[str, Any], name: str, entries: Iterable[bytes]) -> bytes:
    """An object: what is in `head`, and under `name` a list of entries that are JSON already."""
    return b"".join((_encode(head)[:-1], b",", _encode(name), b":[", b",".join(entries), b"]}"))


def wants_bytes(request: EncodingFields) -> bool:
    return request.encoding_format in ("bytes", "bytes_only")


def bytes_answer(
    request: EncodingFields, common: dict[str, Any], vectors: Sequence[Pooled], name: str
) -> tuple[list[tuple[bytes, bytes]], bytes]:
    """Headers and body: all vectors one after the other; the header `metadata` says where each begins and ends."""
    pieces, entries, start = [], [], 0
    for index, pooled in enumerate(vectors):
        piece = raw_bytes(pooled, request)
        entries.append({
            "index": index, "object": name, "embed_dtype": request.embed_dtype or "float32",
            "endianness": request.endianness or "little", "start": start, "end": start + len(piece),
            "shape": list(pooled.shape),
        })  # fmt: skip
        pieces.append(piece)
        start += len(piece)
    headers = [(b"content-type", b"application/octet-stream"), (b"content-length", b"%d" % start)]
    if request.encoding_format == "bytes":
        about = {**common, "data": entries}
        headers.append((b"metadata", _encode(about).decode().encode("ascii", "backslashreplace")))
    return headers, b"".join(pieces)
