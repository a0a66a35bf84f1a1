"""Containers of video and audio, opened by FFmpeg: only from the bytes at hand, only formats that have media in them.

FFmpeg tries every format it knows, some of which name further files or addresses (lists of parts, descriptions of
streams) that it would then open. Must not know: codecs, frames, samples.
"""

from __future__ import annotations

import io
from typing import Any

_FORMATS = (
    "mov", "mp4", "m4a", "3gp", "3g2", "mj2", "matroska", "webm", "avi", "mpegts", "mpeg", "mpegvideo", "flv", "ogg",
    "asf", "gif", "mp3", "wav", "w64", "flac", "aac", "aiff", "amr", "caf", "au",
)  # fmt: skip
_OPTIONS = {"protocol_whitelist": "none", "format_whitelist": ",".join(_FORMATS)}
_PIECE = 1 << 20  # bytes


def open_container(av: Any, data: bytes | memoryview) -> Any:
    """`av`: the package. Its own errors are raised for what is none of these formats."""
    return av.open(as_file(data), mode="r", options=dict(_OPTIONS))


def as_file(data: bytes | memoryview) -> io.BytesIO:
    """Copied in pieces, where it has to be: all other threads wait while one copies a piece."""
    if isinstance(data, bytes):
        return io.BytesIO(data)
    file = io.BytesIO()
    for at in range(0, len(data), _PIECE):
        file.write(data[at : at + _PIECE])
    file.seek(0)
    return file
