"""How vectors are written: numbers, base64, or bytes. In: Pooled, whose bytes are little-endian float32. Must not know:
routes."""

from __future__ import annotations

import base64
import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from quire.llm.scoring import nested
from quire.schema.step import Pooled
from quire.server.pooling.protocol import EncodingFields
from quire.server.route import HttpCall


def raw_bytes(pooled: Pooled, request: EncodingFields) -> bytes:
    """The values in the dtype and byte order that were asked for."""
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


def written(pooled: Pooled, request: EncodingFields) -> Any:
    """A JSON value: lists of numbers, or base64."""
    if request.encoding_format == "base64":
        return base64.b64encode(raw_bytes(pooled, request)).decode()
    return nested(pooled)


def wants_bytes(request: EncodingFields) -> bool:
    return request.encoding_format in ("bytes", "bytes_only")


async def reply_bytes(
    call: HttpCall, request: EncodingFields, common: dict[str, Any], vectors: Sequence[Pooled], name: str
) -> None:
    """All vectors one after the other as the body; where each begins and ends in the header `metadata`."""
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
        headers.append((b"metadata", msgspec.json.encode(about).decode().encode("ascii", "backslashreplace")))
    call.started = True
    await call.send({"type": "http.response.start", "status": 200, "headers": headers})
    await call.send({"type": "http.response.body", "body": b"".join(pieces)})
